"""Predictions of `compile` for published training runs, under the plans that were published.

A row's model is compiled on its cluster with its plan forced: mesh, pipeline, schedule, microbatches, recompute, ZeRO and
precision. Only time is asked for, so plans may use any memory. Rows that `compile` cannot express are counted and named;
where a plan is only nearly that of its row, the row's entry says in what (`approximated`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np
import torch

import autopar
from autopar.costmodel.estimator.pipeline_time import chunk_layers
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.schedules import schedule_name
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import Workload, not_emitted
from autopar.costmodel.software import LOW_PRECISIONS, Software
from autopar.errors import AutoparError
from autopar.exchange.layout import Layout
from autopar.exchange.to_options import CUT, UNREAD, differences, options_of
from autopar.ir.program import resolve
from autopar.passes.account.program import account
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.side_by_side import PRODUCT
from autopar.passes.rules.policies import op_class, policy_set
from autopar.plan import Plan, TemplatePlan
from benchmarks.published_models import Transformer
from benchmarks.published_order import Timed, order_in_series, ordered_otherwise, report_order
from benchmarks.published_rows import Row, measured_step_s

PRECISIONS = {"float32": "", "float16": "fp16"} | dict.fromkeys(("bfloat16", *LOW_PRECISIONS), "bf16")
"""The precision that a row's model is compiled in; products in fewer bits are priced so, and no program has any."""
TABLES = {"": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype in which frameworks have tables of positions, by the precision that a row's model is compiled in."""
SCHEDULES = {"zb-1p": "zb-h1", "zb-2p": "zb-h2"}
"""The schedules nearest to those that the zero-bubble paper searched for in the memory of 1F1B, and in twice as much."""


@dataclass(frozen=True)
class Compiled:
    """A row with what was measured, and what `compile` and the estimator predict."""

    id: str
    arch: str
    measured_s: float
    predicted_s: float
    estimated_s: float
    compile_s: float
    approximated: list[str]

    @property
    def error(self) -> float:
        """Relative error of what `compile` predicts."""
        return self.predicted_s / self.measured_s - 1


def inexpressible(w: Workload) -> str:
    """Why `compile` cannot be forced to a row's plan; empty where it can."""
    reasons = {
        not_emitted(w): True,
        "a head that predicts a further token": bool(w.model.mtp_layers),
        "offload": w.plan.offload != "none",
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds and reason)


def approximated(w: Workload) -> list[str]:
    """The points in which the plan that `compile` is forced to differs from a row's."""
    p, schedule = w.parallel, schedule_name(w.plan.schedule, w.parallel.vpp)
    of_rows = {
        "experts apart over ranks with batches of their own, whole over those that share one": p.ep > 1 and p.cp > 1,
        "attention over a window without sinks": bool(w.model.window),
        "recomputation of attention and of what is pointwise": w.plan.recompute == "selective" and not saves_by_op(w),
        f"schedule {schedule} as {SCHEDULES.get(schedule)}": p.pp > 1 and schedule in SCHEDULES,
    }
    said = {UNREAD, CUT if stage_boundaries(w) else ""}  # the price makes again what the row's framework does
    near = (difference for difference in differences(layout_of(w)) if difference not in said)
    return [*(difference for difference, holds in of_rows.items() if holds), *near]


def layout_of(w: Workload) -> Layout:
    """The layout that a row's plan is; of how many microbatches the workload says, whose rows may differ by one."""
    p, schedule = w.parallel, schedule_name(w.plan.schedule, w.parallel.vpp)
    return Layout(
        dp=p.dp,
        tp=p.tp,
        cp=p.cp,
        ep=p.ep,
        pp=p.pp,
        virtual_stages=p.V,
        schedule=SCHEDULES.get(schedule, schedule) if p.pp > 1 else "",
        global_batch=w.batch,
        sequence_parallel=p.sequence_parallel,
        zero=p.zero,
        recompute=w.plan.recompute,
        precision=PRECISIONS[w.precision],
    )


def forced_options(w: Workload) -> autopar.Options:
    """The options that leave a row's plan alone; what a framework overlaps its software says."""
    own = autopar.Options(expert_imbalance=1.0, overlap=False)
    return options_of(layout_of(w), own, microbatches=w.microbatches, stage_boundaries=stage_boundaries(w))


def stage_boundaries(w: Workload) -> list[str] | None:
    """The blocks at which the stages of a row's pipeline start, as the estimator lays them out; None where there are none, or one
    has a head alone."""
    p = w.parallel
    if p.pp == 1:
        return None
    layers = chunk_layers(w.model.layers, p.pp, p.V, w.model.mtp_layers)
    counts = [of_group[chunk] for chunk in range(p.V) for of_group in layers]
    return [f"blocks.{first}" for first in accumulate(counts[:-1])] if counts[-1] else None


def saves_by_op(w: Workload) -> bool:
    """Whether a row's selective checkpoints are torch's, which save results of ops by name. With tensor parallelism they save
    sums over ranks, which a plan has as terms."""
    stops = w.software.recompute_stops and w.parallel.zero == 3
    return w.plan.recompute == "selective" and stops and w.parallel.tp == 1


def saved_by_op(program: autopar.ParallelProgram, w: Workload) -> Plan:
    """The plan with what torch's selective checkpoints make again: all but attention and every second product of a layer's
    weights; in 8 bits no product is saved, and the last one's result is read by nobody."""

    def remade(name: str, plan: TemplatePlan) -> TemplatePlan:
        template = program.ir.templates[name]
        ops = {value: resolve(template.nodes[value])[0].name for value in policy_set(template, "full")}
        products = [value for value, op in ops.items() if template.op_calls[op].op == PRODUCT]
        saved = {*products} - {*(products[:-1] if w.software.low_dtype else products[1:-1:2])}
        again = (v for v, op in ops.items() if v not in saved and op_class(template, op) != "attention")
        return replace(plan, recompute=tuple(again) if plan.recompute and products else plan.recompute)

    stages = program.plan.stages
    return replace(
        program.plan,
        stages=tuple(
            replace(stage, templates={name: remade(name, plan) for name, plan in stage.templates.items()})
            for stage in stages
        ),
    )


def compile_row(row: Row, measured_s: float) -> Compiled:
    """Raises AutoparError where the row's plan cannot be compiled."""
    w = row_workload(row)
    began = time.process_time()
    with torch.device("meta"):
        model, ids = (
            Transformer(w.model, TABLES[PRECISIONS[w.precision]]),
            torch.zeros(w.batch, w.model.seq_len, dtype=torch.long),
        )
    compiled = functools.partial(
        autopar.compile, model, w.cluster, (ids, ids), optimizer=functools.partial(torch.optim.AdamW, lr=1e-4)
    )
    program = compiled(options=forced_options(w))
    if saves_by_op(w):
        program = compiled(options=forced_options(w), plan=saved_by_op(program, w))
    return Compiled(
        str(row["id"]),
        str(row["category"]["arch"]),
        measured_s,
        predicted_s(program, w.software),
        estimate_workload(w, check=False).step_time_s,
        time.process_time() - began,
        approximated(w),
    )


def predicted_s(program: autopar.ParallelProgram, software: Software) -> float:
    """Seconds that a compiled program would take under the software that a row ran with."""
    assert program.lowered is not None
    pricers = Pricers(program.cluster, software)
    stages, templates = program.plan.stages, program.ir.templates
    return account(program.lowered, stages, templates, pricers, program.setting, program.rules).step_time_s


def evenly(rows: Sequence[Row], limit: int) -> list[Row]:
    """So many rows, taken in turn from every series."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(str(row["series"]), []).append(row)
    turns = (row for turn in zip_longest(*series.values()) for row in turn if row is not None)
    return [row for row, _ in zip(turns, range(limit), strict=False)]


def score_compiled(rows: Sequence[Row], limit: int | None = None) -> dict[str, Any]:
    """The score as plain data, rows that cannot be compiled among them. limit: most rows that are compiled."""
    refused: list[dict[str, str]] = []
    possible: list[Row] = []
    for row in rows:
        if measured_step_s(row) is None:
            continue
        reason = inexpressible(row_workload(row))
        if reason:
            refused.append({"id": str(row["id"]), "reason": reason})
        else:
            possible.append(row)
    compiled: list[Compiled] = []
    by_compile: list[Timed] = []
    by_estimate: list[Timed] = []
    for row in evenly(possible, limit or len(possible)):
        measured_s = measured_step_s(row)
        assert measured_s is not None
        try:
            c = compile_row(row, measured_s)
        except AutoparError as error:
            refused.append({"id": str(row["id"]), "reason": f"{type(error).__name__}: {error}"})
            continue
        compiled.append(c)
        by_compile.append(Timed(row, measured_s, c.predicted_s))
        by_estimate.append(Timed(row, measured_s, c.estimated_s))
    pairs, differ = ordered_otherwise(by_compile, by_estimate)
    differences = [abs(c.predicted_s / c.estimated_s - 1) for c in compiled]
    return {
        "rows": len(compiled),
        "dense_median_abs_error": _median([abs(c.error) for c in compiled if c.arch != "moe"]),
        "moe_median_abs_error": _median([abs(c.error) for c in compiled if c.arch == "moe"]),
        "estimate_compile_median_difference": _median(differences),
        "series": order_in_series(by_compile),
        "pairs_apart": pairs,
        "ordered_otherwise": differ,
        "compiled": [vars(c) for c in compiled],
        "not_compiled": refused,
    }


def report_compiled(result: Mapping[str, Any]) -> str:
    """The score as text."""
    lines = [f"  {'row':60s} {'measured':>9s} {'compile':>9s} {'estimate':>9s} {'error':>7s} {'compile_s':>9s}"]
    for c in result["compiled"]:
        error = c["predicted_s"] / c["measured_s"] - 1
        numbers = f"{c['measured_s']:9.3f} {c['predicted_s']:9.3f} {c['estimated_s']:9.3f} {error:+7.1%} {c['compile_s']:9.1f}"
        lines.append(f"  {c['id']:60.60s} {numbers}  {'; '.join(c['approximated'])}".rstrip())
    lines += [f"not compiled: {row['id']}: {row['reason']}" for row in result["not_compiled"]]
    names = ("dense_median_abs_error", "moe_median_abs_error", "estimate_compile_median_difference")
    lines += [f"{result['rows']} rows compiled, {len(result['not_compiled'])} not"]
    lines += [f"{name}: {result[name]:.1%}" for name in names if result[name] is not None]
    lines += report_order(result["series"])
    lines += [f"{result['pairs_apart']} pairs measured 5 % apart or more; ordered otherwise by the estimate:"]
    return "\n".join(lines + [f"  {a} and {b}" for a, b in result["ordered_otherwise"]])


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
