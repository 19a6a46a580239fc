"""Machines whose ranks fail again and again, or that are slow, are left out of a run.

When a run starts again, rank 0 first concludes from what ranks left of the start before who ended it, and writes that down
in the directory of the run; what ranks of several machines ended is nobody's failure. With `--exclude-after N` a machine that
ended it N times in a day is left out, with `--exclude-slow N` one that was slow so often in a row: its ranks end
their torchrun, which does not come back, and all others start again without it. That needs torchruns that go on with fewer
machines (`--nnodes MIN:MAX`), and ranks for the smallest program of the directory. Where these would be too few the run
goes on with the machine, and says so. `excluded` in the directory tells whoever starts the job next (slurm.sh looks there).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist

from ..comm.comm import Comm
from ..comm.environment import machine_name
from ..data.datafile import open_lines, parse_json, read_bytes
from ..data.fields import Paragraph, from_data
from ..data.schema import SchemaError, choice, number
from ..errors import RuntimeProgramError
from ..health.flight import FLIGHT, set_aside
from ..health.flight_files import conclusion, read_flights
from ..health.launcher import launcher
from ..program.worlds import started_ranks
from .spares import AGAIN
from .stop import Stop
from .train_loop import tell

LEDGER, EXCLUDED = "failures.jsonl", "excluded"
FAILED, SLOW = "failed", "slow"
WITHIN_S = 86400.0
"""Failures further apart are not counted together."""
LEAVING_S = 60.0
"""Seconds that a torchrun has to end its ranks."""


@dataclass(frozen=True)
class Failure:
    """kind: FAILED, it ended the run, or SLOW, it was to be left out for that. at: seconds since the epoch."""

    at: Annotated[float, number(0, 1e12)]
    machine: str
    kind: Annotated[str, choice((FAILED, SLOW))]
    why: Paragraph


def note(root: Path, failure: Failure) -> None:
    """Write it down. One rank calls this."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open_lines(root / LEDGER) as file:
            file.write((json.dumps(asdict(failure)) + "\n").encode())
    except OSError as error:
        print(f"{root / LEDGER}: {error.strerror or error}; not noted: {failure.why}", file=sys.stderr, flush=True)


def failures(root: Path) -> list[Failure]:
    """All that were written down; lines that are damaged are named and left out."""
    found = []
    path = root / LEDGER
    try:
        lines = read_bytes(path).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, SchemaError) as error:
        said = getattr(error, "strerror", None) or error
        print(f"{path}: {said}; no failure of a machine is counted", file=sys.stderr, flush=True)
        return []
    for place, line in enumerate(lines, 1):
        try:
            found.append(from_data(Failure, parse_json(line.decode())))
        except ValueError as error:
            print(f"{path}:{place} is damaged ({error}) and not counted", file=sys.stderr, flush=True)
    return found


def last_failure(root: Path) -> Failure | None:
    """Who ended the start before, if it was the ranks of one machine."""
    try:
        left = read_flights(root)
    except RuntimeProgramError:
        return None
    names, found = next(iter(left.values())).machines, conclusion(left)
    machines = {names[rank] for rank in found.culprits if rank < len(names)}
    return Failure(time.time(), machines.pop(), FAILED, found.text) if len(machines) == 1 else None


def begin_start(root: Path) -> None:
    """Note who ended the start before, and give what its ranks left another name. Rank 0 calls it, before others can fail."""
    failure = last_failure(root)
    if failure is not None:
        note(root, failure)
    set_aside(root / FLIGHT)


def unwanted(found: Sequence[Failure], most: int, slow: bool, now: float) -> dict[str, str]:
    """Machines that are to be left out, and why. most: failures, from which on one is (0: never); slow: those that were, too."""
    reasons: dict[str, str] = {}
    for machine in dict.fromkeys(failure.machine for failure in found):
        own = [one for one in found if one.machine == machine and abs(now - one.at) < WITHIN_S]  # clocks jump
        ended = [one for one in own if one.kind == FAILED]
        slowed = [one for one in own if one.kind == SLOW]
        if most and len(ended) >= most:
            reasons[machine] = (
                f"ended this run {len(ended)} times in {WITHIN_S / 3600:.0f} hours, last so: {ended[-1].why}"
            )
        elif slow and slowed:
            reasons[machine] = slowed[-1].why
    return reasons


def too_few(machines: Sequence[str], without: Sequence[str], least: int) -> str:
    """Why these machines cannot be left out; empty where they can. machines: by rank; least: ranks of the smallest program."""
    ranks = sum(machine not in without for machine in machines)
    if ranks >= least:
        return ""
    return (
        f"{ranks} ranks would be left, and the smallest program is for {least}; write it for fewer (program.save(…, also=[…])), "
        "or start the run without this machine"
    )


def leave_out(store: dist.Store, rank: int, arguments: argparse.Namespace, least: int) -> bool:
    """Whether this start is over, as a machine leaves the run; all ranks of a round call it, spares too.

    store: of this round; least: ranks of the smallest program.
    """
    root, names = Path(arguments.run), dist.PrefixStore("machines", store)
    if rank == 0:
        begin_start(root)
    if not (arguments.exclude_after or arguments.exclude_slow):
        return False
    names.set(str(rank), machine_name())
    if rank == 0:
        machines = [names.get(str(other)).decode() for other in range(int(os.environ["WORLD_SIZE"]))]
        reasons = unwanted(failures(root), arguments.exclude_after, bool(arguments.exclude_slow), time.time())
        names.set("leaving", json.dumps(_leaving(root, machines, reasons, least)))
    leaving = json.loads(names.get("leaving"))
    if machine_name() in leaving:
        _end_torchrun()
    return bool(leaving)


def _leaving(root: Path, machines: Sequence[str], reasons: dict[str, str], least: int) -> list[str]:
    """Machines that leave now. Writes the names of all that should."""
    with suppress(OSError):
        (root / EXCLUDED).unlink(missing_ok=True)
        if reasons:
            (root / EXCLUDED).write_text("".join(f"{machine}\n" for machine in sorted(reasons)), encoding="utf-8")
    leaving: list[str] = []
    for machine in (machine for machine in reasons if machine in machines):
        problem = too_few(machines, [*leaving, machine], least)
        if not problem:
            leaving.append(machine)
        said = f"it is not left out: {problem}" if problem else "it is left out"
        print(f"machine {machine} {reasons[machine]}; {said}", file=sys.stderr, flush=True)
    return leaving


def _end_torchrun() -> None:
    """A torchrun that is asked to go ends its ranks and does not start them again; one whose ranks end does."""
    torchrun = launcher()
    if torchrun is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        os.kill(torchrun.pid, signal.SIGTERM)
    time.sleep(LEAVING_S)


class SlowMachines:
    """Counts, on rank 0, how often in a row machines were named as slow; one that was often enough ends the run soon, so that it
    starts again without it."""

    def __init__(self, root: Path, times: int, machines: Sequence[str], least: int, comm: Comm, stop: Stop) -> None:
        """root: of the run; times: from which on a machine leaves (0: never); machines: by rank; least: ranks of the smallest
        program."""
        self._root, self._times, self._machines, self._least = root, times, machines, least
        self._comm, self._stop = comm, stop
        self._in_a_row: dict[str, int] = {}

    def count(self, step: int, slow: set[str], text: str) -> None:
        """Machines were looked at. step: about to begin; slow: machines; text: about them."""
        self._in_a_row = {machine: self._in_a_row.get(machine, 0) + 1 for machine in slow}
        for machine in sorted(machine for machine, count in self._in_a_row.items() if count == self._times):
            spares = [""] * (started_ranks() - self._comm.world_size)
            if problem := too_few([*self._machines, *spares], [machine], self._least):
                tell(self._comm, f"step {step}: machine {machine} is not left out: {problem}", sys.stderr)
                continue
            with self._comm.excused("noting a slow machine"):
                noted = machine in unwanted(failures(self._root), 0, True, time.time())
                if not noted:
                    why = f"was slow {self._times} times in a row, last at step {step}: {text}"
                    note(self._root, Failure(time.time(), machine, SLOW, why))
            if not noted:
                self._stop.ask(step, AGAIN)
