"""Offload: results do not change, bytes leave the device as predicted, and seconds are what the tier's bandwidth says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.tiers import (
    Tier,
    backward_non_overlapped_s,
    forward_non_overlapped_s,
    parts_non_overlapped_s,
    place,
)
from autopar.errors import ClusterError, InfeasibleError, InputError, PlanError
from autopar.ir.lines import AwaitSaved, FetchSaved
from autopar.ir.memory_levers import OFFLOAD_KINDS
from autopar.passes.price.tiers import parked_bytes
from autopar.proof.verify import verify
from autopar.runtime.memory.tiers import TIER_KINDS
from tests.measure import measure_tiers
from tests.proof.test_memory_measured import NUMBERS, OVER, PLANS, UNDER, WIDE
from tests.zoo import transformers
from tests.zoo.models import BY_NAME, ZooModel, ids
from tests.zoo.programs import compiled_zoo

KINDS = ("optimizer", "activations", "parameters", "all")
GPT = dataclasses.replace(
    WIDE[1],
    name="small gpt2",
    build=lambda: transformers.Gpt2(128, 32, 64, 4, 2),
    inputs=lambda: (ids(16, 32, 128), ids(16, 32, 128)),
)


@functools.cache
def compiled(
    zoo: ZooModel, plan: str, offload: str, ranks: int = 2, microbatches: int = 4, cluster: Any = None, **more: Any
) -> autopar.Program:
    options = dataclasses.replace(
        PLANS[plan], microbatches=microbatches, offload=offload, coupled="per-microbatch", **more
    )
    return compiled_zoo(zoo, cluster or autopar.ClusterSpec.local(ranks).with_tiers(), options=options)


def same(a: Any, b: Any) -> bool:
    """Whether two runs gave the same losses and the same parameters and buffers, bit for bit."""
    return all(map(torch.equal, a.losses, b.losses)) and all(torch.equal(a.state[n], b.state[n]) for n in a.state)


def assert_kept(program: autopar.Program, batch: Any) -> None:
    for rank, (device, tiers) in enumerate(measure_tiers(program, batch)):
        group = program.group_of(rank)
        rows = {"device": (program.account.peaks[group], device)}
        rows |= {t: (program.account.tier_peaks[group].get(t, 0.0), tiers.get(t, 0.0)) for t in TIER_KINDS}
        for where, (predicted, measured) in rows.items():
            shown = (
                f"rank {rank}, {where}: predicted {predicted:,.0f}, measured {measured:,.0f} bytes\n{program.report()}"
            )
            assert predicted >= (1 - UNDER) * measured - NUMBERS, shown
            assert predicted <= (1 + OVER) * measured + NUMBERS, shown


# --- results


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", KINDS)
@pytest.mark.parametrize("plan", ["dp", "zero3", "1f1b", "zb-h1"])
def test_offload_changes_no_bit(plan: str, offload: str) -> None:
    plain, moved = compiled(GPT, plan, "none"), compiled(GPT, plan, offload)
    assert same(plain.run(GPT.batch(1), steps=3), moved.run(GPT.batch(1), steps=3))


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", KINDS)
@pytest.mark.parametrize("plan", ["zero3", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_offloaded_programs_are_the_eager_model(name: str, plan: str, offload: str) -> None:
    zoo = BY_NAME[name]
    found = verify(compiled(zoo, plan, offload, microbatches=2), zoo.make(), zoo.batch())
    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("plan", ["zero3", "zb-h1"])
def test_offload_and_recompute_go_together(plan: str, recompute: str) -> None:
    plain = compiled(GPT, plan, "none", recompute=recompute)
    moved = compiled(GPT, plan, "all", recompute=recompute)
    assert same(plain.run(GPT.batch(1), steps=2), moved.run(GPT.batch(1), steps=2))
    assert_kept(moved, GPT.batch(1))


def test_state_in_files_gives_the_same_results() -> None:
    cluster = autopar.ClusterSpec.local(2).with_tiers(Tier("nvme", 1e9, 1e9))
    plain, moved = compiled(GPT, "zero3", "none"), compiled(GPT, "zero3", "all", cluster=cluster)
    assert {p.optimizer_tier for p in moved.stages[0].parameters.values()} == {"nvme"}
    assert same(plain.run(GPT.batch(1), steps=2), moved.run(GPT.batch(1), steps=2))
    assert_kept(moved, GPT.batch(1))


# --- bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", KINDS)
@pytest.mark.parametrize("plan", ["dp", "zero1", "zero3", "1f1b", "zb-h1"])
def test_device_and_tiers_hold_what_was_predicted(plan: str, offload: str) -> None:
    assert_kept(compiled(GPT, plan, offload), GPT.batch(1))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("offload", KINDS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("zoo", [*WIDE, *(BY_NAME[n] for n in ("resnet", "lstm", "moe", "recommender"))], ids=str)
def test_every_model_holds_what_was_predicted(zoo: ZooModel, plan: str, offload: str, microbatches: int) -> None:
    try:
        program = compiled(zoo, plan, offload, microbatches=microbatches)
    except InputError as error:  # a batch too small for so many ranks and microbatches
        pytest.skip(str(error))
    assert_kept(program, zoo.batch(1))


def test_optimizer_state_leaves_the_device() -> None:
    plain, moved = compiled(GPT, "dp", "none"), compiled(GPT, "dp", "optimizer")
    state = plain.account.resting_bytes["optimizer"]
    assert moved.account.resting_bytes["optimizer"] == 0
    assert moved.account.tier_peaks == ({"ddr": state},)


@pytest.mark.slow
def test_saved_values_of_many_layers_leave_the_device() -> None:
    """The values that two calls keep are on the device at once, of twelve equal layers, and no more."""
    deep = dataclasses.replace(
        BY_NAME["mlp"],
        name="deep mlp",
        build=functools.partial(_deep, 12),
        inputs=lambda: (torch.randn(2048, 64), torch.randn(2048, 64)),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
    )
    plain, moved = compiled(deep, "dp", "none", 1, 1), compiled(deep, "dp", "activations", 1, 1)
    assert moved.account.peak_bytes < 0.5 * plain.account.peak_bytes
    assert_kept(moved, deep.batch(1))
    assert same(plain.run(deep.batch(1), steps=2), moved.run(deep.batch(1), steps=2))


def _deep(layers: int) -> torch.nn.Module:
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())  # noqa: E731
    return torch.nn.Sequential(*(block() for _ in range(layers)))


# --- the emitted program


def test_saved_values_are_asked_for_one_call_ahead() -> None:
    program = compiled(WIDE[2], "dp", "activations")
    assert "rest in host memory until backward" in program.source(0)
    backward = program.lowered.stages[0].backward
    order = [line for line in backward.lines if isinstance(line, (FetchSaved, AwaitSaved))]
    fetched = [line.value for line in order if isinstance(line, FetchSaved)]
    ready = [line.value for line in order if isinstance(line, AwaitSaved)]
    assert len(fetched) >= 4
    assert ready == fetched
    places = {(type(line), line.value): place for place, line in enumerate(order)}
    for earlier, later in itertools.pairwise(fetched):
        assert places[FetchSaved, later] < places[AwaitSaved, earlier]


def test_programs_without_offload_say_nothing_of_tiers() -> None:
    source = compiled(GPT, "dp", "none").source(0)
    assert "tier" not in source
    assert "rt.park" not in source


def test_a_plan_with_tiers_is_saved_and_replayed(tmp_path: Path) -> None:
    program = compiled(GPT, "zero3", "all")
    program.plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json")
    assert again == program.plan
    assert program.with_plan(again).sources == program.sources
    data = json.loads((tmp_path / "plan.json").read_text())
    first = next(iter(data["stages"][0]["parameters"].values()))
    assert first["optimizer_tier"] == "ddr"
    first["optimizer_tier"] = "tape"
    with pytest.raises(PlanError, match=r"must be a memory tier, of ddr, nvme .*got 'tape'"):
        autopar.Plan.from_dict(data)


def test_a_person_may_offload_single_values_and_parameters() -> None:
    program = compiled(GPT, "dp", "none")
    stage = program.plan.stages[0]
    template = max(program.ir.templates, key=lambda n: program.ir.multiplicity[n])
    chosen = program.stages[0].templates[template].saved
    value = next(v for v in program.stages[0].templates[template].kept if v in chosen)
    templates = stage.templates | {template: dataclasses.replace(stage.templates[template], offload=(value,))}
    name = next(iter(stage.parameters))
    parameters = stage.parameters | {name: dataclasses.replace(stage.parameters[name], optimizer_tier="nvme")}
    plan = dataclasses.replace(
        program.plan, stages=(dataclasses.replace(stage, templates=templates, parameters=parameters),)
    )
    changed = program.with_plan(plan)
    assert_kept(changed, GPT.batch(1))
    assert set(changed.account.tier_peaks[0]) == {"ddr", "nvme"}
    assert same(program.run(GPT.batch(1), steps=2), changed.run(GPT.batch(1), steps=2))
    wrong = dataclasses.replace(stage.templates[template], offload=("nonsense",))
    with pytest.raises(PlanError, match="nonsense, which is no value of this template"):
        program.with_plan(
            dataclasses.replace(
                plan, stages=(dataclasses.replace(stage, templates=stage.templates | {template: wrong}),)
            )
        )


def test_checkpoints_hold_parked_state(tmp_path: Path) -> None:
    """Saved with state in a tier, loaded without, and the other way round: training goes on the same."""
    from autopar.runtime.checkpoint import checkpoint

    plain, moved = compiled(GPT, "zero3", "none"), compiled(GPT, "zero3", "all")
    batch = plain.leaves(GPT.batch(1))
    expected = plain.run(GPT.batch(1), steps=4).losses[2:]

    def trained(session: Any) -> list[torch.Tensor]:
        return [session.train_step(list(batch)).clone() for _ in range(2)]

    for first, second in ((plain, moved), (moved, plain)):

        def save(session: Any) -> None:
            trained(session)
            checkpoint.save(tmp_path, session)

        def resume(session: Any) -> list[torch.Tensor]:
            checkpoint.load(tmp_path, session)
            return trained(session)

        first.on_ranks(save)
        for losses in second.on_ranks(resume):
            assert all(map(torch.equal, losses, expected))


# --- seconds


def test_forward_hides_what_later_calls_cover() -> None:
    assert forward_non_overlapped_s([1, 1, 1], [0.5, 0.5, 0]) == 0
    assert forward_non_overlapped_s([1, 1, 1], [0.5, 0.5, 0.5]) == 0.5  # the last leaves after the last call
    assert forward_non_overlapped_s([1, 1, 1], [2, 2, 2]) == 4  # one after another from the end of the first call


def test_backward_waits_for_its_first_values_and_for_slow_ones() -> None:
    assert backward_non_overlapped_s([1, 1, 1], [0.5, 0.5, 0.5]) == 0.5
    assert backward_non_overlapped_s([1, 1, 1], [1, 2, 2]) == 3
    assert backward_non_overlapped_s([1, 1], [0, 0]) == 0


def test_parts_hide_transfers_behind_the_update_of_others() -> None:
    assert parts_non_overlapped_s(0.0, [1, 1, 1], [1, 1, 1]) == 4
    assert parts_non_overlapped_s(10.0, [1, 1, 1], [1, 1, 1]) == 2
    assert parts_non_overlapped_s(1.0, [], []) == 0


def test_a_transfer_is_priced_by_bandwidth_and_latency() -> None:
    tier = Tier("ddr", 1e9, 25e9, 1e-5)
    assert tier.move_s(25e6, 3) == pytest.approx(1e-3 + 3e-5)
    assert tier.move_s(0) == 0


def test_predicted_seconds_are_the_transfers() -> None:
    """On a CPU nothing hides a copy, so the step grows by the bytes over the bandwidth, both ways."""
    plain, moved = compiled(GPT, "dp", "none"), compiled(GPT, "dp", "activations")
    (move,) = moved.account.moves
    stage = moved.stages[0]
    per_step = 4 * sum(parked_bytes(stage.templates[c.template], stage.mesh) for c in moved.ir.calls)
    tier = moved.cluster.device(0).tier("ddr")
    assert move.nbytes == pytest.approx(2 * per_step)
    assert move.time_s > 2 * per_step / tier.bandwidth_Bps
    assert move.non_overlapped_s == pytest.approx(move.time_s)
    assert moved.account.step_time_s - plain.account.step_time_s == pytest.approx(move.time_s, rel=1e-6)
    assert moved.predicted.step_time_s == moved.account.step_time_s


def test_a_gpu_hides_transfers_and_a_slow_tier_shows() -> None:
    def step(bandwidth: float) -> autopar.Program:
        cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100").with_tiers(Tier("ddr", 1e12, bandwidth))
        return compiled(GPT, "dp", "activations", cluster=cluster)

    fast, slow = step(1e15), step(1e9)
    assert all(move.non_overlapped_s < 0.5 * move.time_s for move in fast.account.moves)
    assert slow.predicted.step_time_s > fast.predicted.step_time_s


# --- refusals


def test_offload_needs_tiers_and_says_how_to_get_them() -> None:
    with pytest.raises(ClusterError, match=r"no memory tiers.*with_tiers\(\)"):
        compiled(GPT, "dp", "optimizer", cluster=autopar.ClusterSpec.local(2))


def test_unknown_kinds_of_offload_are_refused() -> None:
    with pytest.raises(InputError, match=f"must be one of {', '.join(OFFLOAD_KINDS)}, auto"):
        autopar.Options(offload="everything")


def test_full_tiers_overflow_into_the_next_and_then_are_refused() -> None:
    tiers = [Tier("ddr", 100, 1e9), Tier("nvme", 1000, 1e8)]
    assert place({"a": 60, "b": 60, "c": 40}, tiers) == {"a": "ddr", "b": "nvme", "c": "ddr"}
    with pytest.raises(InfeasibleError, match="short per rank"):
        place({"a": 2000}, tiers)
    state = compiled(GPT, "dp", "optimizer").account.tier_peaks[0]["ddr"]
    cluster = autopar.ClusterSpec.local(2).with_tiers(Tier("ddr", state / 2, 1e9), Tier("nvme", state, 1e8))
    both = compiled(GPT, "dp", "optimizer", cluster=cluster)
    assert 0 < both.account.tier_peaks[0]["ddr"] <= state / 2
    assert sum(both.account.tier_peaks[0].values()) == state
    with pytest.raises(InfeasibleError, match="short per rank"):
        compiled(GPT, "dp", "optimizer", cluster=autopar.ClusterSpec.local(2).with_tiers(Tier("ddr", state / 2, 1e9)))
