"""Programs of other steps have the stages of a first one: each starts with its own calls, or has none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, ConstraintError
from autopar.ir.program import Program
from autopar.options import Entry
from autopar.passes.lower.cut import Range
from autopar.passes.search.layout import Layout

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LOSS = nn.functional.cross_entropy
BLOCKS = 4
STARTS = tuple(f"blocks.{i}" for i in range(1, BLOCKS))
ORDERS = {"some": (1, 3), "one": (2,), "first": (0, 1), "trained": (0, 3)}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Blocks(nn.Module):
    """Blocks in an order, which need not have all of them."""

    def __init__(self, blocks: nn.ModuleList, order: Sequence[int]) -> None:
        super().__init__()
        self.blocks, self.order = blocks, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


def models() -> dict[str, Blocks]:
    """The model of all blocks, and those of some of its blocks by name."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(block() for _ in range(BLOCKS)).double()
    return {name: Blocks(blocks, order) for name, order in {"": range(BLOCKS), **ORDERS}.items()}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=make).double(), torch.randint(0, 8, (8,), generator=make)


def captured(order: Sequence[int]) -> Program:
    model = models()[""]
    model.order = order
    return autopar.compile(model, autopar.ClusterSpec.local(1), batch(), loss_fn=LOSS, optimizer=SGD).ir


@functools.cache
def stage_by_block() -> Layout:
    """The layout of a pipeline of all blocks with a stage for each."""
    options = autopar.Options(schedule="1f1b", microbatches=2, stage_boundaries=STARTS)
    cluster = autopar.ClusterSpec.local(BLOCKS)
    program = autopar.compile(models()[""], cluster, batch(), loss_fn=LOSS, optimizer=SGD, options=options)
    return Layout.of(program.plan, program.ir)


def ranges_of(order: Sequence[int]) -> tuple[tuple[Range, ...], Program]:
    """The calls of every stage of that layout in the program of blocks in an order."""
    layout, program = stage_by_block(), captured(order)
    homes = {name: frozenset({s}) for s, stage in enumerate(layout.stages) for name in stage.parameters}
    return layout.ranges(replace(program, homes=homes)), program


@pytest.mark.parametrize("order", [(0,), (3,), (1, 2), (0, 3), (0, 2, 3)], ids=str)
def test_every_stage_has_the_calls_of_its_parameters_and_may_have_none(order: tuple[int, ...]) -> None:
    ranges, program = ranges_of(order)
    stage_of = {name: s for s, stage in enumerate(stage_by_block().stages) for name in stage.parameters}
    for (first, last), s in zip(ranges, itertools.count(), strict=False):
        assert {stage_of[name] for call in program.calls[first:last] for name in call.params} <= {s}
    assert [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), len(program.calls)]
    assert {s for s, (first, last) in enumerate(ranges) if first == last} >= {*range(order[0])}, (
        "before the first block"
    )


def test_blocks_in_another_order_than_that_of_the_stages_are_refused() -> None:
    with pytest.raises(CaptureError, match="cannot be cut into the same 4 stages"):
        ranges_of((3, 2, 1, 0))


def test_a_constraint_of_an_entry_that_the_program_does_not_store_is_refused_as_such() -> None:
    given = models()
    constraints = {"blocks.0.0.weight": "[@dp, .]"}
    with pytest.raises(
        ConstraintError, match=r"constraints .* and how the program's own step stores parameters cannot be met"
    ):
        autopar.compile(
            given[""],
            autopar.ClusterSpec.local(4),
            batch(),
            loss_fn=LOSS,
            optimizer=SGD,
            entries={"some": Entry(batch(), module=given["some"], options=autopar.Options(constraints=constraints))},
            options=autopar.Options(pp=2, strategy="dp"),
        )


@pytest.mark.parametrize(
    ("schedule", "groups"),
    [
        pytest.param(schedule, groups, marks=() if schedule == "dualpipev" else pytest.mark.slow)
        for schedule, groups in (("dualpipev", 2), ("zb-v", 2), ("interleaved-zb", 2), ("1f1b", 4), ("zb-auto", 4))
    ],
)
def test_entries_that_leave_stages_without_calls_are_those_of_eager(schedule: str, groups: int) -> None:
    given = models()
    entries = {name: Entry(batch(), module=given[name]) for name in ORDERS}
    trains = [*given["trained"].blocks[0].parameters(), *given["trained"].blocks[3].parameters()]
    entries["trained"] = replace(entries["trained"], train=True, optimizer=SGD, trains=trains)
    program = autopar.compile(
        given[""],
        autopar.ClusterSpec.local(groups),
        batch(),
        loss_fn=LOSS,
        optimizer=SGD,
        entries=entries,
        options=autopar.Options(schedule=schedule, microbatches=4, stage_boundaries=STARTS),
    )
    assert [stage.calls for stage in program.entry("one").plan.stages[:2]] == [(0, 0)] * 2
    turns = [(name, batch(seed)) for seed, name in enumerate(("", "trained", *ORDERS, "", "some"))]
    result = program.run_in_turn(turns)
    losses, outputs, state = eager(turns)
    torch.testing.assert_close(list(result.losses), losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(list(result.outputs), outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.state_dict(), state, rtol=1e-9, atol=1e-9)
    assert "calls none" in program.entry("one").report()


def eager(turns: Sequence[tuple[str, Any]]) -> tuple[list[torch.Tensor], list[Any], dict[str, torch.Tensor]]:
    """Losses of the steps that train, (loss, output) of the others, and the parameters afterwards."""
    given = models()
    blocks = given[""].blocks
    optimizers = {"": SGD(blocks.parameters()), "trained": SGD([*blocks[0].parameters(), *blocks[3].parameters()])}
    losses, outputs = list[torch.Tensor](), list[Any]()
    for name, (x, y) in turns:
        if name not in optimizers:
            with torch.no_grad():
                output = given[name](x)
                outputs.append((LOSS(output, y), output))
            continue
        optimizers[name].zero_grad()
        loss = LOSS(given[name](x), y)
        loss.backward()
        optimizers[name].step()
        losses.append(loss.detach())
    return losses, outputs, dict(given[""].state_dict())
