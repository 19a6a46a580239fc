"""Programs whose repeated layers and alike stages are lowered once and counted often, against the same lowered in full."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.account.calls import Units, measure
from autopar.passes.account.program import account, stage_costs
from autopar.passes.lower import lower, outline
from autopar.passes.lower.repeats import Shortened, shortened, whole
from autopar.passes.lower.stage import lower_stage
from autopar.passes.price.pricer import Pricers
from tests.capture.equal import SGD

LAYERS = 12


class Block(nn.Module):
    """Reads the block before it, and whatever else its layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return sum(others, x + self.down(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """A chain of blocks; how: what makes it more than that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for i, block in enumerate(self.blocks):
            if how == "tied in pairs" and i % 2:
                block.down = self.blocks[i - 1].down
            if how == "alternating" and i % 2:
                block.down = nn.Linear(16, 8, bias=False)
            if how == "half frozen" and i < LAYERS // 2:
                block.requires_grad_(False)
        if how == "half frozen":
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = start = before = self.first(x)
        made = []
        for block in self.blocks:
            others = {"reads the start": (start,), "reads two back": (before,)}.get(self.how, ())
            before, x = x, block(x, *others)
            made.append(x)
        return self.head(sum(made) if self.how == "all are read" else x).square().mean()


def compiled(how: str, **options: object) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    chosen = autopar.Options(**options)
    return autopar.compile(
        Stack(how), autopar.ClusterSpec.local(4), (torch.randn(8, 8),), optimizer=SGD, options=chosen
    )


def kind(program: autopar.ParallelProgram, name: str) -> Hashable:
    parameter = program.ir.parameters[name]
    return parameter.type, parameter.trainable, program.setting.optimizer.kind(name)


def units(program: autopar.ParallelProgram, short: Shortened) -> Units:
    """The costs of every call, by the lines of a program that is cut short."""
    (plan,), pricers = program.plan.stages, Pricers(program.cluster)
    stage = lower_stage(short.program, plan, pricers, program.rules, program.plan.microbatches, True)
    pricer = pricers[plan.mesh]
    return measure(short.program, stage, plan, pricer, program.rules, program.setting).at(short.stands_for)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how", ["chain", "reads the start", "reads two back", "tied in pairs", "alternating", "half frozen", "all are read"]
)
def test_a_call_of_a_shortened_program_costs_what_it_costs_in_the_whole_one(how: str) -> None:
    program = compiled(how, pp=1, mesh={"dp": 2, "tp": 2})
    short = shortened(program.ir, lambda name: kind(program, name))
    plans = program.plan.stages[0].parameters
    assert all(plans[name] == plans[other] for name, other in short.alike)
    left_out = len(program.ir.calls) - len(short.program.calls)
    assert (left_out > 0) == (how != "all are read")
    mine, full = units(program, short), units(program, whole(program.ir))
    for field in fields(Units):
        if field.name != "boundary_s":  # counted over the program as it is
            assert np.array_equal(getattr(mine, field.name), getattr(full, field.name)), field.name


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["chain", "reads the start", "half frozen"])
@pytest.mark.parametrize("split", [False, True], ids=["together", "apart"])
def test_stages_that_are_alike_cost_what_each_costs_by_itself(how: str, split: bool) -> None:
    schedule = "zb-h1" if split else "1f1b"
    program = compiled(
        how, pp=4, microbatches=4, schedule=schedule, stage_boundaries=["blocks.3", "blocks.6", "blocks.9"]
    )
    plan, pricers = program.plan, Pricers(program.cluster)
    drawn = outline(program.ir, plan, pricers, program.rules, split, lambda name: kind(program, name))
    given = plan.stages, program.ir.templates, pricers, program.setting, program.rules
    costs, in_full = stage_costs(drawn, *given), account(lower(program.ir, plan, pricers, program.rules), *given)
    assert len({id(stage.forward) for stage in drawn.stages}) < len(drawn.stages) or how == "half frozen"
    assert costs.hand_over == in_full.hand_over
    assert costs.graph == in_full.graph
    for mine, full in zip(costs.stages, in_full.stages, strict=True):
        assert (mine.memory, mine.seconds, mine.step_s) == (full.memory, full.seconds, full.step_s)
    assert program.account.collectives == in_full.collectives, "in the names of each stage itself"
    assert (program.account.peaks, program.account.step_time_s) == (in_full.peaks, in_full.step_time_s)
