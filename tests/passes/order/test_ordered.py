"""Programs whose causal sequences are in zigzag order compute what eager PyTorch does, whatever the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, InputError, Options, ParallelProgram, Plan, PlanError, random_plan, verify
from autopar.ir.program import Template

from .models import (
    Biased,
    Causal,
    Convolved,
    Counted,
    CutRotary,
    Dropped,
    Learned,
    Masked,
    Normed,
    Rotary,
    SequenceFirst,
    Shifted,
    Sliced,
    Table,
    tokens,
)

FOUR = ClusterSpec.local(4)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "no positions": Causal,
    "rotary": Rotary,
    "rotary of a longer table": CutRotary,
    "learned positions": Learned,
    "a table of positions": functools.partial(Table, 16),
    "a longer table of positions": functools.partial(Table, 20),
    "labels shifted in the model": Shifted,
    "a mask of positions beside": Masked,
    "a learned bias beside": Biased,
    "counted positions and a weighted mean": Counted,
    "batch statistics": Normed,
    "the sequence before the batch": SequenceFirst,
}
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def compiled(model: nn.Module, batch: Any = None, order: int | None = 2, **options: Any) -> ParallelProgram:
    given = Options(order=order, **options)
    return autopar.compile(model, FOUR, batch or tokens(), optimizer=SGD, options=given)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def reorders(program: ParallelProgram) -> int:
    """How many stand in the calls of the program."""

    def count(template: Template) -> int:
        return sum(call.op == "autopar.reorder" for call in template.op_calls.values())

    return sum(count(program.ir.template_of(call)) for call in program.ir.calls)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_program_in_order_is_the_model(name: str) -> None:
    model = made(name)
    program = compiled(model, mesh={"cp": 4})
    assert program.plan.order == 2
    assert reorders(program) > 0
    assert verify(program, model, tokens()).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 2])
def test_random_plans_of_a_program_in_order(name: str, pp: int) -> None:
    model = made(name)
    program = compiled(model, mesh={"dp": 2, "cp": 2})
    for seed in range(2):
        plan = random_plan(program, seed, pp)
        assert plan.order == 2
        assert verify(program.with_plan(plan), model, tokens()).ok


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_a_program_in_order_at_length(name: str, order: int) -> None:
    model = made(name)
    program = compiled(model, order=order, mesh={"dp": 2, "cp": 2})
    for seed in range(40):
        assert verify(program.with_plan(random_plan(program, seed)), model, tokens()).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "mesh": {"cp": 4}},
        {"pp": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
        {"strategy": "zero3"},
        {"recompute": "full", "mesh": {"cp": 4}},
        {"recompute": "selective", "mesh": {"cp": 2, "tp": 2}},
        {"precision": "bf16", "mesh": {"cp": 4}},
    ],
)
@pytest.mark.parametrize("name", ["rotary", "labels shifted in the model", "counted positions and a weighted mean"])
def test_every_lever_works_on_a_program_in_order(name: str, options: dict[str, Any]) -> None:
    model = made(name)
    program = compiled(model, **options)
    assert program.plan.order == 2
    assert verify(program, model, tokens()).ok


def test_dropout_of_scores_draws_alike_on_any_ranks() -> None:
    torch.manual_seed(0)
    model = Rotary(dropout=0.4)
    for mesh in ({"cp": 4}, {"cp": 2, "tp": 2}):
        assert verify(compiled(model, mesh=mesh), model, tokens()).ok


def test_outputs_come_back_in_their_own_order() -> None:
    class Scorer(Rotary):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.logits(ids)

    torch.manual_seed(0)
    model, (ids, _) = Scorer().eval(), tokens()
    program = autopar.compile(model, FOUR, (ids,), options=Options(order=2, mesh={"cp": 4}))
    assert program.plan.order == 2
    torch.testing.assert_close(program.run([(ids,)]).outputs[0], model(ids), rtol=1e-4, atol=1e-5)
    assert verify(program, model, (ids,)).ok


class Averaged(nn.Module):
    """A loss without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Sliced, "matmul, of 0.00614 MB, would be moved for an op that minds the order"),
        (Dropped, "would be moved for an op that minds the order"),
        (Convolved, "would be moved for an op that minds the order"),
        (functools.partial(Averaged, 16), "no attention of it has is_causal=True"),
    ],
)
def test_what_cannot_be_ordered_cheaply_is_refused_by_name(model: Callable[[], nn.Module], why: str) -> None:
    batch = (torch.randn(4, 16),) if isinstance(model, functools.partial) else tokens()
    with pytest.raises(InputError, match=f"cannot be put in zigzag order 2: .*{why}"):
        compiled(model(), batch)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="zigzag order 3"):
        compiled(Rotary(), order=3)


# --- the plan


def test_a_plan_says_its_order_where_there_is_one() -> None:
    program = compiled(made("rotary"), mesh={"cp": 4})
    data = program.plan.to_dict()
    assert data["order"] == 2
    assert Plan.from_dict(data) == program.plan
    assert "order" not in compiled(made("rotary"), order=0, mesh={"cp": 4}).plan.to_dict()
    for wrong in (-1, 1.5, "2", None):
        with pytest.raises(PlanError, match="order"):
            Plan.from_dict({**data, "order": wrong})


def test_a_plan_in_order_is_replayed_on_a_program_that_is_not() -> None:
    model = made("rotary")
    zigzag, natural = compiled(model, mesh={"cp": 4}), compiled(model, order=0, mesh={"cp": 4})
    assert zigzag.plan.program == natural.plan.program
    again = natural.with_plan(zigzag.plan)
    assert again.plan.order == 2
    assert again.source(0) == zigzag.source(0)
    assert zigzag.with_plan(natural.plan).source(0) == natural.source(0)
    assert verify(again, model, tokens()).ok
    assert autopar.check(again).ok


def test_a_plan_whose_order_the_model_cannot_have_is_refused() -> None:
    program = compiled(Sliced(), order=0, mesh={"cp": 4})
    with pytest.raises(PlanError, match="cannot be put in zigzag order 2"):
        program.with_plan(replace(program.plan, order=2))


@pytest.mark.slow
def test_buckets_each_have_their_sequence_in_order() -> None:
    torch.manual_seed(0)
    model = Learned()
    program = autopar.compile(
        model, FOUR, tokens(), optimizer=SGD, options=Options(order=2, mesh={"cp": 4}),
        buckets={"0": {1: (8, 16)}, "1": {1: (8, 16)}},
    )  # fmt: skip
    assert [one.plan.order for one in (program, *program.buckets)] == [2, 2]
    for length in (8, 16):
        assert verify(program, model, tokens(length=length)).ok
