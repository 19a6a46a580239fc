"""Plans whose gradients are reduced after every microbatch compute what eager computes, and hold what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.measure import measure_tiers
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2": (2, {"strategy": "zero2", "microbatches": 4}),
    "zero3": (2, {"strategy": "zero3", "microbatches": 2}),
    "megatron-zero2": (4, {"strategy": "megatron-zero2", "mesh": {"dp": 2, "tp": 2}, "microbatches": 2}),
    "many": (2, {"strategy": "zero2", "microbatches": 8}),
    "1f1b": (4, {"strategy": "zero2", "pp": 2, "schedule": "1f1b", "microbatches": 4}),
    "zb-h1": (4, {"strategy": "zero2", "pp": 2, "schedule": "zb-h1", "microbatches": 4}),
    "zb-v": (4, {"strategy": "zero3", "pp": 2, "schedule": "zb-v", "microbatches": 4}),
    "offloaded": (2, {"strategy": "zero2", "offload": "all", "microbatches": 4}),
    "compensated": (2, {"strategy": "zero2", "compensated_sums": True, "microbatches": 4}),
}
NUMBERS = 256
"""Bytes of single numbers that the prediction leaves out."""


def program_of(zoo: ZooModel, name: str) -> autopar.Program:
    ranks, options = CASES[name]
    cluster = autopar.ClusterSpec.local(ranks).with_tiers()
    try:
        return compiled_zoo(zoo, cluster, options=autopar.Options(coupled="per-microbatch", **options))
    except autopar.AutoparError as error:
        pytest.skip(f"{type(error).__name__}: {error}")


def test_gradients_are_reduced_by_microbatch_where_a_strategy_says_so() -> None:
    for name in CASES:
        program = program_of(BY_NAME["mlp"], name)
        stored = [p for stage in program.lowered.stages for p in stage.parameters.values()]
        assert all(p.by_microbatch for p in stored if p.contributions and p.optimizer.axes)
    zero1 = compiled_zoo(BY_NAME["mlp"], 2, options=autopar.Options(strategy="zero1", microbatches=4))
    assert not any(p.by_microbatch for p in zero1.lowered.stages[0].parameters.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_the_step_is_that_of_eager(zoo: ZooModel, name: str) -> None:
    program = program_of(zoo, name)
    result = autopar.verify(program, zoo.make(), zoo.batch())
    assert result.max_error <= 1e-9, result


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_bytes_are_what_was_predicted(zoo: ZooModel, name: str) -> None:
    program = program_of(zoo, name)
    for rank, (device, away) in enumerate(measure_tiers(program, zoo.batch())):
        group = program.group_of(rank)
        predicted = program.account.peaks[group]
        assert 0.98 * device - NUMBERS <= predicted <= 1.05 * device + NUMBERS
        for tier, nbytes in program.account.tier_peaks[group].items():
            assert away.get(tier, 0.0) <= 1.05 * nbytes + NUMBERS


def large(layers: int = 16, width: int = 2048, rows: int = 16384) -> tuple[nn.Module, Any]:
    """Layers whose gradients are larger than a bucket together, and whose activations are small beside them."""
    with torch.device("meta"):
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.GELU())]
        return nn.Sequential(*parts), (torch.empty(rows, width), torch.empty(rows, width))


def compiled_large(**options: Any) -> autopar.Program:
    model, batch = large()
    cluster = autopar.ClusterSpec.homogeneous(devices=8, device="h100")
    asked = autopar.Options(pp=1, recompute="none", **{"mesh": {"dp": 8}, **options})
    return autopar.compile(
        model, cluster, batch, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.AdamW, options=asked
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_microbatches_hold_no_more_gradients_than_one(strategy: str) -> None:
    """Messages under way are more where there are several microbatches: two of 25 MB, and what they give."""
    one, many = (compiled_large(strategy=strategy, microbatches=count).account.peak_bytes for count in (1, 8))
    assert many <= one + 2 * 30 * (1 << 20)
    whole = compiled_large(strategy="zero1", microbatches=8).account.peak_bytes
    held = sum(p.numel() * 4 for p in large()[0].parameters()) * 7 / 8
    assert compiled_large(strategy="zero2", microbatches=8).account.peak_bytes <= whole - 0.85 * held


def test_the_search_reduces_by_microbatch_what_it_has_no_room_for() -> None:
    """Parameters rest whole: their gradients do too where there is room, the largest of them do not where there is less, and an
    error says what all of them would take in shards."""
    whole = {"microbatches": 8, "constraints": {"*weight": "[., .]"}}
    by_limit: dict[int, int] = {}
    for limit in (1300, 720, 660, 540):
        program = compiled_large(**whole, memory_bytes=limit * 1e6)
        assert program.account.peak_bytes <= limit * 1e6
        by_limit[limit] = sum(p.by_microbatch for p in program.plan.stages[0].parameters.values())
    assert by_limit[1300] == by_limit[720] == 0
    assert 0 < by_limit[660] < by_limit[540] == 16
    least = program.account.peak_bytes
    with pytest.raises(autopar.InfeasibleError, match=rf"needs {least / 1e6:.0f} MB"):
        compiled_large(**whole, memory_bytes=0.95 * least)
