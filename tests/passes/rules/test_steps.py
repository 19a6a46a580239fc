"""Every step that conversions are made of does at run time what its row says it does to a spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ir.spec import Spec
from autopar.ir.steps import STEP_KINDS, Step
from autopar.passes.rules.alphabet import alphabet
from autopar.passes.rules.lattice import neighbours
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads

WHOLE = torch.arange(24.0).view(4, 6)
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


def test_there_are_steps_of_every_kind() -> None:
    assert {step.kind for _, step, _ in STEPS} == set(STEP_KINDS)


@pytest.mark.parametrize(("before", "step", "after"), STEPS, ids=[f"{b} {s.kind} {a}" for b, s, a in STEPS])
def test_a_step_does_what_its_row_says(before: Spec, step: Step, after: Spec) -> None:
    def run(comm: Comm) -> Tensor:
        return step.facts.table.run(comm, held(before, comm.rank), step.axes, step.dims, "")

    results = run_threads(2, {"a": 2}, run)
    expected = [held(after, rank) for rank in range(2)]
    for one, part in zip(results, expected, strict=True):
        assert one.shape == part.shape
        assert one.numel() == step.facts.table.bytes_after(held(before, 0).numel(), 2)
    if after.partial:
        results, expected = [sum(results, torch.zeros(()))], [WHOLE]
    assert all(map(torch.equal, results, expected))
