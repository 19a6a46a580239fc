"""`autopar-calibrate [--quick] -o profile.json`: measures this machine for the cost model.

A cluster file uses the result with `profile: profile.json`. Under torchrun, the collectives of all its ranks are
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.runtime.data.whole_files import replace_file


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0, or 2 when the profile cannot be written."""
    parser = argparse.ArgumentParser(prog="autopar-calibrate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions: seconds instead of minutes")
    parser.add_argument(
        "--ranks", type=int, help="processes for the collectives (default: one per GPU, or 2); 1 skips them"
    )
    parser.add_argument("-o", "--output", default="profile.json", help="where to write the profile")
    args = parser.parse_args(argv)
    path = Path(args.output)
    if not path.resolve().parent.is_dir():
        print(
            f"autopar-calibrate: the folder of {path} does not exist; create it or choose another -o", file=sys.stderr
        )
        return 2

    from autopar.costmodel.calibrate import calibrate

    console = Console()
    with console.status("measuring") as status:
        profile = calibrate(quick=args.quick, ranks=args.ranks, say=lambda text: status.update(text))
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    replace_file(path, (json.dumps(profile, indent=1) + "\n").encode())
    table = Table(title=f"fit on this machine (base: {profile['base']})")
    table.add_column("constant")
    table.add_column("value", justify="right")
    device = profile["device"]
    for dtype, rate in device.get("peak_flops", {}).items():
        table.add_row(f"peak {dtype}", f"{rate / 1e9:,.1f} GFLOP/s")
    for name, value in device["curve"].items():
        table.add_row(f"curve: {name}", f"{value:.3g}")
    if "memory_bandwidth_Bps" in device:
        table.add_row("memory", f"{device['memory_bandwidth_Bps'] / 1e9:.1f} GB/s")
    table.add_row("launch", f"{device['launch_overhead_s'] * 1e6:.1f} us")
    for level, link in profile["links"].items():
        table.add_row(f"{level}: B", f"{link['bandwidth_Bps'] / 1e9:.2f} GB/s")
        table.add_row(f"{level}: a", f"{link['base_s'] * 1e6:.0f} us")
    console.print(table)
    left = Table(title="residuals (median relative error of the fit)")
    left.add_column("measurement")
    left.add_column("residual", justify="right")
    for name, value in profile["residuals"].items():
        left.add_row(name, f"{value:.1%}")
    console.print(left)
    console.print(f"wrote {path}; use it with `profile: {path}` in a cluster file")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
