"""A picture of what keeping less for backward costs: a curve per stage from bytes to seconds, policies and the plan on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.recompute.curve import Curve
from autopar.report.gantt import seconds_text
from autopar.report.picture import empty_picture, svg_text

_COLOURS = ("#5b8ff9", "#61c08a", "#f4a742", "#b37feb", "#ff7875", "#36cfc9")
_WIDTH, _HEIGHT = 760, 420


def curve_svg(stages: Sequence[Curve], title: str = "", size_text: Callable[[float], str] = str) -> str:
    """The curves of all stages; those that are alike share a line. Raises InputError where matplotlib is missing."""
    numbers: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        numbers.setdefault(repr(stage), []).append(number)
    alike = list(zip(numbers.values(), _COLOURS, strict=False))
    figure, axes = empty_picture(
        84 + _WIDTH + 40, 36 + _HEIGHT + 56 + 18 * len(alike), left=84, right=40, top=36, bottom=56 + 18 * len(alike)
    )
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", parse_math=False)
    axes.set_xlabel("kept for backward by a microbatch, per rank")
    axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(nbytes))
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
    hints: dict[str, str] = {}
    for k, (members, colour) in enumerate(alike):
        stage = stages[members[0]]
        named = f"stage {members[0]}" if len(members) == 1 else f"stages {members[0]} … {members[-1]} ({len(members)})"
        kept, again = zip(*stage.corners, strict=True)
        axes.plot(kept, again, color=colour, linewidth=2, gid=f"curve {k}", label=f"{named}; the circle is the plan")
        for name, (nbytes, seconds) in {**stage.policies, "the plan": stage.chosen}.items():
            chosen = name == "the plan"
            style = {"markersize": 14, "markerfacecolor": "none", "color": "#222222"} if chosen else {"color": colour}
            axes.plot(nbytes, seconds, marker="o", clip_on=False, gid=f"{name} {k}", **style)
            hints[f"{name} {k}"] = f"{name}: {size_text(nbytes)}, {seconds_text(seconds)} made again"
            if not chosen:
                axes.annotate(name, (nbytes, seconds), (7, 5), textcoords="offset points", color="#333333")
    axes.set(xlim=(0, None), ylim=(0, None))
    figure.legend(loc="lower left", frameon=False)
    return svg_text(figure, hints)
