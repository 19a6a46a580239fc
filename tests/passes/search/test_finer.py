"""Finer meshes: those that there are, which of them a walk comes to, what is planned on them, and the search's choice."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options
from autopar.ir.mesh import Mesh
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.search.one_mesh.finer import walked
from autopar.passes.search.stages import finer
from autopar.passes.shard.meshes import candidate_meshes, finer_meshes
from benchmarks.models import LLAMA_8B, Llama
from benchmarks.properties_cases import WORKLOADS
from benchmarks.published_models import MIXTRAL, Transformer

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
MIXTURE = replace(MIXTRAL, layers=1)
H100 = ClusterSpec.preset("dgx-h100", nodes=8)
SMALL = replace(MIXTRAL, layers=2, hidden=32, heads=8, kv_heads=4, ffn=64, moe_ffn=32, experts=4, vocab=64, seq_len=16)


def mixture(rows: int = 256, **options: Any) -> autopar.ParallelProgram:
    """A block of a mixture of 8 experts on 64 ranks, without a pipeline. rows: sequences of the batch."""
    with torch.device("meta"):
        model, ids = Transformer(MIXTURE).to(torch.bfloat16), torch.zeros(rows, 4096, dtype=torch.long)
    return autopar.compile(model, H100, (ids, ids), optimizer=ADAMW, options=Options(pp=1, explain_s=0.0, **options))


def in_two_stages(**options: Any) -> autopar.ParallelProgram:
    """Two layers of a Llama on 64 ranks in two stages, in four microbatches of two sequences each of 128k tokens."""
    with torch.device("meta"):
        model, ids = (
            Llama(replace(LLAMA_8B, layers=2), 131072).to(torch.bfloat16),
            torch.zeros(8, 131072, dtype=torch.long),
        )
    chosen = Options(pp=2, chunks=1, microbatches=4, order=0, explain_s=0.0, **options)
    return autopar.compile(model, H100, (ids, ids), optimizer=ADAMW, options=chosen)


def on_mesh(program: autopar.ParallelProgram, **axes: int) -> float:
    """Seconds of a step of the same request on a mesh that is forced."""
    return program.compile_again(
        replace(program.request, options=replace(program.request.options, mesh=axes))
    ).predicted.step_time_s


def test_an_axis_between_rows_and_fast_links_has_any_power_of_two() -> None:
    small = ClusterSpec.preset("dgx-h100", nodes=2)
    meshes = list(map(str, finer_meshes(small, Options(), "ep", 16)))
    assert meshes == ["dp=2×ep=2×tp=4", "dp=4×ep=2×tp=2", "dp=2×ep=4×tp=2"]
    assert "dp=4×ep=16" in map(str, finer_meshes(H100, Options(), "ep", 64)), "two axes, the inner one across nodes"
    assert finer_meshes(small, Options(axes={"tp": 4}), "ep", 16) == []
    three = ClusterSpec.preset("dgx-h100", nodes=6)
    assert "dp=3×cp=8×tp=2" in map(str, finer_meshes(three, Options(), "cp", 48)), (
        "the odd part is among those of the rows"
    )


def test_experts_get_an_axis_of_their_own_where_that_is_faster() -> None:
    """Ranks of several nodes have the experts, and others the same ones. Of the first meshes the best has one axis, or the
    experts on the ranks of a node."""
    program = mixture(rows=128)
    (stage,) = program.plan.stages
    assert stage.mesh.sizes["ep"] > 8
    assert program.predicted.step_time_s < 0.999 * min(on_mesh(program, dp=64), on_mesh(program, dp=8, tp=8))


def test_stages_whose_ranks_are_more_than_rows_get_an_axis_for_sequences() -> None:
    """On the first meshes of 32 ranks the outer axis takes the rows or shares them, but not both."""
    program = in_two_stages()
    assert [dict(stage.mesh.axes) for stage in program.plan.stages] == [{"dp": 2, "cp": 2, "tp": 8}] * 2
    others = [other for other in program.alternatives if len(other.plan.stages) == 2]
    assert min(len(other.plan.stages[0].mesh.axes) for other in others) == 2
    assert all(program.predicted.step_time_s < 0.95 * other.predicted.step_time_s for other in others)


def test_finer_meshes_of_stages_go_from_small_to_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh is left out where half of it is busy for too long, so halves are asked first."""
    monkeypatch.setattr(finer, "finer_meshes_of", lambda _, ranks: [Mesh.of(dp=2, cp=ranks // 4, tp=2)])
    used = {64: 1.0, 32: 1.01, 16: 1.02}
    cuts = [
        SimpleNamespace(step_s=step_s, used_meshes=lambda n=n: [Mesh.of(dp=n // 2, tp=2)], submesh_plans=())
        for n, step_s in used.items()
    ]
    meshes = finer.finer_submeshes(SimpleNamespace(sharing=lambda mesh: mesh), cuts)  # type: ignore[arg-type]
    assert [mesh.size for mesh in meshes] == [32, 64], "the two best sizes, whichever is better"


def walk(seconds: Callable[[int, int], float]) -> tuple[Mesh, int, int]:
    """The best of the finer meshes of 64 ranks that the walk comes to, how many these are, and of how many. seconds: on a mesh by
    the sizes of its axis in the middle and of that in the fast links."""

    def on(mesh: Mesh) -> float:
        _, *inside = (size for _, size in mesh.axes)
        middle, inner = [*inside, 1][:2] if inside else (mesh.size, 1)
        return seconds(middle, inner)

    first = {mesh: on(mesh) for mesh in candidate_meshes(H100, Options())}
    meshes = finer_meshes(H100, Options(), "ep", 64)
    found = walked(meshes, first, on)
    assert {mesh for mesh in meshes if len(mesh.axes) == 2} <= found.keys()
    assert all(found[mesh] == on(mesh) for mesh in found)
    return min(found, key=on), len(found), len(meshes)


def test_the_walk_finds_the_valley_wherever_it_is() -> None:
    """Also two axes across nodes, where one axis is better than any two inside nodes."""
    for mesh in finer_meshes(H100, Options(), "ep", 64):
        at, inner = mesh.axes[1][1], math.prod(size for _, size in mesh.axes[2:])

        def seconds(middle: int, fast: int, at: int = at, inner: int = inner) -> float:
            return 1 + 0.1 * abs(math.log2(middle * fast / (at * inner))) + 0.01 * abs(math.log2(fast / inner))

        best, asked, _ = walk(seconds)
        assert best == mesh
        assert asked > 2


def test_lines_that_get_no_better_end_the_walk() -> None:
    best, asked, of = walk(lambda middle, inner: 1 + abs(math.log2(middle / 32)) + math.log2(inner))
    assert str(best) == "dp=2×ep=32"
    assert asked < of
    _, asked, of = walk(lambda middle, inner: math.inf)
    assert asked < of


def test_meshes_that_were_tried_before_are_no_finer_ones() -> None:
    """Where a batch has few rows, meshes of three axes are among the first: they have their seconds, and are not asked again."""
    few_rows = ClusterSpec.preset("dgx-h100", nodes=4)
    first = {mesh: 1.0 / mesh.axes[-1][1] for mesh in candidate_meshes(few_rows, Options(), rows=2)}
    meshes = finer_meshes(few_rows, Options(), "cp", 32, rows=2)
    assert first.keys() & set(meshes)
    asked: list[Mesh] = []

    def seconds(mesh: Mesh) -> float:
        asked.append(mesh)
        return 2.0

    found = walked(meshes, first, seconds)
    assert found.keys() == set(asked)
    assert not found.keys() & first.keys()


def test_choices_of_ops_are_those_of_all_axes_and_plans() -> None:
    one = mixture(mesh={"dp": 64}).plan.stages[0]
    taken = taken_by([one])
    assert all(len(choices) == 1 for choices in taken.values())
    template, op = next(iter(taken))
    other = replace(
        one,
        mesh=Mesh.of(dp=32, tp=2),
        templates={template: replace(one.templates[template], strategies={op: ("", "x")})},
    )
    assert taken_by([one, other])[template, op] == taken[template, op] | {"", "x"}


@pytest.mark.slow
def test_no_forced_mesh_is_faster_than_the_one_that_is_chosen() -> None:
    program = mixture()
    for sizes in itertools.product([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16], [1, 2, 4, 8]):
        if math.prod(sizes) == 64:
            axes = {name: n for name, n in zip(("dp", "ep", "tp"), sizes, strict=True) if n > 1}
            assert program.predicted.step_time_s <= 1.005 * on_mesh(program, **axes), axes


@pytest.mark.slow
@pytest.mark.parametrize("middle", ["ep", "cp"])
def test_stages_of_three_axes_compute_what_one_device_does(middle: str) -> None:
    torch.manual_seed(0)
    model, ids = Transformer(SMALL).double(), torch.randint(0, SMALL.vocab, (8, SMALL.seq_len))
    cluster = ClusterSpec.homogeneous(devices=16, device="h100", devices_per_node=4)
    options = Options(pp=2, microbatches=2, mesh={"dp": 2, middle: 2, "tp": 2}, explain_s=0.0)
    program = autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=options)
    assert {len(stage.mesh.axes) for stage in program.plan.stages} == {3}
    assert autopar.verify(program, model, (ids, ids)).max_error <= 1e-9


@pytest.mark.slow
def test_more_memory_is_no_reason_to_look_at_fewer_meshes() -> None:
    """Two axes across nodes are faster than one axis, which is faster than any two axes inside nodes."""
    with torch.device("meta"):
        model, (ids, labels), given = WORKLOADS["DeepSeek-V3"].make()
    program = autopar.compile(model, H100, (ids, labels), options=Options(explain_s=0.0), **given)
    assert program.predicted.step_time_s <= 1.005 * on_mesh(program, dp=2, ep=32)
