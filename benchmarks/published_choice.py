"""Published layouts against the plans that `compile` chooses itself, for the same model, cluster and batch.

`python -m benchmarks.published_choice --file published_runs.json ID ...` compiles the rows whose names begin so, twice, and
prints what emitted programs are predicted to take: under the row's layout (mesh, stages, schedule, microbatches, ZeRO; of the
recompute as little as fits, the row's own at least) and under the plan that the search finds, both within the devices' memory.
Products of 8 bits and less are compiled in bf16, heads for further tokens are left out. It returns 1 where a published layout is
faster.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass, replace

import torch

import autopar
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.software import LOW_PRECISIONS
from autopar.errors import InfeasibleError
from benchmarks.published_compiled import forced_options, inexpressible
from benchmarks.published_models import Transformer
from benchmarks.published_rows import Row, parser_of, read_rows

SLOWER = 1e-3
"""Relative; predictions that are closer are the same."""


@dataclass(frozen=True)
class Choice:
    """A row's layout and the search's own: seconds of a step and how the plan looks. search_s: what finding it took."""

    published_s: float
    published: str
    own_s: float
    own: str
    search_s: float


def expressible(row: Row) -> Workload:
    """A row's question in 16 bits, without heads for further tokens."""
    w = row_workload(row)
    low = w.precision in LOW_PRECISIONS
    software = replace(w.software, precision="bfloat16") if low else w.software
    return replace(w, software=software, model=replace(w.model, mtp_layers=0))


def choose(w: Workload) -> Choice:
    """Both plans. Raises AutoparError where the layout cannot be compiled or nothing fits."""
    forced = replace(forced_options(w), memory_bytes=None, expert_imbalance=autopar.Options().expert_imbalance)
    published = _compile_in_memory(w, forced)
    began = time.perf_counter()
    own = _compile(w, autopar.Options(precision=forced.precision, offload="none", explain_s=0.0))
    seconds = time.perf_counter() - began
    return Choice(
        published.predicted.step_time_s, _described(published), own.predicted.step_time_s, _described(own), seconds
    )


def _compile_in_memory(w: Workload, forced: autopar.Options) -> autopar.ParallelProgram:
    """The layout with the least recompute that fits."""
    for recompute in (forced.recompute, "auto"):
        try:
            return _compile(w, replace(forced, recompute=recompute))
        except InfeasibleError:
            continue
    return _compile(w, replace(forced, recompute="full"))


def _compile(w: Workload, options: autopar.Options) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, ids = Transformer(w.model), torch.zeros(w.batch, w.model.seq_len, dtype=torch.long)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    return autopar.compile(model, w.cluster, (ids, ids), optimizer=optimizer, options=options)


def _described(program: autopar.ParallelProgram) -> str:
    plan = program.plan
    stage = plan.stages[len(plan.stages) // 2]
    experts = {
        "/".join(choice or "-" for choice in strategy)
        for template in stage.templates.values()
        for op, strategy in template.strategies.items()
        if op.startswith("experts")
    }
    stages = f"{len(plan.stages)} stages, " if len(plan.stages) > 1 else ""
    return f"{stage.mesh}, {stages}{plan.microbatches} microbatches, experts {' and '.join(sorted(experts)) or 'none'}"


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__, "nothing")
    parser.add_argument("ids", nargs="+", help="how the names of rows begin")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.file)
    except FileNotFoundError as err:
        print(f"published_choice: {err}", file=sys.stderr)
        return 2
    faster = False
    for row in rows:
        if not str(row["id"]).startswith(tuple(args.ids)):
            continue
        w = expressible(row)
        if reason := inexpressible(w):
            print(f"{row['id']}: {reason}")
            continue
        c = choose(w)
        faster = faster or c.own_s > (1 + SLOWER) * c.published_s
        print(f"{row['id']}: {c.own_s / c.published_s - 1:+.1%}, found in {c.search_s:.0f} s")
        print(f"  published {c.published_s:9.3f} s  {c.published}\n  chosen    {c.own_s:9.3f} s  {c.own}", flush=True)
    return 1 if faster else 0


if __name__ == "__main__":
    raise SystemExit(main())
