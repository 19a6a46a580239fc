"""Copies to memory tiers that arrive as late as they may: at the next read of the device, or when somebody waits for them.

On a GPU these copies run on a stream of their own. What stands for it here is a list of copies that are made when something is
ordered behind them, so whoever reads the host's memory too early reads what was there before.
"""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

import autopar
from autopar.runtime.memory.tiers import Tiers
from autopar.runtime.update.update_rule import LossScaling
from tests.proof.test_offload import GPT, PLANS, same
from tests.zoo.programs import compiled_zoo

UPDATES = {
    "clipped norm": {"clip_grad_norm": 0.05},
    "clipped values": {"clip_grad_value": 1e-4},
    "scaled loss": {"loss_scaling": LossScaling(2.0**10)},
    "scaled and clipped": {"loss_scaling": LossScaling(2.0**10), "clip_grad_norm": 0.05},
}


@functools.cache
def compiled(plan: str, offload: str, update: str) -> autopar.Program:
    options = dict(vars(PLANS[plan])) | {"microbatches": 4, "offload": offload}
    cluster = autopar.ClusterSpec.local(2).with_tiers()
    return compiled_zoo(GPT, cluster, options=autopar.Options(**options), **UPDATES[update])


class Late:
    """Copies under way on each rank. arrived: how many were done before a read of the device, and how many for the host."""

    def __init__(self) -> None:
        self.arrived = {"read": 0, "settle": 0}

    def arrive(self, tiers: Tiers, why: str) -> None:
        under_way: list[tuple[Tensor, Tensor]] = vars(tiers).pop("late", [])
        for target, value in under_way:
            target.copy_(value)
        self.arrived[why] += len(under_way)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Every copy to a tier is late; until it is there, its room holds nothing that anybody may use."""
    late, read = Late(), Tiers.read

    def write(tiers: Tiers, target: Tensor, value: Tensor) -> None:
        target.fill_(float("nan") if target.is_floating_point() else -1)
        vars(tiers).setdefault("late", []).append((target, value))

    def read_behind(tiers: Tiers, source: Tensor) -> Tensor:
        late.arrive(tiers, "read")
        return read(tiers, source)

    monkeypatch.setattr(Tiers, "write", write)
    monkeypatch.setattr(Tiers, "read", read_behind)
    monkeypatch.setattr(Tiers, "settle", lambda tiers: late.arrive(tiers, "settle"))
    return late


@pytest.mark.few(4)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("offload", ["parameters", "all", "optimizer"])
@pytest.mark.parametrize("plan", ["dp", "zero3", "1f1b"])
def test_late_copies_change_no_bit(plan: str, offload: str, update: str, late: Late) -> None:
    """The host reads what lies in tiers for the norm, for scaled gradients, and for the state at the end."""
    plain, moved = compiled(plan, "none", update), compiled(plan, offload, update)
    assert same(plain.run(GPT.batch(1), steps=3), moved.run(GPT.batch(1), steps=3))
    assert late.arrived["settle"]
    assert late.arrived["read"]
