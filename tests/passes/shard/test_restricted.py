"""A baseline's problem is that of the free choice with fewer states, to the last bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.setting import OptimizerState, Setting
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.shard.baselines import Baseline
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.solve_mesh import OnMesh, build_problem, solve_mesh, solve_strategies
from tests.zoo.models import ADAMW, token_loss
from tests.zoo.transformers import Llama, Moe


@functools.cache
def on(kind: str, **axes: int) -> OnMesh:
    cluster = autopar.ClusterSpec.homogeneous(devices=4, device="a100", devices_per_node=4)
    model = {"llama": Llama, "moe": lambda: Moe(seq=16)}[kind]()
    ids = torch.zeros(8, 16, dtype=torch.long)
    options = autopar.Options(mesh={"dp": 4}, strategy="dp", microbatches=1, recompute="none", overlap=False)
    program = autopar.compile(model, cluster, (ids, ids), loss_fn=token_loss, optimizer=ADAMW, options=options).ir
    setting = Setting(optimizer=OptimizerState(elements=2.0, element_bytes=4))
    return OnMesh(program, Pricers(cluster)[Mesh.of(**axes)], RuleBook(), setting, autopar.Options())


def assert_alike(one: Problem, other: Problem) -> None:
    assert one.graph.keys == other.graph.keys
    assert one.graph.states == other.graph.states
    assert one.graph.pairs.keys() == other.graph.pairs.keys()
    arrays = ((*g.cost, *g.memory, *(g.pairs[k] for k in one.graph.pairs)) for g in (one.graph, other.graph))
    assert all(map(np.array_equal, *arrays))


@pytest.mark.parametrize(
    ("kind", "axes", "strategy"),
    [
        ("llama", {"dp": 4}, "dp"),
        ("moe", {"dp": 4}, "zero3"),
        ("llama", {"dp": 2, "tp": 2}, "megatron"),
        ("moe", {"dp": 2, "tp": 2}, "megatron-zero1"),
    ],
)
def test_fewer_states_are_as_if_built_so(kind: str, axes: dict[str, int], strategy: str) -> None:
    mesh = on(kind, **axes)
    every = build_problem(mesh, "auto")
    allowed = Baseline(strategy, mesh.program, mesh.pricer.mesh, mesh.rules).allows
    fewer = every.restricted(allowed)
    assert_alike(fewer, build_problem(mesh, strategy))
    assert sum(map(len, fewer.graph.states)) < sum(map(len, every.graph.states))
    assert_alike(fewer.restricted(allowed), fewer)


def test_strategies_of_a_mesh_are_answered_as_one_by_one() -> None:
    mesh = on("llama", dp=2, tp=2)
    strategies = ["auto", "megatron", "zero1"]
    together = solve_strategies(mesh, strategies, 1e12)
    assert together == [solve_mesh(mesh, strategy, 1e12) for strategy in strategies]


def test_a_variable_without_states_is_named() -> None:
    mesh = on("llama", dp=4)
    key = build_problem(mesh, "auto").graph.keys[5]
    with pytest.raises(InfeasibleError, match=key[-1]):
        build_problem(mesh, "auto").restricted(lambda other, _: other != key)
