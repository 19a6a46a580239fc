"""Programs whose rows go to a node first and then to their experts inside it: lowered, overlapped, checked and run."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import CheckError
from autopar.ir.lines import Compute, GoOn
from autopar.ops.registry import AlongAxis
from autopar.passes.check.lines import check
from autopar.passes.search.overlap import overlapping
from autopar.plan import OVERLAPS
from tests.measure import measure_peak
from tests.ops.rings import with_choices
from tests.passes.lower.test_overlap_experts import batch, function_of, model
from tests.proof.test_memory_measured import UNDER

BOTH = {"dp": "+t0+e", "ep": "+t0+e"}


@functools.cache
def program(overlap: str, crowded: bool = False, nodes: int = 2, inside: int = 2) -> autopar.Program:
    cluster = autopar.ClusterSpec.local(nodes * inside)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], bandwidth_Bps=1e7, latency_s=1e-6),))
    options = autopar.Options(
        mesh={"dp": nodes, "ep": inside}, microbatches=1, recompute="none", on_overflow="chunk", overlap=False
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    made = autopar.compile(model(crowded), cluster, batch(), optimizer=optimizer, options=options)
    made = with_choices(made, "experts", BOTH)
    return made.with_plan(overlapping(made.plan, overlap))


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("crowded", [False, True], ids=["even", "in more pieces than planned"])
def test_it_computes_what_eager_does(overlap: str, crowded: bool) -> None:
    assert autopar.verify(program(overlap, crowded), model(crowded), batch()).ok


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "inside"), [(2, 4), (4, 2)])
def test_eight_ranks_compute_what_eager_does(nodes: int, inside: int) -> None:
    made = program("any", nodes=nodes, inside=inside)
    assert autopar.verify(made, model(), batch()).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_compute_what_eager_does(seed: int) -> None:
    made = program("")
    assert autopar.verify(made.with_plan(autopar.random_plan(made, seed)), model(), batch()).ok


def test_the_op_is_told_both_axes_and_stops_for_the_messages_of_both() -> None:
    made = program("any")
    lines = [x for kind in ("forward", "backward") for x in function_of(made, kind).lines]
    on = [line.line.op.split(".")[1] for line in lines if isinstance(line, GoOn)]
    assert (on.count("experts"), on.count("experts_grad")) == (3, 4)
    assert "along=rt.along('dp', 'ep')" in made.source(0)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("crowded", [False, True])
def test_a_step_takes_no_more_memory_than_promised(overlap: str, crowded: bool) -> None:
    made = program(overlap, crowded)
    assert max(measure_peak(made, batch())) <= made.predicted.peak_bytes * (1 + UNDER)


@pytest.mark.parametrize("axes", [("ep", "dp"), ("dp",), ("ep",)])
def test_an_op_that_is_told_other_axes_than_it_carries_is_found(axes: tuple[str, ...]) -> None:
    made = program("")
    (name, template), *_ = made.stages[0].templates.items()
    lines = tuple(
        replace(x, kwargs={**x.kwargs, "along": AlongAxis(axes)}) if isinstance(x, Compute) and x.carried else x
        for x in template.forward.lines
    )
    templates = {**made.stages[0].templates, name: replace(template, forward=replace(template.forward, lines=lines))}
    with pytest.raises(CheckError, match="is told to send along"):
        check(replace(made.stages[0], templates=templates), made.rules)
