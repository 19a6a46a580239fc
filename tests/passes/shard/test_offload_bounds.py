"""Bytes that calls park: the bound that tiers are chosen by, and the account that has the last word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.cluster.tiers import Tier
from autopar.errors import NoRoomError
from autopar.passes.shard.offload import least_parked_bytes
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo


def parking(zoo: ZooModel, capacity_bytes: float = 1e12, **options: Any) -> autopar.Program:
    """A zoo model on two ranks whose saved values go to a tier of such a capacity."""
    cluster = autopar.ClusterSpec.local(2)
    ((count, device),) = cluster.devices
    with_tier = replace(device, tiers=(Tier("ddr", capacity_bytes, 1e10),))
    chosen = {"pp": 1, "microbatches": 2, "coupled": "per-microbatch", "offload": "activations", **options}
    return compiled_zoo(
        zoo, replace(cluster, devices=((count, with_tier),)), options=autopar.Options(explain_s=0, **chosen)
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_plan_parks_less_than_the_bound(zoo: ZooModel, recompute: str) -> None:
    made = parking(zoo, recompute=recompute)
    held = made.account.tier_peaks[0].get("ddr", 0.0)
    assert least_parked_bytes(made.ir, made.plan.stages[0], made.setting) <= held


def test_what_calls_share_is_counted_once() -> None:
    """A Llama's blocks read the residual that the block before kept, and tables that all of them read."""
    made = parking(BY_NAME["llama"])
    held = made.account.tier_peaks[0]["ddr"]
    assert least_parked_bytes(made.ir, made.plan.stages[0], made.setting) > 0.8 * held


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"pp": 1}, {"pp": 2, "schedule": "gpipe"}], ids=["one mesh", "pipeline"])
def test_a_tier_holds_what_the_account_says(options: dict[str, Any]) -> None:
    """Pipelines are not known when tiers are chosen; the account of the whole plan is."""
    held = max(peaks["ddr"] for peaks in parking(BY_NAME["llama"], **options).account.tier_peaks)
    assert parking(BY_NAME["llama"], held, **options).account.tier_peaks
    with pytest.raises(NoRoomError, match="memory tier"):
        parking(BY_NAME["llama"], held - 1, **options)
