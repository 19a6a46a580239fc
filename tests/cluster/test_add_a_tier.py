"""Adding a memory tier is adding its row to `autopar/runtime/memory/tiers.py`.

Here it is memory behind CXL, between host memory and files.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import autopar
from autopar.cluster import ClusterSpec
from autopar.cluster.device import load_data
from autopar.cluster.tiers import Tier, place, tiers_data, tiers_from_dict
from autopar.errors import ClusterError, PlanError
from autopar.plan import Plan
from autopar.runtime.memory.tiers import TIER_KINDS, TierKind
from tests.proof.test_offload import assert_kept
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

EXPANDER = TierKind("cxl", rank=1.5, holds="a memory expander")
ZOO = BY_NAME["llama"]


@pytest.fixture
def cxl(monkeypatch: pytest.MonkeyPatch) -> Tier:
    with pytest.raises(ClusterError, match="unknown memory tier 'cxl'; tiers are ddr, nvme"):
        Tier("cxl", 1e12, 2e10)
    monkeypatch.setitem(TIER_KINDS, EXPANDER.name, EXPANDER)
    return Tier("cxl", 1e12, 2e10)


def compiled(*tiers: Tier, offload: str = "all") -> autopar.ParallelProgram:
    options = autopar.Options(pp=1, microbatches=2, strategy="zero3", offload=offload)
    return compiled_zoo(ZOO, ClusterSpec.local(2).with_tiers(*tiers), options=options)


def test_its_rank_is_its_place_whatever_it_is_called(cxl: Tier) -> None:
    disk, host = Tier("nvme", 1e12, 7e9), Tier("ddr", 1e12, 5e10)
    given = ClusterSpec.local(2).with_tiers(disk, cxl, host)
    direct = replace(given.device(0), tiers=(cxl, disk, host))
    read = tiers_from_dict(tiers_data((disk, cxl, host)))
    for tiers in (given.device(0).tiers, direct.tiers, read):
        assert [tier.name for tier in tiers] == ["ddr", "cxl", "nvme"]
    assert place({"first": 1e12, "second": 1e12}, given.device(0).tiers) == {"first": "ddr", "second": "cxl"}


def test_what_is_offloaded_rests_there(cxl: Tier) -> None:
    program = compiled(Tier("nvme", 1e12, 1e9), cxl)
    parameters = program.stages[0].parameters.values()
    assert {(p.tier, p.optimizer_tier) for p in parameters} == {("cxl", "cxl")}
    assert {t.offload_tier for t in program.stages[0].templates.values() if t.offload} == {"cxl"}
    found = autopar.verify(program, ZOO.make(), ZOO.batch(1))
    assert found.ok
    assert found.max_error <= 1e-9
    assert_kept(program, ZOO.batch(1))


def test_files_and_messages_say_it(cxl: Tier) -> None:
    program = compiled(cxl)
    assert Plan.from_dict(json.loads(program.plan.to_json())) == program.plan
    assert "rest in a memory expander until backward" in program.source()
    cluster = json.loads(json.dumps(program.cluster.to_dict()))
    assert ClusterSpec.from_dict(cluster) == program.cluster
    assert "cxl" in program.report()


def test_machines_that_usually_have_it_say_so_in_their_row(cxl: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_data("tiers.json")
    monkeypatch.setitem(table["latency_s"], "cxl", 2e-6)
    monkeypatch.setitem(table["families"]["h100"]["tiers"], "cxl", {"bytes": 4e12, "Bps": 160e9})
    ddr, expander, nvme = ClusterSpec.preset("dgx-h100").with_tiers().device(0).tiers
    assert (ddr.name, nvme.name) == ("ddr", "nvme")
    assert expander == Tier("cxl", 0.5e12, 20e9, 2e-6)


def test_a_plan_that_names_a_tier_which_there_is_not_is_refused(cxl: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = json.loads(compiled(cxl).plan.to_json())
    monkeypatch.delitem(TIER_KINDS, "cxl")
    with pytest.raises(PlanError, match="must be a memory tier, of ddr, nvme"):
        Plan.from_dict(plan)
