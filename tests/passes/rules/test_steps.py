"""Every step that conversions are made of does at run time what its row says it does to a spec, and is typed so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.ir.lines import Convert, Function
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import STEP_KINDS, Step
from autopar.ir.types import TensorType
from autopar.passes.check.lines import check
from autopar.passes.rules.alphabet import alphabet
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.lattice import neighbours
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from tests.passes.price.stages import stage

WHOLE, MESH = torch.arange(24.0).view(4, 6), Mesh.of(a=2)
STEPS = [
    (before, step, after)
    for before in alphabet(("a",), 2).specs
    if all(op == "sum" for _, op in before.partial)
    for step, after in neighbours(before, ("a",))
]


def held(spec: Spec, rank: int) -> Tensor:
    """The block or the term that a rank of two has."""
    if spec.partial:
        return WHOLE * (0.25, 0.75)[rank]
    dims = [dim for dim, axes in enumerate(spec.dims) if axes]
    return WHOLE.chunk(2, dims[0])[rank] if dims else WHOLE


def test_there_are_steps_of_every_kind_but_those_of_runs_and_owners() -> None:
    of_values = {
        k for k, row in STEP_KINDS.items() if not (row.table.of_block or row.table.of_runs or row.table.of_owner)
    }
    assert {step.kind for _, step, _ in STEPS} == of_values


@pytest.mark.parametrize(("before", "step", "after"), STEPS, ids=[f"{b} {s.kind} {a}" for b, s, a in STEPS])
def test_a_step_does_what_its_row_says(before: Spec, step: Step, after: Spec) -> None:
    def run(comm: Comm) -> Tensor:
        return step.facts.table.run(comm, held(before, comm.rank), step.axes, step.dims, "")

    results = run_threads(2, {"a": 2}, run)
    expected = [held(after, rank) for rank in range(2)]
    for one, part in zip(results, expected, strict=True):
        assert one.shape == part.shape
        assert one.numel() == step.facts.table.bytes_after(held(before, 0).numel(), 2)
    type_ = TensorType(tuple(WHOLE.shape), WHOLE.dtype)
    line = Convert("x", step, outs=("y",), types=(type_,), specs=(after,))
    check(
        replace(stage(MESH), forward=Function("forward", ("x",), (line,), ("y",), {"x": (type_, before)})), RuleBook()
    )
    if after.partial:
        results, expected = [sum(results, torch.zeros(()))], [WHOLE]
    assert all(map(torch.equal, results, expected))
