"""The command line: `make gpu`, or `python -m benchmarks.gpu_report`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.machine import Machine
from benchmarks.gpu_report.parts import BY_NAME, PARTS, Part
from benchmarks.gpu_report.separate import Outcome, run_part

FORMAT = 1


def say(text: str) -> None:
    print(text, flush=True)


def report(parts: Sequence[Part], rehearsal: bool, out: Path) -> dict[str, Any]:
    """Run the parts one after the other; the file is written again after each."""
    made: dict[str, Any] = {"format": FORMAT, "rehearsal": rehearsal, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), rehearsal)
        for place, part in enumerate(parts, 1):
            say(f"[{place}/{len(parts)}] {part.name}: {part.title} (up to {part.limit_s:.0f} s)")
            outcome = left_out(part, machine.ranks) or run_part(
                part.name, part.limit_s, machine.folder, rehearsal, lambda name: say(f"    {name}")
            )
            made["parts"][part.name] = dataclasses.asdict(outcome)
            out.write_text(json.dumps(made, indent=1) + "\n")
            say(f"    {outcome.state} after {outcome.seconds:.0f} s")
    return made


def left_out(part: Part, devices: int) -> Outcome | None:
    """The outcome of a part that needs more devices than there are."""
    if devices >= part.devices:
        return None
    return Outcome("left out", 0.0, f"needs {part.devices} GPUs, and here is {devices}", {})


def told(made: dict[str, Any]) -> list[str]:
    """The report in words."""
    text = []
    for name, outcome in made["parts"].items():
        text.append(f"\n== {BY_NAME[name].title} ({outcome['state']}, {outcome['seconds']:.0f} s)")
        try:
            text += BY_NAME[name].module.lines(outcome["found"]) if outcome["found"] else []
        except Exception as error:  # of a record that is not whole; the file has it as it is
            text.append(f"(not told: {type(error).__name__}: {error})")
        text += [outcome["why"]] if outcome["why"] else []
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report. Status 0: the file is there, whatever became of the parts; 2: no GPU, and no rehearsal asked for."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=f"of {', '.join(BY_NAME)} (default: all)")
    parser.add_argument("--rehearse", action="store_true", help="the same ways on the processor: numbers say nothing")
    parser.add_argument("--out", type=Path, help="the file to write (default: gpu_report_TIME.json)")
    arguments = parser.parse_args(argv)
    names = [name for names in arguments.parts or [",".join(BY_NAME)] for name in names.split(",")]
    if unknown := set(names) - BY_NAME.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; parts are {', '.join(BY_NAME)}")
    if not arguments.rehearse and Machine(Path()).backend.is_host:
        say("torch sees no GPU here. `make gpu ARGS=--rehearse` goes the same ways on the processor")
        return 2
    out = arguments.out or Path(f"gpu_report_{time.strftime('%Y%m%d_%H%M%S')}.json")
    made = report([part for part in PARTS if part.name in names], arguments.rehearse, out)
    say("\n".join(told(made)))
    say(f"\nThe report is whole: please send the file {out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
