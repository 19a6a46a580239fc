"""Meshes that are tried, for numbers of ranks that are powers of two and for others."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.utils import _pytree as pytree

import autopar
from autopar import ClusterSpec, Options
from autopar.passes.shard.meshes import candidate_meshes, odd_part
from autopar.proof.verify import verify
from tests.passes.search.test_pipelines import Tower
from tests.zoo.models import BY_NAME

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def of(ranks: int, a_stage: int | None = None) -> list[str]:
    cluster = ClusterSpec.preset("dgx-h100", ranks // 8)
    return [str(mesh) for mesh in candidate_meshes(cluster, Options(), a_stage)]


@pytest.mark.parametrize(("n", "odd"), [(1, 1), (64, 1), (6, 3), (20, 5), (98304, 3), (45, 45)])
def test_the_odd_part_of_a_number(n: int, odd: int) -> None:
    assert odd_part(n) == odd


def test_powers_of_two_are_tried_with_the_inner_axis_inside_the_fast_links() -> None:
    assert of(64) == ["dp=64", "dp=8×tp=8", "dp=16×tp=4", "dp=32×tp=2"]


def test_the_odd_part_of_many_ranks_gets_an_axis_of_its_own() -> None:
    assert of(96) == ["dp=96", "dp=12×tp=8", "dp=24×tp=4", "dp=48×tp=2", "replica=3×dp=32"]
    assert of(96, a_stage=48)[-1] == "replica=3×dp=16"


def test_an_odd_part_that_has_an_axis_already_gets_no_other_one() -> None:
    assert of(24) == ["dp=24", "dp=3×tp=8", "dp=6×tp=4", "dp=12×tp=2"]


def test_in_little_memory_an_odd_part_of_few_ranks_gets_an_axis_of_its_own_too() -> None:
    """12 ranks in pairs: no dim divides by 12 or 6, and two ranks share too few."""
    with torch.device("meta"):
        model, x = Tower(1024, 2), torch.empty(12, 1024)
    cluster = ClusterSpec.homogeneous(devices=12, device="h100", devices_per_node=2)
    held = 4 * 4 * 2 * 1024 * 1024  # parameters, gradients and AdamW's state
    options = Options(pp=1, memory_bytes=0.34 * held, microbatches=1, idle_ranks=False)
    program = autopar.compile(model, cluster, (x, x), optimizer=ADAMW, options=options)
    (stage,) = program.plan.stages
    assert dict(stage.mesh.axes) == {"replica": 3, "dp": 4}
    assert any("dp" in p.storage.axes for p in stage.parameters.values())
    assert all("replica" not in p.storage.axes for p in stage.parameters.values())


@pytest.mark.slow
def test_parameters_are_sharded_over_the_power_of_two_of_the_ranks() -> None:
    """6 layers of 4096 x 4096 and their optimizer state are 1.2 GB: no dim divides by 96, and 8 ranks of a node share too few
    to keep to 110 MB each. The odd part has copies, along an axis of its own or along `dp` outside of two others."""
    with torch.device("meta"):
        model, x = Tower(4096, 6).to(torch.bfloat16), torch.empty(96, 4096, dtype=torch.bfloat16)
    options = Options(pp=1, memory_bytes=110e6, microbatches=1)
    program = autopar.compile(model, ClusterSpec.preset("dgx-h100", 12), (x, x), optimizer=ADAMW, options=options)
    planned = {plan.show_meshes(): plan for plan in (program.plan, *(one.plan for one in program.alternatives))}
    for plan in (program.plan, planned["replica=3×dp=32"]):
        (stage,) = plan.stages
        weights = [p for name, p in stage.parameters.items() if name.endswith("weight")]
        shards = {math.prod(stage.mesh.sizes[axis] for axis in p.optimizer.axes) for p in weights}
        assert all(odd_part(n) == 1 for n in shards), shards
        assert max(shards) in (16, 32), shards


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_programs_on_an_odd_part_and_a_power_of_two_equal_eager(name: str) -> None:
    """Memory is short enough that parameters are sharded over `dp` and replicated over `replica`."""
    zoo = BY_NAME[name]
    model = zoo.make()
    batch = pytree.tree_map(lambda x: torch.cat([x, x, x]) if x.ndim else x, zoo.batch())
    mesh = {"replica": 3, "dp": 2}
    compiled = functools.partial(
        autopar.compile, model, ClusterSpec.local(6), batch, loss_fn=zoo.loss_fn, optimizer=ADAMW
    )
    roomy = compiled(options=Options(mesh=mesh, strategy="dp"))
    program = compiled(options=Options(mesh=mesh, memory_bytes=0.85 * roomy.predicted.peak_bytes))
    (stage,) = program.plan.stages
    sharded = [p for p in stage.parameters.values() if "dp" in p.storage.axes | p.optimizer.axes]
    assert sharded
    assert all("replica" not in p.storage.axes for p in sharded)
    assert verify(program, model, batch).ok


def with_rows(ranks: int, rows: int, a_stage: int | None = None) -> list[str]:
    cluster = ClusterSpec.preset("dgx-h100", ranks // 8)
    return [str(mesh) for mesh in candidate_meshes(cluster, Options(), a_stage, rows) if len(mesh.axes) == 3]


def test_few_rows_share_sequences_along_an_axis_of_their_own() -> None:
    assert with_rows(64, rows=64) == [], "every rank has a row"
    assert with_rows(64, rows=1) == [], "two axes do"
    assert with_rows(64, rows=2) == ["dp=2×cp=4×tp=8", "dp=2×cp=8×tp=4"]
    assert with_rows(64, rows=6) == ["dp=2×cp=4×tp=8", "dp=2×cp=8×tp=4"]
    assert with_rows(64, rows=8) == [], "the eight ranks of a row are on one node"
    assert with_rows(512, rows=2, a_stage=64) == ["dp=2×cp=4×tp=8"]


@pytest.mark.parametrize(
    ("seed", "mesh"),
    [
        (0, {"dp": 2, "cp": 2}),
        *(pytest.param(seed, {"dp": 2, "cp": 2, "tp": 2}, marks=pytest.mark.slow) for seed in range(6)),
    ],
)
def test_sequences_are_shared_by_ranks_where_rows_are_flattened(seed: int, mesh: dict[str, int]) -> None:
    """A loss over (rows · sequence) and products of flattened rows: with one row a rank, sequences stay in blocks."""
    zoo = BY_NAME["llama"]
    model, batch = zoo.make(), pytree.tree_map(lambda x: x[:2] if x.ndim else x, zoo.batch())
    cluster, options = ClusterSpec.local(math.prod(mesh.values())), Options(mesh=mesh)
    program = autopar.compile(model, cluster, batch, loss_fn=zoo.loss_fn, optimizer=ADAMW, options=options)
    assert verify(program, model, batch).ok
    assert verify(program.with_plan(autopar.random_plan(program, seed)), model, batch).ok
