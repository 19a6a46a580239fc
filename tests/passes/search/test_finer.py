"""Meshes that are tried where a second axis paid: those that there are, what is planned on them, and the search's choice."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options
from autopar.ir.mesh import Mesh
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.shard.meshes import finer_meshes
from benchmarks.published_models import Transformer
from benchmarks.sameness import MIXTRAL

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
MIXTURE = replace(MIXTRAL, layers=1)
H100 = ClusterSpec.preset("dgx-h100", nodes=8)


def mixture(rows: int = 256, **options: Any) -> autopar.ParallelProgram:
    """A block of a mixture of 8 experts on 64 ranks, without a pipeline. rows: sequences of the batch."""
    with torch.device("meta"):
        model, ids = Transformer(MIXTURE).to(torch.bfloat16), torch.zeros(rows, 4096, dtype=torch.long)
    return autopar.compile(model, H100, (ids, ids), optimizer=ADAMW, options=Options(pp=1, explain_s=0.0, **options))


def on_mesh(program: autopar.ParallelProgram, **axes: int) -> float:
    """Seconds of a step of the same request on a mesh that is forced."""
    return program.compile_again(
        replace(program.request, options=replace(program.request.options, mesh=axes))
    ).predicted.step_time_s


def test_an_axis_between_rows_and_fast_links_has_any_power_of_two() -> None:
    small = ClusterSpec.preset("dgx-h100", nodes=2)
    meshes = list(map(str, finer_meshes(small, Options(), "ep")))
    assert meshes == ["dp=2×ep=2×tp=4", "dp=4×ep=2×tp=2", "dp=2×ep=4×tp=2"]
    assert "dp=4×ep=16" in map(str, finer_meshes(H100, Options(), "ep")), "two axes, the inner one across nodes"
    assert finer_meshes(small, Options(axes={"tp": 4}), "ep") == []


def test_experts_get_an_axis_of_their_own_where_that_is_faster() -> None:
    """Ranks of several nodes have the experts, and others the same ones. Of the first meshes the best has one axis, or the
    experts on the ranks of a node."""
    program = mixture(rows=128)
    (stage,) = program.plan.stages
    assert stage.mesh.sizes["ep"] > 8
    assert program.predicted.step_time_s < 0.999 * min(on_mesh(program, dp=64), on_mesh(program, dp=8, tp=8))


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
