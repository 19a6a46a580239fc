"""The estimator and the compiler side by side: what is feasible, and what it takes.

`python -m benchmarks.agree` asks both about the same cases: a transformer on a cluster under a layout (`CASES`, and with `--file
published_runs.json` the layouts of published rows). The compiler is forced to the layout, the estimator is asked with the
software of emitted programs, and three answers are compared:

    allowed    the layout is one that the compiled plan has: whatever it is to cut is cut
    fits       the peak is within what the cluster's devices have; asked of the compiler in their memory where it is near. Where
               it is nearer than `BYTES` says the two may differ, and are counted apart ("near_the_limit")
    seconds, bytes of tensors    the estimator's over the compiler's, within `SECONDS` and `BYTES`

Tables that fill the memory there is (`Schedule.timed`) are made in what the estimator says they need, and as much more as the two
may differ. Known differences (`known`) are counted apart. Layouts that nobody can name to the compiler are left out, and counted
by why; the estimator refuses them of emitted programs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import autopar
from autopar.cluster.process import tensor_room
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import Workload
from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.ir.rule import factors_of
from autopar.ir.schedules import schedule_row
from autopar.passes.shard.uneven import balanced
from autopar.plan import Plan
from autopar.runtime.comm.mesh import Shares
from benchmarks.agree_cases import CASES, published
from benchmarks.published_compiled import forced_options, inexpressible
from benchmarks.published_models import Transformer
from benchmarks.published_rows import write_result

SECONDS = (0.7, 1.25)
"""Estimated over compiled seconds of a step."""
BYTES = (0.8, 1.2)
"""Estimated over compiled bytes of tensors at the peak."""
NEAR = 1.25
"""A peak within this factor of the memory is asked for again in that memory: the compiler may then choose smaller plans."""


@dataclass(frozen=True)
class Answer:
    """An answer of one of the two. refused: why the layout is not allowed, empty where it is. total_bytes: of tensors at the
    peak; room_bytes: for them on a device."""

    refused: str
    fits: bool = False
    step_s: float = 0.0
    total_bytes: float = 0.0
    room_bytes: float = 0.0


@dataclass(frozen=True)
class Agreement:
    """A case, and both answers. differ: in what they do."""

    name: str
    estimated: Answer
    compiled: Answer
    differ: tuple[str, ...]

    @property
    def is_near(self) -> bool:
        """Whether they differ in what fits as the peak is nearer to the limit than its estimate is meant to be to the peak."""
        c = self.compiled
        return self.estimated.fits != c.fits and BYTES[0] * c.total_bytes <= c.room_bytes <= BYTES[1] * c.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**vars(self), "estimated": vars(self.estimated), "compiled": vars(self.compiled)}


# --- the answers


def estimated(w: Workload) -> Answer:
    """The estimator's."""
    try:
        e = estimate_workload(w)
    except ConstraintError as error:
        return Answer(str(error))
    return Answer("", e.fits, e.step_time_s, e.memory_bytes["total"])


def compiled(w: Workload, timed_bytes: float = 0.0) -> Answer:
    """The compiler's: the plan that it is forced to, of which copies of parameters rest only where there is room. timed_bytes:
    the memory for which a timed table is made (0: what the devices have)."""
    options = forced_options(w)
    if timed_bytes and options.schedule != "auto" and schedule_row(options.schedule).timed:
        options = replace(options, memory_bytes=timed_bytes)
    if units := tuple(n for n in w.parallel.units(w.model) if n > w.parallel.tp):
        shares = Shares(*(balanced(n, w.parallel.tp) for n in units))
        options = replace(options, mesh={**(options.mesh or {}), "tp": shares})
    try:
        program = _compiled(w, options)
    except AutoparError as error:
        return Answer(f"{type(error).__name__}: {error}")
    if whole := uncut(program, w):
        return Answer(f"whole: {', '.join(whole)}")
    peak_bytes = program.with_plan(_without_copies(program.plan)).account.peak_bytes
    axes = dict(program.plan.stages[0].mesh.axes)
    room = min(tensor_room(w.cluster, axes, device, device.memory_bytes) for _, device in w.cluster.devices)
    return Answer("", _fits(w, options, peak_bytes, room), program.account.step_time_s, peak_bytes, room)


def _fits(w: Workload, options: autopar.Options, peak_bytes: float, room: float) -> bool:
    if peak_bytes <= room or peak_bytes > NEAR * room:
        return peak_bytes <= room
    try:
        _compiled(w, replace(options, memory_bytes=None))
    except InfeasibleError:
        return False
    return True


def _compiled(w: Workload, options: autopar.Options) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, ids = Transformer(w.model), torch.zeros(w.batch, w.model.seq_len, dtype=torch.long)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    return autopar.compile(model, w.cluster, (ids, ids), optimizer=optimizer, options=options)


def _without_copies(plan: Plan) -> Plan:
    stages = (
        replace(stage, parameters={n: replace(p, narrow=False) for n, p in stage.parameters.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


COLUMNS = {
    "entries of the vocabulary": ("tokens.weight", "head.weight"),
    "features of an MLP": (".mlp.up.weight",),
    "experts": (".mlp.w_in",),
}
"""The parameters whose first dim is cut where `ParallelConfig.cuts` says so; of an MLP out of step it may be the second."""


def uncut(program: autopar.ParallelProgram, w: Workload) -> list[str]:
    """The names of the dims that the layout is to cut and the plan does not."""
    kind = "softmax" if w.model.attention == "materialised" else "attention"
    rows = (axis for axis in ("dp", "ep") if w.parallel.axes[axis] > 1)
    whole = [] if all(all(_cut_sizes(program, axis, kind)) for axis in rows) else ["sequences"]
    for cut in w.parallel.cuts(w.model, unequal=True):
        axes = [axis for axis in cut.axes.split("*") if axis]
        if cut.ranks == 1:
            continue
        if cut.what in COLUMNS:
            weights = COLUMNS[cut.what]
            stored = (p for s in program.plan.stages for n, p in s.parameters.items() if n.endswith(weights))
            dims = 2 if cut.what == "features of an MLP" and is_out_of_step(w) else 1
            is_cut = all(any(axis in dim for dim in p.storage.dims[:dims]) for p in stored for axis in axes)
        elif cut.what == "features of an expert":
            experts = (p for s in program.plan.stages for n, p in s.parameters.items() if n.endswith(".mlp.w_in"))
            is_cut = all("tp" in p.storage.axes for p in experts)
        elif cut.what == "positions":
            is_cut = all(any(_cut_sizes(program, axis, "norm")) for axis in axes)
            is_cut &= "cp" not in axes or all(_cut_sizes(program, "cp", kind))
        else:
            heads = {w.model.kv_heads, w.model.heads}
            is_cut = all(heads & one for one in _cut_sizes(program, "tp", kind))
        whole += [] if is_cut else [cut.what]
    return whole


def _cut_sizes(program: autopar.ParallelProgram, axis: str, kind: str) -> Iterator[set[int]]:
    """The sizes of the indices by which every op of a kind is split along an axis."""
    for stage in program.plan.stages:
        place = stage.mesh.names.index(axis)
        for name, plan in stage.templates.items():
            template = program.ir.templates[name]
            for node in template.ops:
                rule = program.rules.rule(template.op_calls[node.name])
                if kind in str(node.target):
                    yield {rule.factors[f].size for f in factors_of(plan.strategies[node.name][place])}


# --- the comparison


def known(w: Workload) -> frozenset[str]:
    """In what the two are known to differ: where gradients of experts are reduced after every microbatch along two axes, the
    compiler counts several layers of them under way, the estimator none; where features of an MLP are out of step, the compiler
    may find the products faster that are cut along what they read, the estimator cuts what they make."""
    p = w.parallel
    under_way = w.model.experts and p.zero >= 2 and p.ep == 1 and p.cp > 1 and w.microbatches > 1
    return frozenset({"bytes"} if under_way else ()) | frozenset({"seconds"} if is_out_of_step(w) else ())


def is_out_of_step(w: Workload) -> bool:
    """Whether tp leaves ranks features of an MLP that fill no multiple of 16 bytes, over which products are slow."""
    p = w.parallel
    return p.tp > 1 and not w.full_precision and -(-w.model.ffn // p.tp) % 8 > 0 and w.model.moe_layers < w.model.layers


def agreement(w: Workload) -> Agreement:
    """Both answers to a case, known differences left out."""
    e = estimated(w)
    c = compiled(w, BYTES[1] * e.total_bytes)
    differ = []
    if bool(e.refused) != bool(c.refused):
        differ.append("allowed")
    elif not e.refused:
        differ += ["fits"] if e.fits != c.fits and not Agreement("", e, c, ()).is_near else []
        differ += ["seconds"] if not SECONDS[0] <= e.step_s / c.step_s <= SECONDS[1] else []
        differ += ["bytes"] if not BYTES[0] <= e.total_bytes / c.total_bytes <= BYTES[1] else []
    return Agreement(named(w), e, c, tuple(what for what in differ if what not in known(w)))


def named(w: Workload) -> str:
    """The case in one line."""
    p = w.parallel
    sizes = " ".join(f"{axis}{n}" for axis, n in (*p.axes.items(), ("pp", p.pp), ("vpp", p.V)) if n > 1)
    shape = f"{w.model.name or w.model.hidden} {w.model.layers}x{w.model.hidden} on {w.cluster.size} {w.device.name}"
    schedule = f" {w.plan.schedule}" if p.pp > 1 else ""
    return f"{shape}: {sizes} zero{p.zero} {w.microbatches}x{w.plan.micro_batch} {w.plan.recompute}{schedule} {w.precision}"


def compared(cases: Iterable[Workload]) -> dict[str, Any]:
    """All cases, and what can be said of them together."""
    began, found, unsaid, cases = time.process_time(), [], Counter[str](), list(cases)
    for w in cases:
        reason = inexpressible(w)
        if reason:
            unsaid[reason] += 1
            continue
        found.append(agreement(w))
        print(report(found[-1]), flush=True)
    both = [a for a in found if not a.estimated.refused and not a.compiled.refused]
    ratios = {
        "seconds": [a.estimated.step_s / a.compiled.step_s for a in both],
        "bytes": [a.estimated.total_bytes / a.compiled.total_bytes for a in both],
    }
    return {
        "cases": len(found),
        "refused_by_both": sum(bool(a.estimated.refused and a.compiled.refused) for a in found),
        "near_the_limit": [a.name for a in both if a.is_near],
        "fit_by_both": sum(a.estimated.fits and a.compiled.fits for a in found),
        "differ": dict(Counter(what for a in found for what in a.differ)),
        "ratios": {what: _spread(values) for what, values in ratios.items() if values},
        "known": [named(w) for w in cases if known(w)],
        "left_out": dict(unsaid),
        "process_s": time.process_time() - began,
        "all": [a.to_dict() for a in found],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def report(a: Agreement) -> str:
    """One case as text."""
    if a.estimated.refused or a.compiled.refused:
        verdict = f"estimator: {a.estimated.refused or 'allowed'}; compiler: {a.compiled.refused or 'allowed'}"
    else:
        seconds, nbytes = a.estimated.step_s / a.compiled.step_s, a.estimated.total_bytes / a.compiled.total_bytes
        verdict = f"seconds {seconds:.2f}, bytes {nbytes:.2f}, fits {a.estimated.fits:d} {a.compiled.fits:d}"
    return f"{'DIFFERS ' + ', '.join(a.differ) if a.differ else 'agrees'}: {a.name}: {verdict}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 where the two differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), help="one list of cases")
    parser.add_argument("--file", help="a JSON file of published runs: their layouts too")
    parser.add_argument("--every", type=int, default=1, help="take every n-th published layout only")
    parser.add_argument("--out", default=".", help="folder for the JSON")
    args = parser.parse_args(argv)
    names = [args.only] if args.only else list(CASES)
    cases = [w for name in names for w in CASES[name]()]
    if args.file:
        cases += list(published(args.file))[:: args.every]
    result = compared(cases)
    write_result(args.out, "agree.json", result)
    print({key: value for key, value in result.items() if key != "all"})
    return 1 if result["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
