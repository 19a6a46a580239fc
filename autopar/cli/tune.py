"""`autopar tune OUT [-- torchrun's options]`: measures the plans that `program.save(OUT, candidates=…)` wrote, and keeps one.

Plans take turns, `--rounds` times, each in ranks of its own that `torchrun` starts: on one machine with as many
processes as the program has ranks, else with the options after `--`, on every machine at once. `run.py` then
runs the fastest (OUT/tuned.json says which; without that file it runs the one that was predicted to be). What the runs
say about the cluster is written to OUT/learned.json, a cluster file for the next `compile`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.cli import started
from autopar.cli.command import INTERRUPTED, Commands, add, alone
from autopar.cli.saved import Saved, read
from autopar.cli.saved_profile import read_profile
from autopar.cli.terminal import show
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.ir.text import time_text
from autopar.report.learned import learned
from autopar.report.predicted_vs_measured import Profile
from autopar.report.table import Table
from autopar.runtime.comm.backends import BACKENDS
from autopar.runtime.data.whole_files import current, replace_file
from autopar.runtime.program.manifest import TUNED

LEARNED = "learned.json"


@dataclass
class Candidate:
    """A program of the directory, and what its runs took. failed: what the last one said that did not end well."""

    folder: Path
    saved: Saved
    runs: list[Profile] = field(default_factory=list)
    failed: str = ""

    @property
    def step_s(self) -> float:
        """The median of its runs' steps; nothing where one failed."""
        return statistics.median(run.step_s for run in self.runs) if self.runs and not self.failed else float("inf")

    @property
    def shown(self) -> str:
        """The plan in words."""
        return f"{self.saved.plan.origin} {self.saved.plan.show_meshes()}"

    def as_data(self, directory: Path) -> dict[str, Any]:
        """The plan and its seconds as plain data. directory: of the program that it is a candidate of."""
        return {
            "folder": str(self.folder.relative_to(current(directory))),
            "plan": self.shown,
            "predicted_s": self.saved.program.predicted.step_time_s,
            "measured_s": None if self.failed else self.step_s,
            "failed": self.failed,
        }


def candidates_of(directory: Path) -> list[Candidate]:
    """The directory's own program, then those beside it. Raises InputError."""
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; give one that program.save(…) wrote")
    beside = sorted(path.parent for path in (directory / "candidates").glob("*/manifest.json"))
    if not beside:
        raise InputError(
            f"{directory} has one plan alone, so there is nothing to choose; write more of them with "
            f"program.save({str(directory)!r}, candidates=3)"
        )
    return [Candidate(folder, read(folder)) for folder in (directory, *beside)]


def measure(one: Candidate, arguments: argparse.Namespace, profile: Path) -> None:
    """Run a candidate for some steps and keep what was recorded."""
    options = arguments.more or ["--standalone", "--nproc-per-node", str(one.saved.program.ranks)]
    weights = arguments.weights or next((w for w in [arguments.directory / "weights"] if w.is_dir()), None)
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(one.folder / "run.py")]
    command += ["--steps", str(arguments.steps), "--profile", str(profile)]
    for name, value in (("weights", weights), ("data", arguments.data), ("backend", arguments.backend)):
        command += [f"--{name}", str(value)] if value else []
    run = started.run(command, arguments.timeout)
    if run is None:
        one.failed = f"took longer than {arguments.timeout:g} s"
        return
    if run.returncode:
        said = [line for line in (run.stdout + run.stderr).splitlines() if line.startswith("error")]
        one.failed = said[0] if said else f"ended with status {run.returncode}: {run.stderr.strip()[-200:]}"
        return
    recorded = read_profile(profile, one.saved.program.ranks)
    one.runs.append(Profile(tuple(steps[arguments.warmup :] for steps in recorded.ranks)))


def tune(arguments: argparse.Namespace) -> list[Candidate]:
    """All candidates, measured in turns, the fastest first; which that is and what was learned is written down. Raises
    InputError."""
    directory = current(arguments.directory)
    (directory / TUNED).unlink(missing_ok=True)
    candidates = candidates_of(directory)
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(arguments.rounds):
            for n, one in enumerate(candidates):
                if not one.failed:
                    print(f"round {turn + 1}: {one.shown}", file=sys.stderr, flush=True)
                    measure(one, arguments, Path(scratch) / f"{turn}-{n}")
    fastest, *_ = ranked = sorted(candidates, key=lambda one: one.step_s)
    if fastest.step_s == float("inf"):
        raise InputError("no plan could be run: " + "; ".join(f"{one.shown}: {one.failed}" for one in candidates))
    rows = [one.as_data(directory) for one in candidates]
    chosen = None if fastest is candidates[0] else str(fastest.folder.relative_to(directory))
    cluster = ClusterSpec.from_dict(candidates[0].saved.program.cluster_described)
    known = learned(cluster, [(one.saved.program, run) for one in candidates for run in one.runs])
    for name, data in ((LEARNED, known.to_dict()), (TUNED, {"folder": chosen, "measured": rows})):
        replace_file(directory / name, (json.dumps(data, indent=1) + "\n").encode())
    return ranked


EXAMPLE = "autopar tune out/mlp --steps 6 --rounds 1"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "tune", run, __doc__, EXAMPLE)
    parser.add_argument("directory", type=Path, help="what program.save(…, candidates=…) wrote")
    parser.add_argument("--steps", type=int, default=12, help="of every run (default: 12)")
    parser.add_argument("--warmup", type=int, default=3, help="of them, not counted (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every plan (default: 2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take (default: 600)")
    parser.add_argument("--data", help="as run.py takes it")
    parser.add_argument("--weights", help="as run.py takes it (default: those of the directory)")
    parser.add_argument("--backend", choices=tuple(BACKENDS))
    parser.add_argument("--json", action="store_true", help="the plans with their seconds, as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure the plans, and print them; 0, or 130 after Ctrl-C (other signals: 128 and their number). Raises InputError."""
    if not 0 <= args.warmup < args.steps or args.rounds < 1:
        raise InputError("--steps must be more than --warmup, and --rounds at least 1")
    try:
        with started.interruptible():
            ranked = tune(args)
    except KeyboardInterrupt:
        print(f"{args.prog}: interrupted; what it started was ended, and no plan is chosen", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        print(json.dumps({"plans": [one.as_data(args.directory) for one in ranked]}, indent=1))
        return 0
    rows = [
        (
            "*" if one is ranked[0] else "",
            one.shown,
            "failed" if one.failed else time_text(one.step_s),
            time_text(one.saved.program.predicted.step_time_s),
        )
        for one in ranked
    ]
    show(Table(("", "plan", "step", "predicted"), rows, right=(2, 3)))
    for one in ranked:
        if one.failed:
            show(f"{one.shown} failed: {one.failed}")
    show(f"{args.directory / 'run.py'} runs the first; {args.directory / LEARNED} is the cluster as measured")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-tune`, the command as a program of its own."""
    return alone("tune", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
