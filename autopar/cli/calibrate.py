"""`autopar calibrate [--quick] -o profile.json`: measures this machine for the cost model.

A cluster file uses the result with `profile: profile.json`. Under torchrun, the collectives of all its ranks are
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli.command import Commands, add, alone
from autopar.cli.terminal import show, status
from autopar.costmodel.calibrate import calibrate
from autopar.errors import InputError
from autopar.report.table import Table
from autopar.runtime.data.whole_files import replace_file

EXAMPLE = "autopar calibrate --quick --ranks 1 -o profile.json"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "calibrate", run, __doc__, EXAMPLE)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions: seconds instead of minutes")
    parser.add_argument(
        "--ranks", type=int, help="processes for the collectives (default: one per GPU, or 2); 1 skips them"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"), help="where to write the profile")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON too")


def run(args: argparse.Namespace) -> int:
    """Measure, write the profile and print it; 0. Raises InputError where it cannot be written."""
    path: Path = args.output
    if not path.resolve().parent.is_dir():
        raise InputError(f"the folder of {path} does not exist; create it or choose another -o")
    with status("measuring") as say:
        profile = calibrate(quick=args.quick, ranks=args.ranks, say=say)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    written = json.dumps(profile, indent=1)
    replace_file(path, (written + "\n").encode())
    if args.json:
        print(written)
        return 0
    title = f"fit on this machine (base: {profile['base']})"
    show(Table(("constant", "value"), list(constants(profile)), right=(1,), title=title))
    residuals = [(name, f"{value:.1%}") for name, value in profile["residuals"].items()]
    show(
        "",
        Table(("measurement", "residual"), residuals, right=(1,), title="residuals (median relative error of the fit)"),
    )
    show(f"wrote {path}; use it with `profile: {path}` in a cluster file")
    return 0


def constants(profile: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The constants that were fitted, by name."""
    device = profile["device"]
    for dtype, rate in device.get("peak_flops", {}).items():
        yield f"peak {dtype}", f"{rate / 1e9:,.1f} GFLOP/s"
    for name, value in device["curve"].items():
        yield f"curve: {name}", f"{value:.3g}"
    if "memory_bandwidth_Bps" in device:
        yield "memory", f"{device['memory_bandwidth_Bps'] / 1e9:.1f} GB/s"
    yield "launch", f"{device['launch_overhead_s'] * 1e6:.1f} us"
    for level, link in profile["links"].items():
        yield f"{level}: B", f"{link['bandwidth_Bps'] / 1e9:.2f} GB/s"
        yield f"{level}: a", f"{link['base_s'] * 1e6:.0f} us"


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-calibrate`, the command as a program of its own."""
    return alone("calibrate", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
