"""Several optimizers with different states: the solver counts, per parameter, what the account counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.ir.resting import busiest_rank, on_rank
from autopar.ir.setting import OptimizerState
from autopar.ir.types import TensorType
from autopar.passes.memory.peak import stage_memory
from autopar.passes.price.pricer import Pricers
from autopar.passes.shard.evaluate import evaluate
from tests.optimizer.test_optimizers import muon_and_adam
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo


def momentum_and_adam(named_parameters):
    """One state element per element of a matrix, two per element of the rest; both are elementwise, so shards may differ."""
    matrices = [p for _, p in named_parameters if p.ndim == 2]
    return [
        torch.optim.SGD(matrices, lr=0.01, momentum=0.9),
        torch.optim.Adam([p for _, p in named_parameters if p.ndim != 2], lr=0.01),
    ]


def momentum_below_adam(named_parameters):
    """The same for the first block alone, whose parameters share a variable with those of the other blocks."""
    first = [p for name, p in named_parameters if ".0." in name]
    return [
        torch.optim.SGD(first, lr=0.01, momentum=0.9),
        torch.optim.Adam([p for name, p in named_parameters if ".0." not in name], lr=0.01),
    ]


def state_bytes(program: autopar.ParallelProgram) -> tuple[float, float]:
    """Bytes of optimizer state as the solver and as the account count them, on the mean over ranks: what is gone where there is
    none."""
    pricers, stateless = Pricers(program.cluster), replace(program.setting, optimizer=OptimizerState())
    solver = [
        evaluate(program.ir, program.plan, pricers, program.rules, setting).memory
        for setting in (program.setting, stateless)
    ]
    stage = program.stages[0]
    account = [stage_memory(stage, setting).resting_bytes for setting in (program.setting, stateless)]
    most = busiest_rank(stage.parameters.values(), stage.mesh)
    beyond_mean = sum(
        on_rank(p, stage.mesh, rank=most).state_bytes(program.setting)
        - on_rank(p, stage.mesh).state_bytes(program.setting)
        for p in stage.parameters.values()
    )
    return solver[0] - solver[1], account[0] - account[1] - beyond_mean


@pytest.mark.few(1)
@pytest.mark.parametrize("factory", [muon_and_adam, momentum_and_adam, momentum_below_adam])
def test_solver_and_account_count_the_same_bytes_of_state(factory):
    """Random plans shard some parameters and others not: a mean over the model would be wrong."""
    zoo = BY_NAME["mlp" if factory is muon_and_adam else "gpt2"]
    options = autopar.Options(mesh={"dp": 2}, strategy="dp", pp=1, microbatches=1)
    program = compiled_zoo(zoo, 2, optimizer=factory, options=options)
    assert {program.setting.optimizer.ratio(name) for name in program.ir.trained} == {1.0, 2.0}
    for seed in range(4):
        solver, account = state_bytes(program.with_plan(autopar.random_plan(program, seed, pp=1)))
        assert account > 0
        assert solver == pytest.approx(account, rel=1e-12)


def test_parameters_that_share_a_variable_have_the_average_of_their_states():
    state = OptimizerState(elements=1.7, element_bytes=4, elements_of={"a": 1.0, "b": 2.0})
    half, vector = TensorType((8,), torch.bfloat16), TensorType((8,), torch.float64)
    assert state.ratio("a", "b") == 1.5
    assert state.ratio("another") == 1.7
    assert state.shard_bytes(half, 8, "a") == 4 * 1.0 * 4  # four elements, of four bytes each
    assert state.shard_bytes(vector, 32, "b") == 4 * 2.0 * 8  # never narrower than the parameter


def test_scratch_is_the_most_that_an_update_and_the_one_before_it_need():
    state = OptimizerState(scratch=(2.0, 1.0, 0.0))
    assert state.scratch_bytes([10, 4, 7]) == max(2 * 10, 2 * 4 + 10, 2 * 7 + 4)
    assert state.scratch_bytes([]) == 0.0


def test_scratch_of_what_updates_in_lists_is_that_of_all():
    state = OptimizerState(scratch=(3.0, 1.0, 1.0))
    assert state.scratch_bytes([10, 4, 7, 2]) == max(3 * 10, 3 * 4 + 10, 3 * 7 + 4 + 10, 3 * 2 + 7 + 4 + 10)
