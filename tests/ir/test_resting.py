"""Bytes that rest: one row per kind, which the account, the solver, the cost of calls and the bounds all read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.costmodel.estimator.memory import state_bytes
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import Software
from autopar.ir.mesh import Mesh
from autopar.ir.resting import of_program, on_rank, planned, resting
from autopar.ir.setting import OptimizerState, Setting
from autopar.ir.spec import parse_spec
from autopar.ir.types import TensorType
from autopar.passes.account.calls import measure
from autopar.passes.lower.stage import lower_stage
from autopar.passes.price.pricer import Pricers
from autopar.passes.shard.evaluate import evaluate
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

ADAM = Setting(optimizer=OptimizerState(elements=2.0, element_bytes=4))
MATRIX = TensorType((8, 4), torch.float32)


def rows(storage: str, optimizer: str, trained: bool = True) -> list[tuple[str, str, float]]:
    held = planned(MATRIX, parse_spec(storage), parse_spec(optimizer), Mesh.of(dp=2), trained, ("w",))
    return [(row.kind, row.moves, row.nbytes) for row in held.rows(ADAM)]


def test_a_parameter_rests_with_its_gradient_and_its_optimizers_state() -> None:
    stored = [("parameters", "parameters", 128.0)]
    assert rows("[., .]", "[., .]", trained=False) == stored
    sharded = [("gradients", "parameters", 64.0), ("optimizer", "optimizer", 128.0)]
    assert rows("[., .]", "[@dp, .]") == stored + sharded
    copied = [("optimizer", "parameters", 64.0)]
    assert rows("[., .]", "[., @dp]") == stored + sharded + copied, "columns are no part of rows that lie together"


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    options = autopar.Options(mesh={"dp": 2, "tp": 2}, pp=1, microbatches=2)
    return compiled_zoo(BY_NAME["gpt2"], autopar.ClusterSpec.local(4).with_tiers(), options=options)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_solver_calls_and_account_count_the_same_bytes(program: autopar.ParallelProgram, seed: int) -> None:
    """In these random plans some of the optimizer's blocks are copies."""
    plan = autopar.random_plan(program, seed, pp=1)
    (own,), pricers = plan.stages, Pricers(program.cluster)
    stage = lower_stage(program.ir, own, pricers, program.rules, plan.microbatches, True)
    held = [on_rank(p, stage.mesh) for p in stage.parameters.values()]
    assert any(one.copied for one in held)
    at_rest = resting(stage, program.setting)[""]
    expected = sum(at_rest.values()) - at_rest["buffers"] + sum(one.gradient for one in held)
    units = measure(program.ir, stage, own, pricers[own.mesh], program.rules, program.setting)
    assert units.resting_bytes.sum() == pytest.approx(expected, rel=1e-12)
    here, away = (
        evaluate(program.ir, plan, pricers, program.rules, replace(program.setting, offload=offload)).memory
        for offload in (frozenset(), frozenset({"parameters", "optimizer"}))
    )
    assert here - away == pytest.approx(expected, rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_has_less_on_all_its_ranks_than_the_program(program: autopar.ParallelProgram, seed: int) -> None:
    other = program.with_plan(autopar.random_plan(program, seed))
    least, found = Counter[str](), Counter[str]()
    for row in of_program(program.ir, program.setting):
        least[row.kind] += row.nbytes
    for stage in other.stages:
        ranks = stage.mesh.size
        for kinds in resting(stage, program.setting).values():
            found.update({kind: ranks * nbytes for kind, nbytes in kinds.items()})
        found["gradients"] += ranks * sum(on_rank(p, stage.mesh).gradient for p in stage.parameters.values())
    assert set(least) == {"parameters", "gradients", "optimizer"}
    assert all(least[kind] <= found[kind] for kind in least)


@pytest.mark.parametrize(("zero", "storage", "optimizer"), [(0, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_the_estimators_states_are_these_rows_in_full_precision(zero: int, storage: int, optimizer: int) -> None:
    """The closed formula counts parameters, not tensors: so it is held to a matrix of as many under the same sharding."""
    shape, dims = TransformerShape(2, 64, 4, 256, 512, 64), {1: "[., .]", 4: "[@dp, .]"}
    plan = StepPlan(ParallelConfig(dp=4, zero=zero), 1)
    workload = Workload.of(shape, autopar.ClusterSpec.preset("dgx-h100"), plan, 4, Software(precision="float32"))
    specs = (parse_spec(dims[n]) for n in (storage, optimizer))
    held = planned(MATRIX, *specs, Mesh.of(dp=4), True, ("w",))
    assert state_bytes(workload, 32.0, 0.0) == tuple(row.nbytes for row in held.rows(ADAM))
