"""Steps of parameters and gradients in tables are derived again: a fault in one does not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import autopar
from autopar.errors import CheckError
from autopar.ir.lowered import StoredParameter
from autopar.ir.steps import RuntimeStep
from autopar.passes.check.lines import check
from autopar.passes.rules.book import RuleBook
from tests.runs_worker import compiled

Steps = tuple[RuntimeStep, ...]


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    return compiled(6, mesh={"dp": 2, "tp": 3}, strategy="zero1")


FAULTS: dict[str, Callable[[Steps], Steps]] = {
    "a step is missing": lambda steps: steps[:-1],
    "the first step is missing": lambda steps: steps[1:],
    "a step is done twice": lambda steps: (*steps, steps[-1]),
    "steps are in another order": lambda steps: (*steps[1:], steps[0]),
    "a block has other sizes": lambda steps: tuple(
        replace(s, dims=s.dims[::-1]) if s.facts.table.of_block and len(s.dims) > 1 else replace(s, dims=(1,))
        for s in steps
    ),
    "axes are swapped": lambda steps: tuple(
        replace(s, axes=({"dp": "tp", "tp": "dp"}[s.axes[0]],)) if len(s.axes) == 1 else s for s in steps
    ),
    "it is along another dim": lambda steps: tuple(replace(s, dims=(1,)) if s.facts.sends else s for s in steps),
    "it is of another kind": lambda steps: tuple(
        replace(s, kind="all_reduce", dims=()) if s.kind == "reduce_scatter" else replace(s, kind="shard")
        for s in steps
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("way", ["reduce", "regather"])
def test_a_fault_in_the_steps_of_a_run_is_found(
    program: autopar.ParallelProgram, way: str, fault: Callable[[Steps], Steps]
) -> None:
    (stage,) = program.lowered.stages
    check(stage, RuleBook())
    p: StoredParameter = stage.parameters["wide.weight"]
    assert p.optimizer.run == ("dp", "tp")
    broken = replace(p, **{way: fault(getattr(p, way))})
    with pytest.raises(CheckError, match=r"wide\.weight"):
        check(replace(stage, parameters={**stage.parameters, p.name: broken}), RuleBook())
