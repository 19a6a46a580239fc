"""`autopar dump OUT`: what a saved program is, from its plan.json and program.json.

autopar dump OUT                         a screenful: the answer, the mesh, stages, what is where, the largest messages
autopar dump OUT --all                   everything: plan, mesh, calls, sharded graph, schedule, collectives, parameters
autopar dump OUT --section collectives   one part
autopar dump OUT --section schedule      the pipeline as a Gantt chart
autopar dump OUT --section memory        bytes by kind, and what keeping less for backward would cost
autopar dump OUT --rank 3                the code of rank 3
autopar dump OUT --section graph --format svg > graph.svg     the sharded graph; so does --format dot, for Graphviz
autopar dump OUT --format svg > schedule.svg
autopar dump OUT --section memory --format svg > memory.svg
autopar dump OUT --format chrome-trace > trace.json      for Perfetto
autopar dump OUT --format html > plan.html               all of it as a page
autopar dump OUT --profile DIR           what `run.py --profile DIR` recorded, beside the prediction; svg, chrome-trace, html too
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.cli.advised import of_saved
from autopar.cli.command import Commands, add, alone
from autopar.cli.dump_sections import SECTIONS, as_json, blocks
from autopar.cli.dump_summary import summary
from autopar.cli.pictures.dot import as_dot
from autopar.cli.pictures.svg import graph_svg
from autopar.cli.saved import Saved, read
from autopar.cli.saved_profile import read_profile
from autopar.cli.terminal import show
from autopar.costmodel.simulate import as_trace
from autopar.errors import InputError
from autopar.ir.text import size_text
from autopar.report.curve import curve_svg
from autopar.report.gantt import svg
from autopar.report.page import page_html
from autopar.report.predicted_vs_measured import Profile, predicted_vs_measured_text
from autopar.report.recorded import measured_timeline, trace_rows


def as_svg(saved: Saved, sections: Sequence[str]) -> str:
    """The schedule as a picture, or the sharded graph, or what keeping less for backward would cost, where that section alone is
    asked for.

    Raises InputError for the memory of a program without backward.
    """
    if sections == ["graph"]:
        return graph_svg(saved)
    if sections != ["memory"]:
        return svg(saved.timeline())
    program = saved.program
    if not program.recompute:
        raise InputError("--section memory --format svg shows what recompute costs; this program has no backward")
    return curve_svg(program.recompute, f"{program.model}: what keeping less costs in a step", size_text)


FORMATS: dict[str, Callable[[Saved, Sequence[str]], str]] = {
    "json": as_json,
    "dot": lambda saved, sections: as_dot(saved),
    "svg": as_svg,
    "chrome-trace": lambda saved, sections: saved.timeline().chrome_trace(),
    "html": lambda saved, sections: _page(saved),
}
"""Formats beside text."""


def _page(saved: Saved, profile: Profile | None = None) -> str:
    """The page of a program, with what limits its step."""
    return page_html(saved.program, saved.plan, profile, advice=of_saved(saved, profile).facts())


def _recorded(saved: Saved, directory: Path, form: str) -> str:
    """A recorded run beside the prediction. Raises InputError."""
    profile, facts = read_profile(directory, saved.program.ranks), saved.program
    if form == "text":
        return predicted_vs_measured_text(facts, profile)
    if form == "chrome-trace":
        return as_trace([*saved.timeline().trace_rows(), *trace_rows(profile)])
    if form == "svg":
        return svg(saved.timeline().beside(measured_timeline(facts, profile)), "predicted and measured")
    if form == "html":
        return _page(saved, profile)
    raise InputError(f"--profile is shown as text, svg, chrome-trace or html, not as {form}")


EXAMPLE = "autopar dump out/mlp"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "dump", run, __doc__, EXAMPLE)
    parser.add_argument("directory", type=Path, help="what program.save(…) wrote")
    parser.add_argument("--format", choices=("text", *FORMATS), default="text")
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="as --format json")
    parser.add_argument("--section", choices=tuple(SECTIONS), action="append", help="only this; may be given again")
    parser.add_argument(
        "--all", action="store_true", help="every section, instead of a screenful of the most important"
    )
    parser.add_argument("--rank", type=int, help="the code of this rank instead")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="what run.py --profile recorded there, instead")


def run(args: argparse.Namespace) -> int:
    """Print what is asked for; 0. Raises InputError."""
    saved = read(args.directory)
    if args.profile is not None:
        show(_recorded(saved, args.profile, args.format))
    elif args.rank is not None:
        show(saved.rank_code(args.rank))
    elif args.format != "text":
        print(FORMATS[args.format](saved, args.section or list(SECTIONS)))
    elif args.section or args.all:
        show(*blocks(saved, args.section or list(SECTIONS)))
    else:
        show(*summary(saved))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-dump`, the command as a program of its own."""
    return alone("dump", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
