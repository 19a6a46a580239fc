"""The plans that no other plan beats, as a table, as a picture and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.compiled import Decision, Prediction
from autopar.errors import EmitError, InputError
from autopar.ir.text import energy_text, size_text, time_text
from autopar.passes.search.frontier import Costs, Option
from autopar.plan import Plan
from autopar.report.answer import batch_of, rate_text
from autopar.report.picture import empty_picture, svg_text
from autopar.report.table import Block, Table, plain

PICTURES = (".svg", ".png")
FAR_APART = 30.0
"""Values of which the largest is so many times the smallest are drawn by their logarithm."""
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


@dataclass(frozen=True)
class ParetoRow:
    """A plan that no other plan beats. cluster: that it is for; tokens_per_s: None where inputs are no tokens; best_in: of what
    no other row has less."""

    plan: Plan
    cluster: ClusterSpec
    predicted: Prediction
    tokens_per_s: float | None
    best_in: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Devices that the plan has ranks on."""
        return self.plan.ranks

    @property
    def name(self) -> str:
        """Who made the plan, its meshes, and whether it recomputes."""
        return _name(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the plan included: written to a file it is one that `compile` takes."""
        return {
            "name": self.name,
            "devices": self.devices,
            "cluster": self.cluster.name,
            "step_time_s": self.predicted.step_time_s,
            "peak_bytes": self.predicted.peak_bytes,
            "energy_J": self.predicted.energy_J,
            "tokens_per_s": self.tokens_per_s,
            "best_in": list(self.best_in),
            "plan": self.plan.to_dict(),
        }


@dataclass(frozen=True)
class Beaten:
    """A plan that another one beats. by: the row that does; is_bound: it was not lowered, and costs at least that."""

    name: str
    costs: Costs
    by: int
    is_bound: bool

    def reason(self, row: ParetoRow) -> str:
        """A text of what the row has less of, and by how much."""
        own = row.predicted
        less = [f"{time_text(s)} less" for s in [self.costs.step_s - own.step_time_s] if s > 0]
        less += [f"{size_text(n)} less" for n in [self.costs.peak_bytes - own.peak_bytes] if n >= 1]
        less += [f"{n:,} device{'s' if n > 1 else ''} fewer" for n in [self.costs.devices - row.devices] if n]
        return f"{row.name} takes {', '.join(less) or 'less energy'}{' at least' if self.is_bound else ''}"


@dataclass(frozen=True)
class Pareto:
    """rows: the fastest first. beaten: all others that were looked at, with the row that beats each. batch: samples of a step."""

    rows: tuple[ParetoRow, ...]
    beaten: tuple[Beaten, ...]
    batch: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        beaten = [
            {
                "name": one.name,
                "devices": one.costs.devices,
                "step_time_s": one.costs.step_s,
                "peak_bytes": one.costs.peak_bytes,
                "energy_J": one.costs.energy_J,
                "is_bound": one.is_bound,
                "beaten_by": one.by,
                "reason": one.reason(self.rows[one.by]),
            }
            for one in self.beaten
        ]
        return {"batch": self.batch, "rows": [row.to_dict() for row in self.rows], "beaten": beaten}

    def blocks(self) -> list[Block]:
        """A table for people, and why the others are not in it."""
        of_batch = f" for a batch of {self.batch:,}" if self.batch is not None else ""
        head = ("step", "peak a device", "devices", "energy a step", "tokens/s", "plan", "best in")
        rows = [
            (
                time_text(row.predicted.step_time_s),
                size_text(row.predicted.peak_bytes),
                f"{row.devices:,}",
                "not known" if row.predicted.energy_J is None else energy_text(row.predicted.energy_J),
                "" if row.tokens_per_s is None else rate_text(row.tokens_per_s).removesuffix(" tokens/s"),
                row.name,
                ", ".join(row.best_in),
            )
            for row in self.rows
        ]
        found: list[Block] = [Table(head, rows, (0, 1, 2, 3, 4), f"plans that no other plan beats{of_batch}")]
        if self.beaten:
            found.append(f"{len(self.beaten)} others were looked at:")
            found += [
                f"  {one.name} on {one.costs.devices:,}: step {time_text(one.costs.step_s)}, "
                f"{size_text(one.costs.peak_bytes)}; {one.reason(self.rows[one.by])}"
                for one in self.beaten
            ]
        return found

    def show(self) -> str:
        """The same as plain text."""
        return plain(*self.blocks())

    def plot(self, path: str | Path) -> Path:
        """Draw seconds against bytes, a color for every number of devices, as SVG or PNG by the path's suffix. Raises InputError
        for another suffix or without matplotlib, EmitError where the file cannot be written."""
        path = Path(path)
        if path.suffix not in PICTURES:
            raise InputError(f"a plot is written as {' or '.join(PICTURES)}, not to {path.name!r}")
        figure, axes = empty_picture(760, 460, left=80, right=30, top=40, bottom=60)
        hints: dict[str, str] = {}
        for color, devices in enumerate(sorted({row.devices for row in self.rows})):
            own = [row for row in self.rows if row.devices == devices]
            seconds, nbytes = ([getattr(row.predicted, what) for row in own] for what in ("step_time_s", "peak_bytes"))
            shade = COLORS[color % len(COLORS)]
            axes.plot(seconds, nbytes, color=shade, linewidth=1, alpha=0.4, drawstyle="steps-post")
            for i, (row, x, y) in enumerate(zip(own, seconds, nbytes, strict=True)):
                gid = f"plan-{devices}-{i}"
                label = f"{devices:,} device{'s' if devices > 1 else ''}" if not i else None
                axes.plot([x], [y], "o", color=shade, label=label, gid=gid)
                hints[gid] = f"{row.name}: {time_text(x)}, {size_text(y)}"
                joules = row.predicted.energy_J
                if joules is not None:
                    hints[gid] += f", {energy_text(joules)}"
                    axes.annotate(energy_text(joules), (x, y), (4, 4), textcoords="offset points", fontsize=8)
        seconds, nbytes = (
            [getattr(row.predicted, what) for row in self.rows] for what in ("step_time_s", "peak_bytes")
        )
        if max(seconds) > FAR_APART * min(seconds):
            axes.set_xscale("log")
        if max(nbytes) > FAR_APART * min(nbytes):
            axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: time_text(value))
        axes.yaxis.set_major_formatter(lambda value, _: size_text(value))
        axes.set_xlabel("seconds of a step")
        axes.set_ylabel("peak bytes a device")
        axes.set_title("plans that no other plan beats, with joules a step", loc="left", fontsize=11)
        axes.legend(frameon=False, loc="best")
        try:
            if path.suffix == ".svg":
                path.write_text(svg_text(figure, hints))
            else:
                figure.savefig(path, dpi=144)
        except OSError as error:
            raise EmitError(f"cannot write {path}: {error.strerror}") from error
        return path


def pareto_of(options: Sequence[Option], decided: Sequence[tuple[Option, Decision]]) -> Pareto:
    """The report of plans that were looked at. decided: those that no other one beats, as `compile` gives them."""
    kept = [option for option, _ in decided]
    costs = [option.costs for option in kept]
    rows = []
    for option, decision in decided:
        _, tokens = batch_of(option.task.program, decision.plan.microbatches)
        rate = tokens / option.costs.step_s if tokens and option.costs.step_s > 0 else None
        rows.append(ParetoRow(decision.plan, option.cluster, decision.predicted, rate, _best_in(option.costs, costs)))
    beaten: dict[tuple[str, Costs], Beaten] = {}
    for one in options:
        if all(one is not other for other in kept):
            by = next((i for i, own in enumerate(costs) if own.beats(one.costs) or own == one.costs), None)
            name = _name(one.plan.plan)
            if by is not None and costs[by] != one.costs:
                beaten.setdefault((name, one.costs), Beaten(name, one.costs, by, one.is_bound))
    samples = [batch_of(one.task.program, one.plan.plan.microbatches)[0] for one in kept[:1]]
    ordered = sorted(beaten.values(), key=lambda one: one.costs.step_s)
    return Pareto(tuple(rows), tuple(ordered), samples[0] if samples else None)


def _name(plan: Plan) -> str:
    recomputes = any(t.recompute for stage in plan.stages for t in stage.templates.values())
    return f"{plan.origin} {plan.show_meshes()}{', recompute' if recomputes else ''}"


def _best_in(own: Costs, all_costs: Sequence[Costs]) -> tuple[str, ...]:
    """The costs of which a plan has the least."""
    joules = [one.energy_J for one in all_costs if one.energy_J is not None]
    best = {
        "seconds": own.step_s == min(one.step_s for one in all_costs),
        "bytes": own.peak_bytes == min(one.peak_bytes for one in all_costs),
        "devices": own.devices == min(one.devices for one in all_costs),
        "energy": bool(joules) and own.energy_J == min(joules),
    }
    return tuple(what for what, is_best in best.items() if is_best)
