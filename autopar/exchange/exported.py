"""A program's plan written in a format, with what the format leaves out and what that costs.

The layout that the files say is compiled again under `options_of`, and its seconds and bytes are held against the plan's: the
price is the one that every plan has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.compiled import Compiled, Prediction
from autopar.errors import AutoparError, EmitError, InputError
from autopar.exchange.formats import format_named
from autopar.exchange.from_plan import counts_over_the_batch, facts_of, layout_of
from autopar.exchange.keys import Facts, Written
from autopar.exchange.layout import Layout, NotCarried
from autopar.exchange.to_options import differences, options_of
from autopar.ir.text import size_text
from autopar.request import Request
from autopar.runtime.data.whole_files import replace_file


@dataclass(frozen=True)
class Exchangeable:
    """A plan as formats take it: its layout, the facts that they may say beside, and the decisions that no layout has."""

    layout: Layout
    facts: Facts
    apart: tuple[NotCarried, ...]
    predicted: Prediction


@dataclass(frozen=True)
class Exported:
    """The outcome of an export. files: their paths. layout: what they say. not_carried: decisions that they leave out.
    near: the points in which what is priced is only near the layout.

    plan: the prediction for the program's own plan; exported: that for the layout as it was exported, None where it was not
    compiled, and unpriced then says why. over_bytes: bytes that the exported layout has too many for the fullest device.
    """

    format: str
    files: tuple[Path, ...]
    layout: Layout
    not_carried: tuple[NotCarried, ...]
    near: tuple[str, ...]
    plan: Prediction
    exported: Prediction | None
    unpriced: str = ""
    over_bytes: float = 0.0

    def __str__(self) -> str:
        """The outcome in words, a line for each."""
        lines = [f"wrote {', '.join(map(str, self.files))} ({self.format})"]
        if self.exported is None:
            lines.append(f"what the exported layout costs is not known: {self.unpriced}")
        else:
            before, after = self.plan, self.exported
            share = after.step_time_s / before.step_time_s - 1 if before.step_time_s else 0.0
            lines.append(
                f"step {before.step_time_s:.4g} s under the plan, {after.step_time_s:.4g} s as exported ({share:+.1%}); "
                f"peak {size_text(before.peak_bytes)} and {size_text(after.peak_bytes)}"
            )
        if self.over_bytes > 0:
            lines.append(
                f"the exported layout does not fit: {size_text(self.over_bytes)} too many on the fullest device"
            )
        lines += [f"priced with {point}" for point in self.near if self.exported is not None]
        lines += [f"not carried: {one}" for one in self.not_carried]
        return "\n".join(lines)


def exchangeable(program: Compiled) -> Exchangeable:
    """A program's plan as formats take it."""
    layout, apart = layout_of(program)
    loss = counts_over_the_batch(program, layout.dp or 1)
    return Exchangeable(
        layout, facts_of(program), (*apart, *(() if loss is None else (loss,))), program.decision.predicted
    )


def write_plan(plan: Exchangeable, name: str, path: Path, unpriced: str) -> Exported:
    """Write a plan in a format. path: a folder, or the file itself where there is one file alone; unpriced: why what it costs is
    not known. Raises InputError for an unknown format, or stages on other numbers of ranks than each other where the format has
    stages; EmitError where files cannot be written."""
    write = format_named(name).write
    try:
        written = write(plan.layout, plan.facts)
    except InputError as error:
        if plan.layout.ranks in (None, plan.facts.ranks):
            raise
        raise InputError(
            f"{name} has one mesh for all stages, and this plan's stages are on other numbers of ranks than each other; compile "
            "with Options(pp=1), or with pp and the mesh of every stage (Options.mesh), and export that"
        ) from error
    files = write_files(written, path)
    not_carried = (*plan.apart, *written.not_carried)
    near = differences(written.carried)
    return Exported(name, files, written.carried, not_carried, near, plan.predicted, None, unpriced)


def export_plan(
    program: Compiled,
    name: str,
    path: Path,
    compile_again: Callable[[Request], Compiled] | None,
    over_bytes: Callable[[Compiled], float],
) -> Exported:
    """Write the plan of a program in a format. path: as of `write_plan`. compile_again: compiles the exported layout for its
    price (None: it is not asked for); over_bytes: those that a program has too many for the fullest device. Raises as
    `write_plan`."""
    exported = write_plan(exchangeable(program), name, path, "it was not asked for")
    if compile_again is None:
        return exported
    try:
        options = options_of(exported.layout, program.request.options)
        again = compile_again(replace(program.request, options=options, plan=None, buckets=(), entries={}))
    except AutoparError as error:
        return replace(exported, unpriced=f"{type(error).__name__}: {error}")
    return replace(exported, exported=again.predicted, unpriced="", over_bytes=max(0.0, over_bytes(again)))


def write_files(written: Written, path: Path) -> tuple[Path, ...]:
    """The paths of the files that are written. path: as of `export_plan`. Raises EmitError."""
    alone = len(written.files) == 1 and path.suffix and not path.is_dir()
    places = {path if alone else path / file: text for file, text in written.files.items()}
    try:
        for place, text in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, text.encode())
    except OSError as error:
        raise EmitError(f"cannot write {error.filename or path}: {error.strerror}") from error
    return tuple(places)
