"""Bytes that rest with a call, which stages are cut by: those on the device."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster.tiers import Tier
from autopar.passes.account.calls import Units, measure
from autopar.passes.lower.stage import lower_stage
from autopar.passes.memory.peak import stage_memory
from autopar.passes.price.pricer import Pricers

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
D, LAYERS = 256, 6
MATRIX = 4.0 * D * D


class Stack(nn.Module):
    """Layers one after another; the last may have the weight of the first."""

    def __init__(self, tied: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(layers))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def compiled(model: nn.Module, **options: object) -> autopar.ParallelProgram:
    cluster = autopar.ClusterSpec.local(2).with_tiers(Tier("ddr", 1e12, 1e9))
    return autopar.compile(model, cluster, (torch.randn(8, D),), optimizer=ADAM, options=autopar.Options(**options))


def units(program: autopar.ParallelProgram) -> Units:
    (plan,), pricers = program.plan.stages, Pricers(program.cluster)
    stage = lower_stage(program.ir, plan, pricers, program.rules, program.plan.microbatches, True)
    return measure(program.ir, stage, plan, pricers[plan.mesh], program.rules, program.setting)


@pytest.mark.parametrize(
    ("offload", "each"), [("none", 4 * MATRIX), ("optimizer", 2 * MATRIX), ("parameters", 0.0), ("all", 0.0)]
)
def test_what_is_in_a_tier_does_not_rest_on_the_device(offload: str, each: float) -> None:
    """A weight and its gradient, and Adam's two, which go where the weight goes."""
    program = compiled(Stack(), strategy="dp", mesh={"dp": 2}, offload=offload)
    resting = units(program).resting_bytes
    assert [n for n in resting if n] == pytest.approx([each] * (LAYERS if each else 0), rel=1e-4)
    at_rest = stage_memory(program.stages[0], program.setting).resting_bytes
    gradients = LAYERS * MATRIX if "parameters" not in program.setting.offload else 0.0
    assert sum(resting) == pytest.approx(at_rest + gradients, rel=1e-4)


def test_a_weight_that_stages_share_rests_on_the_device() -> None:
    program = compiled(Stack(tied=True), strategy="dp", mesh={"dp": 2}, offload="parameters")
    resting = units(program).resting_bytes
    assert [n for n in resting if n] == pytest.approx([2 * MATRIX], rel=1e-4)


def test_stages_fit_where_their_parameters_leave_the_device() -> None:
    layers = 16
    deep = functools.partial(compiled, Stack(layers=layers), pp=2, microbatches=4, offload="all")
    peak = deep().predicted.peak_bytes
    assert peak < layers / 2 * 2 * MATRIX, "less than the parameters and gradients of a stage"
    assert deep(memory_bytes=1.1 * peak).predicted.peak_bytes <= 1.1 * peak
