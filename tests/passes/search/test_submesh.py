"""The ingredients of cuts: microbatch counts, places to cut, kinds of devices, and costs between two planned counts."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.ir.mesh import Mesh, Shares
from autopar.options import Options
from autopar.passes.account.calls import Units
from autopar.passes.search.microbatches import TasksByCount, microbatch_counts
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.limits import StageLimits, boundary_calls
from autopar.passes.search.stages.submesh import PlansByCount, SubmeshPlan, between, option_of, two_counts


def task(ranks: int = 4, **options: Any) -> Any:
    stub = SimpleNamespace(options=Options(**options), cluster=SimpleNamespace(size=ranks))
    stub.batches = SimpleNamespace(may_be=lambda microbatches: True)
    stub.at = lambda microbatches: stub
    return stub


@pytest.mark.parametrize(
    ("batch", "options", "counts"),
    [
        (12, {}, [2, 4, 12]),
        (7, {}, [7]),
        (1, {}, [1]),
        (13, {"pp": 1}, [13]),
        (64, {"pp": 1}, [2, 4, 8, 16]),
        (4096, {}, [2, 4, 8, 16, 32, 64]),
        (64, {"microbatches": 6}, [6]),
    ],
    ids=str,
)
def test_counts_are_divisors_at_most_one_per_doubling(batch: int, options: dict, counts: list[int]) -> None:
    assert microbatch_counts(task(**options), batch) == counts


@pytest.mark.parametrize(
    ("ranks", "batch", "counts"),
    [
        (96, 96, [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
        (96, 64, [2, 4, 8, 16, 32, 64]),
        (20, 40, [2, 4, 5, 8, 10, 20, 40]),
    ],
)
def test_counts_for_ranks_with_an_odd_part_are_multiples_of_it_too(ranks: int, batch: int, counts: list[int]) -> None:
    assert microbatch_counts(task(ranks), batch) == counts


def test_the_odd_part_of_all_ranks_lies_in_the_submeshes_or_in_their_number() -> None:
    cluster = ClusterSpec.preset("dgx-h100", 12)
    stub: Any = SimpleNamespace(options=Options(), cluster=cluster)
    limits = StageLimits(None, None, None, 100, [0], (96,), False)
    groups = sorted({96 // mesh.size for mesh in limits.submeshes(stub)})
    assert groups == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


def test_two_counts_are_planned_a_quarter_from_either_end() -> None:
    assert two_counts([2, 4, 8, 16, 32, 64]) == (4, 32)
    assert two_counts([1, 2, 4, 8, 16, 32, 64]) == (4, 32)
    assert two_counts([3]) == (3, 3)
    assert two_counts([1]) == (1, 1)


def test_a_fixed_count_needs_no_other_task() -> None:
    fixed = task(microbatches=4)
    tasks = TasksByCount(fixed, 8)
    assert tasks.counts() == [4]
    assert tasks.at(4) is fixed
    assert TasksByCount(task(), 8).counts() == [1, 2, 4, 8]


def test_what_a_copy_prices_with_does_not_matter_to_the_original() -> None:
    fixed, other = task(microbatches=4), task(microbatches=4)
    tasks = TasksByCount(fixed, 8)
    assert tasks.at(4) is fixed
    copy = tasks.copy()
    assert copy.replace(4, other)
    assert not copy.replace(4, other), "it is that task already"
    assert (copy.at(4), tasks.at(4)) == (other, fixed)


# --- places to cut ----------------------------------------------------------------------------------------------------


def program(*paths: str) -> Any:
    """A chain of calls that start at these modules."""
    calls = [SimpleNamespace(start=path, path=path, prologue=False) for path in paths]
    return SimpleNamespace(calls=calls, buffer_updates={})


CHAIN = program("embed", "blocks.1", "blocks.10", "blocks.2.attn", "head")


def test_a_stage_starts_at_the_first_call_inside_a_module() -> None:
    assert boundary_calls(CHAIN, ["blocks.10", "blocks.2"]) == (2, 3)
    assert boundary_calls(CHAIN, ["blocks.1"]) == (1,)


@pytest.mark.parametrize("path", ["embed", "blocks.3", "block"])
def test_no_stage_starts_where_no_call_does(path: str) -> None:
    with pytest.raises(InputError, match=r"the places are blocks\.1, blocks\.10, blocks\.2\.attn, head"):
        boundary_calls(CHAIN, [path])


@pytest.mark.parametrize("paths", [["head", "blocks.1"], ["head", "head"]])
def test_boundaries_are_in_order_and_differ(paths: list[str]) -> None:
    with pytest.raises(InputError, match="in the model's order and differ"):
        boundary_calls(CHAIN, paths)


# --- submeshes --------------------------------------------------------------------------------------------------------


def mixed_cluster(*devices: str) -> ClusterSpec:
    nodes = [{"count": 1, "device": device, "devices_per_node": 2} for device in devices]
    return ClusterSpec.from_dict({"name": "mixed", "nodes": nodes})


def test_runs_of_equal_devices_are_one_kind() -> None:
    assert ClusterSpec.homogeneous(devices=8, device="h100", devices_per_node=4).kind_starts == [0]
    assert mixed_cluster("h100", "h100", "a100").kind_starts == [0, 4]
    assert mixed_cluster("h100", "a100", "h100").kind_starts == [0, 2, 4]


def limits(cluster: ClusterSpec, stages: int = 8, **options: Any) -> tuple[StageLimits, Any]:
    chain = program(*(f"blocks.{i}" for i in range(stages)))
    asked: Any = SimpleNamespace(options=Options(**options), cluster=cluster, program=chain)
    return StageLimits.of(asked), asked


def test_devices_are_counted_by_kind() -> None:
    found, _ = limits(mixed_cluster("h100", "h100", "a100"))
    assert (found.kinds, found.available, found.mixed) == ([0, 4], (4, 2), True)


def test_boundaries_say_how_many_groups_there_are() -> None:
    found, _ = limits(ClusterSpec.local(4), stage_boundaries=["blocks.2", "blocks.5"])
    assert (found.boundaries, found.pp, found.most_stages) == ((2, 5), 3, 8)


def test_submeshes_of_a_large_cluster_make_powers_of_two_of_groups() -> None:
    found, asked = limits(ClusterSpec.homogeneous(devices=32, device="h100", devices_per_node=8))
    sizes = {mesh.size for mesh in found.submeshes(asked)}
    assert sizes == {4, 8, 16}, "2, 4 and 8 groups: the program has no more stages"
    forced, asked = limits(ClusterSpec.homogeneous(devices=32, device="h100", devices_per_node=8), pp=2)
    assert {mesh.size for mesh in forced.submeshes(asked)} == {16}


# --- costs between two counts -----------------------------------------------------------------------------------------


def plan(mesh: Mesh, cost: np.ndarray) -> SubmeshPlan:
    units = Units(**{f.name: cost.copy() for f in fields(Units)})
    return SubmeshPlan(mesh, None, units, None)  # type: ignore[arg-type]


def by_count(planned: dict[int, SubmeshPlan], launched_s: float = 0.0, prologue: tuple[int, ...] = ()) -> PlansByCount:
    calls = len(next(iter(planned.values())).units.forward_s)
    return PlansByCount(planned, tuple(planned), np.full(calls, launched_s), prologue)


def test_costs_between_two_counts_are_a_fixed_part_and_a_part_per_microbatch() -> None:
    fixed, shared, mesh = np.array([1.0, 0.0, 3.0]), np.array([8.0, 16.0, 0.0]), Mesh.of(dp=2)
    at = {M: plan(mesh, fixed + shared / M) for M in (2, 4, 8, 16)}
    plans = by_count({16: at[16], 2: at[2]})
    for M in (2, 4, 8, 16):
        np.testing.assert_allclose(plans.at(M).units.forward_s, at[M].units.forward_s)
    assert (plans.at(2), plans.at(16)) == (at[2], at[16])


def test_costs_below_both_counts_are_within_what_larger_microbatches_can_take() -> None:
    at_2, at_8 = plan(Mesh.of(dp=2), np.array([4.0, 4.0, 1.0])), plan(Mesh.of(dp=2), np.array([1.0, 5.0, 0.0]))
    np.testing.assert_allclose(by_count({8: at_8, 2: at_2}).at(1).units.forward_s, [8.0, 4.0, 2.0])


def test_from_one_count_alone_costs_are_in_proportion_but_for_launches() -> None:
    """A microbatch of a quarter takes no less than its launches; one of four times as much has them once."""
    plans = by_count({4: plan(Mesh.of(dp=2), np.array([4.0, 1.0]))}, launched_s=3.0)
    at_16, at_1 = (plans.at(M).units.forward_s / (1 + 0.15) for M in (16, 1))
    np.testing.assert_allclose(at_16, [1.0, 1.0])
    np.testing.assert_allclose(at_1, [1.0 + 4 * 3.0, 1.0])


def test_calls_that_only_several_microbatches_have_come_and_go() -> None:
    """One microbatch has no prologue; what was planned for it says nothing of one."""
    mesh = Mesh.of(dp=2)
    from_four = by_count({4: plan(mesh, np.array([1.0, 2.0, 3.0]))}, prologue=(1,)).at(1)
    assert len(from_four.units.forward_s) == len(from_four.units.boundary_s) == 2
    from_one = PlansByCount({1: plan(mesh, np.array([1.0, 3.0]))}, (1, 4), np.full(2, 9.0), (1,)).at(4)
    np.testing.assert_allclose(from_one.units.resting_bytes, [1.0, 0.0, 3.0])
    both = by_count({4: plan(mesh, np.ones(3)), 1: plan(mesh, np.ones(2))}, prologue=(1,))
    assert len(both.at(2).units.forward_s) == 3


def test_a_second_plan_is_made_where_good_cuts_are_in_a_number_of_microbatches_that_was_not_planned() -> None:
    """Meshes are those that were asked for; their plans may be on the same ranks with shares of rows."""
    asked, shared = Mesh.of(dp=2), Mesh((("dp", Shares((2, 1))),))
    plans = {asked: PlansByCount({2: plan(shared, np.ones(2))}, (2, 4), np.zeros(2))}

    def draft(M: int, step_s: float) -> Any:
        return SimpleNamespace(microbatches=M, step_s=step_s, used_meshes=lambda: [plans[asked].at(M).mesh])

    def lacking(*drafts: Any) -> dict[Mesh, int]:
        return CutSearch.lacking(drafts, plans, 1.0)

    assert lacking(draft(4, 0.9)) == {asked: 4}
    assert lacking(draft(2, 0.9)) == lacking(draft(4, 1.0)) == {}
    assert lacking(draft(2, 0.5), draft(4, 0.7)) == {}, "the first takes much less"


def test_no_cost_falls_below_nothing() -> None:
    low, high = plan(Mesh.of(dp=2), np.array([9.0])), plan(Mesh.of(dp=2), np.array([1.0]))
    assert between(low, 2, high, 8, 64).units.forward_s == [0.0]


def test_an_option_of_the_stage_solver_names_its_kind_of_device() -> None:
    option = option_of(plan(Mesh((("dp", 2),), 4), np.array([1.0, 2.0])), [0, 4], 80.0)
    assert (option.devices, option.kind, option.limit_bytes) == (2, 1, 80.0)
    np.testing.assert_allclose(option.backward_s, [2.0, 4.0])  # B and W together
