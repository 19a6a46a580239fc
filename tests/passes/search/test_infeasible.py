"""The answer to an infeasible request: the shortage by kind against closed forms, and changes that hold when they are made.

The reference text asks for 200 trillion parameters on 2048 devices: 400 TB of parameters, as many of gradients and twice
as many of Adam's state in bf16, where all devices together have 164 TB.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import ClusterSpec, Options
from autopar.cluster import scaled
from autopar.cluster.tiers import Tier
from autopar.errors import ConstraintError, InfeasibleError, InputError, NoRoomError
from autopar.passes.memory.step_peaks import group_peaks, peak_kinds
from benchmarks.models import Llama, LlamaShape

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
WIDTH, DEPTH = 256, 4
LEAN = 1.6e8  # bytes: less than four layers keep for a batch of 16384, enough with half of it made again
PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4  # bytes


def h100(ranks: int) -> ClusterSpec:
    return ClusterSpec.homogeneous(devices=ranks, device="h100")


def mlp(
    ranks: int = 2, batch: int = 16, train: bool = True, cluster: ClusterSpec | None = None, **options: Any
) -> autopar.Program:
    """Four square layers, their storage sharded over one axis or not at all."""
    cluster = cluster or h100(ranks)
    options.setdefault("mesh", {"dp": cluster.size // options.get("pp", 1)})
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        x = torch.empty(batch, WIDTH)
    training = {"loss_fn": F.mse_loss, "optimizer": ADAMW} if train else {}
    inputs = (x, x) if train else (x,)
    return autopar.compile(model, cluster, inputs, options=Options(**options), **training)


def refused(kind: type[InfeasibleError] = InfeasibleError, **request: Any) -> InfeasibleError:
    with pytest.raises(kind) as caught:
        mlp(**request)
    return caught.value


def change(error: InfeasibleError, kind: str) -> Any:
    found = {c.kind: c for c in error.alternatives}
    assert kind in found, str(error)
    return found[kind]


def test_the_shortage_is_that_of_the_smallest_plan_by_kind() -> None:
    error = refused(memory_bytes=PARAMETERS, explain_s=0)
    short = error.shortage
    assert short is not None
    assert short.ranks == 2
    assert short.limit_bytes == PARAMETERS
    assert sum(short.by_kind.values()) == pytest.approx(short.needed_bytes)
    assert short.by_kind["parameters"] == PARAMETERS / 2
    assert short.by_kind["optimizer"] == PARAMETERS
    assert short.by_kind["gradients"] + short.by_kind["for a moment"] >= PARAMETERS / 2
    assert short.in_all == {"parameters": PARAMETERS, "gradients": PARAMETERS, "optimizer": 2 * PARAMETERS}
    assert short.short_bytes == short.needed_bytes - PARAMETERS > 0
    for said in (
        "nothing fits in 1.05 MB per rank",
        "too much",
        "optimizer state 1.05 MB",
        "in all: parameters 1.05 MB",
    ):
        assert said in str(error)


def test_what_the_smallest_plan_needs_is_enough() -> None:
    short = refused(memory_bytes=PARAMETERS, explain_s=0).shortage
    assert short is not None
    assert mlp(memory_bytes=short.needed_bytes).predicted.peak_bytes <= short.needed_bytes


def test_more_ranks_than_said_are_not_needed_and_fewer_do_not_do() -> None:
    error = refused(memory_bytes=1.3 * PARAMETERS)
    made = change(error, "ranks")
    assert made.cluster.size in (4, 8)
    assert f"{made.cluster.size} ranks instead of 2" in str(error)
    program = mlp(cluster=made.cluster, memory_bytes=1.3 * PARAMETERS)
    assert program.predicted.peak_bytes <= 1.3 * PARAMETERS
    assert program.predicted.step_time_s <= made.step_time_s * 1.01
    if made.cluster.size > 4:
        refused(cluster=scaled(h100(2), 2), memory_bytes=1.3 * PARAMETERS, explain_s=0)


def test_offload_uses_the_tiers_there_are_and_says_when_they_are_assumed() -> None:
    limit = 1.3 * PARAMETERS
    assumed = change(refused(memory_bytes=limit), "offload")
    assert "usual memory tiers, as the cluster describes none (ddr 250 GB per rank" in assumed.text
    tiered = h100(2).with_tiers(Tier("ddr", 1e9, 1e10))
    given = change(refused(cluster=tiered, memory_bytes=limit, offload="none"), "offload")
    assert "the cluster's memory tiers" in given.text
    assert given.cluster == tiered
    program = mlp(cluster=given.cluster, memory_bytes=limit, offload=given.options.offload)
    assert program.predicted.peak_bytes <= limit
    assert program.predicted.step_time_s <= given.step_time_s * 1.01


def test_what_is_short_of_activations_is_met_by_recompute_microbatches_or_a_smaller_batch() -> None:
    error = refused(ranks=1, batch=16384, recompute="none", microbatches=1, memory_bytes=LEAN)
    for kind in ("recompute", "microbatches", "batch"):
        made = change(error, kind)
        program = mlp(
            cluster=made.cluster,
            batch=made.batch,
            **{k: getattr(made.options, k) for k in ("recompute", "microbatches", "memory_bytes", "offload")},
        )
        assert program.predicted.peak_bytes <= LEAN
        assert program.predicted.step_time_s <= made.step_time_s * 1.01
    assert change(error, "batch").batch < 16384
    assert change(error, "microbatches").options.microbatches > 1


@pytest.mark.slow
def test_the_nearest_power_of_two_of_a_batch_is_found() -> None:
    error = refused(ranks=1, batch=16384, recompute="none", microbatches=1, memory_bytes=LEAN)
    least = change(error, "batch").batch
    refused(ranks=1, batch=2 * least, recompute="none", microbatches=1, memory_bytes=LEAN, explain_s=0)


def test_options_and_constraints_stay_in_force() -> None:
    whole = {"*.weight": "[., .]"}
    error = refused(memory_bytes=1.3 * PARAMETERS, constraints=whole, strategy="auto", mesh={"dp": 2})
    assert all(c.options.constraints == whole for c in error.alternatives)
    for made in error.alternatives:
        assert made.options.mesh == {"dp": made.cluster.size}
        assert made.options == replace(
            Options(memory_bytes=1.3 * PARAMETERS, constraints=whole, mesh={"dp": made.cluster.size}),
            offload=made.options.offload,
        )
    assert "ranks" not in {
        c.kind for c in error.alternatives
    }  # parameters are whole on every rank however many there are


def test_constraints_that_cannot_be_met_are_refused_as_such() -> None:
    with pytest.raises(ConstraintError):
        mlp(memory_bytes=1e3, constraints={"nothing.like.it": "[., .]"})


def test_inference_holds_parameters_alone() -> None:
    error = refused(train=False, memory_bytes=PARAMETERS / 4, ranks=2)
    short = error.shortage
    assert short is not None
    assert short.in_all == {"parameters": PARAMETERS}
    assert short.by_kind["gradients"] == short.by_kind["optimizer"] == 0
    assert {c.kind for c in error.alternatives} <= {"ranks", "batch"}
    assert change(error, "ranks").peak_bytes <= PARAMETERS / 4


def test_a_forced_pipeline_says_what_changes_would_do_too() -> None:
    error = refused(NoRoomError, memory_bytes=1.3 * PARAMETERS, pp=2, microbatches=2)
    assert "no pipeline with pp=2 fits" in str(error)
    made = change(error, "ranks")
    assert made.options.pp == 2
    assert (
        mlp(cluster=made.cluster, memory_bytes=1.3 * PARAMETERS, pp=2, microbatches=2).predicted.peak_bytes
        <= 1.3 * PARAMETERS
    )


def test_no_time_means_no_changes_and_little_time_is_told() -> None:
    assert refused(memory_bytes=1e3, explain_s=0).alternatives == ()
    error = refused(memory_bytes=PARAMETERS, explain_s=1e-6)
    assert error.alternatives == ()
    assert "cut off after" in str(error)
    with pytest.raises(InputError, match="explain_s"):
        Options(explain_s="long")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"pp": 2, "microbatches": 4}, {"microbatches": 4}])
def test_kinds_add_up_to_the_peak(options: dict[str, Any]) -> None:
    program = mlp(batch=64, **options)
    memory = [s.memory for s in program.account.stages]
    kinds = peak_kinds(program.lowered, memory)
    assert sum(kinds.values()) == pytest.approx(max(group_peaks(program.lowered.graph, program.lowered.table, memory)))
    assert min(kinds.values()) >= 0


def test_a_scaled_cluster_has_the_same_nodes_and_more_of_them() -> None:
    two = ClusterSpec.preset("dgx-h100", 2)
    four = scaled(two, 2)
    assert four.size == 32
    assert four.levels == ClusterSpec.preset("dgx-h100", 4).levels
    assert scaled(ClusterSpec.preset("dgx-h100"), 4).levels == ClusterSpec.preset("dgx-h100", 4).levels
    mixed = ClusterSpec.from_dict({"nodes": [{"device": "h100", "count": 1}, {"device": "a100", "count": 1}]})
    assert [count for count, _ in scaled(mixed, 2).devices] == [8, 8, 8, 8]
    assert scaled(ClusterSpec.local(2), 4).size == 8


# --- 200 trillion parameters --------------------------------------------------------------------------------------------


TEXT = LlamaShape(layers=30, dim=655360, ffn=2516992, heads=4096, kv_heads=4096, vocab=131072)
"""A model with as many parameters as the text says (its own dimensions, 120 layers of 20480, hold 0.6 of the 200 trillion)."""
TWIN = LlamaShape(layers=4, dim=512, ffn=2048, heads=8, kv_heads=8, vocab=1024)


def parameters_of(shape: LlamaShape) -> int:
    block = 4 * shape.dim**2 + 3 * shape.dim * shape.ffn + 2 * shape.dim
    return shape.layers * block + 2 * shape.vocab * shape.dim + shape.dim


def llama(shape: LlamaShape, cluster: ClusterSpec, batch: int, seq: int, **options: Any) -> autopar.Program:
    with torch.device("meta"):
        model = Llama(shape, seq).to(torch.bfloat16)
        ids = torch.empty(batch, seq, dtype=torch.long)
    return autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=Options(**options))


def refused_with_its_numbers(
    shape: LlamaShape, cluster: ClusterSpec, batch: int, seq: int, **options: Any
) -> InfeasibleError:
    """Refused with what closed forms say: bf16 parameters and gradients, two float32 moments, shared by all ranks."""
    with pytest.raises(InfeasibleError) as caught:
        llama(shape, cluster, batch, seq, **options)
    error, n = caught.value, parameters_of(shape)
    short = error.shortage
    assert short is not None
    assert short.in_all == {"parameters": 2 * n, "gradients": 2 * n, "optimizer": 8 * n}
    for kind in ("parameters", "optimizer"):
        assert short.by_kind[kind] == pytest.approx(short.in_all[kind] / cluster.size, rel=0.01)
    held = short.by_kind["gradients"] + short.by_kind["for a moment"]
    assert held >= 0.99 * short.in_all["gradients"] / cluster.size
    assert short.needed_bytes == pytest.approx(sum(short.by_kind.values()))
    assert short.short_bytes > 0
    return error


@pytest.mark.slow
def test_a_small_twin_is_refused_and_solved_with_tiers_and_with_enough_devices() -> None:
    limit = 13 * parameters_of(TWIN) / 8
    request: dict[str, Any] = {
        "pp": 1,
        "microbatches": 2,
        "recompute": "full",
        "memory_bytes": limit,
        "solver_time_limit_s": 3.0,
    }
    error = refused_with_its_numbers(TWIN, h100(8), 64, 16, **request, mesh={"dp": 8})
    for kind in ("offload", "ranks"):
        made = change(error, kind)
        program = llama(TWIN, made.cluster, 64, 16, **request, mesh=made.options.mesh, offload=made.options.offload)
        assert program.predicted.peak_bytes <= limit
        assert program.predicted.step_time_s <= made.step_time_s * 1.01


@pytest.mark.slow
def test_200_trillion_parameters_on_2048_devices_are_refused_and_solved_with_tiers() -> None:
    cluster, mesh = ClusterSpec.preset("dgx-h100", 256), {"tp": 2048}
    assert parameters_of(TEXT) == pytest.approx(200e12, rel=2e-3)
    request: dict[str, Any] = {"pp": 1, "microbatches": 32, "mesh": mesh, "solver_time_limit_s": 5.0}
    error = refused_with_its_numbers(TEXT, cluster, 64, 4096, **request, explain_s=180.0)
    assert error.shortage is not None
    assert error.shortage.in_all["parameters"] > 2048 * cluster.device(0).memory_bytes  # the text's 400 TB of 164
    made = change(error, "offload")
    assert made.options.offload == "parameters"
    assert made.peak_bytes <= error.shortage.limit_bytes


@pytest.mark.slow
def test_200_trillion_parameters_are_trained_by_enough_devices() -> None:
    cluster = ClusterSpec.preset("dgx-h100", 256)
    request: dict[str, Any] = {"pp": 1, "microbatches": 2, "mesh": {"dp": 1, "tp": 2048}, "recompute": "full"}
    error = refused_with_its_numbers(TEXT, cluster, 64, 4096, **request, solver_time_limit_s=5.0, explain_s=180.0)
    made = change(error, "ranks")
    limit = 0.9 * cluster.device(0).memory_bytes
    assert made.cluster.size * limit > 12 * parameters_of(TEXT) >= made.cluster.size / 4 * limit
    assert made.peak_bytes <= limit
