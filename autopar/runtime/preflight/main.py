"""`run.py --preflight`: what is wrong with the machines, in seconds and before the run, with what to set.

    own side        facts of this process (facts.py); is the place where all meet reachable at all?
    roll call       facts of all ranks come together in the job's store, for at most MEET_S; who did not come is named
    conclusions     pure functions of these facts (ranks.py, machine.py)
    neighbours      every rank connects to its neighbours, and looks for a file that rank 0 left in the run directory
    links           bandwidth and latency between neighbours against the cluster's description (links.py)

Each part ends the preflight where what it found would make the next one hang. Under torchrun ranks are ranks. Without, ranks
are machines: each says NODE_RANK and MASTER_ADDR, as for launch.sh, and one machine alone checks itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.backends import backend_named
from ..program.machines import Machines
from ..program.manifest import Manifest
from ..program.worlds import WrongWorldSize, manifest_for, started_ranks
from . import machine, ranks
from .facts import Facts, Place, own_facts
from .finding import Check, Expected, Finding, who
from .links import Measured, level_lines, listener, measure, reach_findings, slow_links, unreachable
from .meeting import END_S, POLL_S, CannotMeet, Meeting, meeting_store

MEET_S = 30.0
"""Seconds in which all ranks come; `--timeout`, where that is less."""
LINKS_S = 10.0
"""Seconds that measuring takes at most, beside those in which all ranks come together."""
FOUND = 1
"""Exit status where something stops the run."""


CHECKS: tuple[Check, ...] = (
    ranks.socket_interfaces,
    ranks.addresses,
    ranks.program_files,
    ranks.versions,
    ranks.world_size,
    ranks.order_of_ranks,
    machine.devices,
    machine.shared_memory,
    machine.processors,
    machine.limits,
    machine.run_directory,
)
"""The checks in the order in which a run would stumble over what they find."""


def main(directory: str | Path, backend: str, arguments: argparse.Namespace) -> int:
    """Exit status 0, also where links are slow; where something stops the run the process ends with 1. backend: of the run;
    arguments: of run.py. Raises RuntimeProgramError where there is no program."""
    manifest = Manifest.read(directory)
    if "WORLD_SIZE" in os.environ:
        with contextlib.suppress(WrongWorldSize):  # it is a finding then
            manifest = manifest_for(
                directory, started_ranks(), spares=bool(arguments.run and manifest.worlds), idle=True
            )
    per_node = manifest.machines.ranks_per_node if manifest.machines else manifest.world_size
    place = Place.of(os.environ, per_node, manifest.started)
    beyond = max(place.ranks - manifest.world_size, 0)
    spares = beyond if arguments.run and manifest.worlds else min(beyond, manifest.idle)
    expected = Expected(manifest.world_size + spares, manifest.machines, place.by_machine)
    folders = list(dict.fromkeys((Path(directory), manifest.directory)))
    own = own_facts(place, folders, backend, arguments.run, _wanted(arguments))
    with listener(own.address) as listening:
        own = replace(own, port=listening.getsockname()[1])
        found = _together(own, place, expected, min(MEET_S, arguments.timeout))
    if any(finding.stops for finding in found):
        sys.stdout.flush()
        os._exit(FOUND)  # a thread may still wait for a connection
    return 0


def findings(facts: Sequence[Facts], expected: Expected) -> list[Finding]:
    """Everything that is wrong, what stops the run first. facts: of the ranks that came, in order; of one rank alone where
    others cannot be asked."""
    found = [finding for check in CHECKS for finding in check(facts, expected)]
    return sorted(found, key=lambda one: not one.stops)


def _together(own: Facts, place: Place, expected: Expected, wait_s: float) -> list[Finding]:
    """Meet, conclude, and say it, one rank for all; alone, where the others cannot be met."""
    begun = time.monotonic()
    alone = findings([own], expected)
    if place.ranks == 1:
        return _say(alone, _machine_lines([own]), begun)
    try:
        store = meeting_store(place, wait_s)
    except CannotMeet as error:
        found = [error.finding, *alone]
        return _say(found, [], begun) if place.local_rank == 0 else found
    meeting = Meeting(store, place.rank, place.ranks, wait_s)
    with _mark(own) as mark:
        came = {rank: [Facts.of(one) for one in those] for rank, those in meeting.say("facts", own.as_data()).items()}
        facts = [those[0] for _, those in sorted(came.items()) if those]
        found = ranks.roll_call(place.ranks, came, wait_s, place.by_machine) + findings(facts, expected)
        lines = _machine_lines(facts)
        if len(facts) == place.ranks:
            heard = meeting.say("neighbours", {"far": unreachable(place, facts), "sees": _sees(own, facts[0], mark)})
            seen = {rank: those[-1] for rank, those in heard.items() if those}
            found += reach_findings({rank: [tuple(row) for row in one["far"]] for rank, one in seen.items()}, facts)
            found += _not_shared([facts[rank] for rank, one in seen.items() if not one["sees"]])
    if not any(one.stops for one in found) and not place.by_machine and expected.machines is not None:
        more, said = _links(own, place, facts, expected.machines, meeting)
        found, lines = found + more, lines + said
    if (own.host, own.process) == (facts[0].host, facts[0].process):
        _say(found, lines, begun)
    meeting.end(facts[0].rank)
    return found


def _say(found: list[Finding], lines: Sequence[str], begun: float) -> list[Finding]:
    """Print findings, and what was looked at."""
    for line in lines:
        print(line, flush=True)
    for finding in found:
        print(finding.text, file=sys.stderr, flush=True)
    said = f"{len(found)} finding{'s' if len(found) > 1 else ''}" if found else "nothing found"
    print(f"preflight: {said} in {time.monotonic() - begun:.1f} s", flush=True)
    return found


def _machine_lines(facts: Sequence[Facts]) -> list[str]:
    hosts = {one.host: one for one in facts}
    return [
        f"{len(facts)} came, from {len(hosts)} machines: {who(facts)}; {facts[0].backend}, torch {torch.__version__}"
    ]


def _wanted(arguments: argparse.Namespace) -> list[str]:
    """Paths that arguments name and that must be there."""
    data = (arguments.data or "").rpartition(":")[0]
    return [path for path in (data if data.endswith(".py") else "", arguments.weights, arguments.resume) if path]


# ---- the run directory is one


def _mark_path(facts: Facts) -> Path:
    return Path(facts.run) / f".preflight-{facts.host}-{facts.process}-mark"


@contextlib.contextmanager
def _mark(own: Facts) -> Iterator[bool]:
    """A file of rank 0 in the run directory, for as long as others look for it; whether this rank has left it."""
    leaves = own.rank == 0 and bool(own.run) and not own.writable
    with contextlib.suppress(OSError):
        if leaves:
            _mark_path(own).touch()
    try:
        yield leaves
    finally:
        with contextlib.suppress(OSError):
            if leaves:
                _mark_path(own).unlink()


def _sees(own: Facts, first: Facts, left: bool) -> bool:
    """Whether this rank sees the file that rank 0 left; file systems over a network may take a moment."""
    if not own.run or own.writable or first.writable or left:
        return True
    end = time.monotonic() + END_S
    while not _mark_path(first).exists():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _not_shared(blind: Sequence[Facts]) -> list[Finding]:
    if not blind:
        return []
    evidence = f"{blind[0].run} is not the directory that rank 0 has under this name"
    remedy = "give --run-dir on a file system that all machines share: every rank writes its part of a checkpoint there"
    return [Finding("run directory", who(blind), evidence, remedy)]


# ---- links


def _links(
    own: Facts, place: Place, facts: Sequence[Facts], machines: Machines, meeting: Meeting
) -> tuple[list[Finding], list[str]]:
    """Measure them; findings, and lines to show."""
    backend, measured, failures = backend_named(own.backend), list[Measured](), list[str]()

    def work() -> None:
        try:
            device = backend.device(place.local_rank)
            backend.module.set_device(device)
            of_thread: dist.Store = meeting.store.clone()  # type: ignore[attr-defined]  # the rank's may be waiting
            store, timeout = dist.PrefixStore("group", of_thread), timedelta(seconds=meeting.wait_s)
            dist.init_process_group(own.backend, store=store, rank=place.rank, world_size=place.ranks, timeout=timeout)
            measured.extend(measure(place, machines.links, device))
        except RuntimeError as error:
            failures.append(str(error).splitlines()[0][:300])

    thread = threading.Thread(
        target=work, name="links", daemon=True
    )  # who cannot connect waits for longer than was asked
    thread.start()
    thread.join(LINKS_S + meeting.wait_s)
    problem = f"did not come together in {LINKS_S + meeting.wait_s:.0f} s" if thread.is_alive() else "".join(failures)
    heard = meeting.say("links", {"problem": problem, "measured": [asdict(one) for one in measured]})
    told = {rank: those[-1] for rank, those in heard.items() if those}
    failed = [facts[rank] for rank, one in told.items() if one["problem"]]
    if failed:
        problem, remedy = told[failed[0].rank]["problem"], backend.transport.join_remedy
        return [Finding("process group", who(failed), problem, remedy)], []
    dist.destroy_process_group()
    every = [Measured(**{**row, "ranks": tuple(row["ranks"])}) for one in told.values() for row in one["measured"]]
    return slow_links(every, machines, facts), list(level_lines(every, machines))
