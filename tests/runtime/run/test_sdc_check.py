"""Ranks recompute what a neighbour computes: the same bits under every plan, and a rank that computes otherwise is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli.doctor import conclusion, read_flights
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.errors import RankError
from autopar.runtime.run.sdc_check import cheapest_axis, recompute, sums_of, why_not
from tests.runtime import pipelines, stages
from tests.runtime.run.test_faults import DATA, RANKS, out  # noqa: F401
from tests.runtime.scenarios import session_of
from tests.runtime.staged import run as run_ranks
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

MACHINES = [f"m{rank}" for rank in range(8)]


def harmed(program: stages.Program, harm: Any) -> stages.Program:
    """The program on a rank whose backward is wrong."""
    right = program.stage.backward

    def backward(rt: Any, *arguments: Any) -> Any:
        add = rt.grads.add
        rt.grads.add = lambda name, grad, owned=False: add(name, harm(rt, name, grad), owned)
        try:
            return right(rt, *arguments)
        finally:
            del rt.grads.add

    program.stage.backward = backward
    return program


def one_bit(name: str) -> Any:
    """A fault that flips one bit of the last number of a gradient, in float64."""

    def harm(rt: Any, of: str, grad: torch.Tensor) -> torch.Tensor:
        if of == name:
            grad = grad.clone()
            grad.view(-1)[-1:].view(torch.int64)[0] ^= 1
        return grad

    return harm


def on_ranks(make: Any, wrong: int = -1, harm: Any = None) -> list[Any]:
    """The result of recomputing on every rank, after two steps."""
    batches = stages.batches(4)

    def rank(comm: Comm) -> Any:
        program = make()
        session = session_of(harmed(program, harm) if comm.rank == wrong else program, comm)
        session.load_weights(stages.weights())
        for batch in batches[:2]:
            session.train_step(batch)
        before = {name: value.clone() for name, value in session.rt.buffers.items()}
        try:
            recompute(session, batches[2], 3, MACHINES)
        except RankError as error:
            return error
        assert all(torch.equal(session.rt.buffers[name], before[name]) for name in before)
        return session.train_step(batches[2]).item()

    program = make()
    return run_threads(program.ranks, program.mesh, rank)


PLANS = [(2, 1, 0, 1), (4, 1, 1, 2), (4, 1, 3, 1), (2, 2, 3, 2), (1, 2, 0, 1), (1, 4, 0, 1), (8, 1, 0, 1), (2, 4, 1, 4)]


@pytest.mark.parametrize(("dp", "tp", "zero", "microbatches"), PLANS)
def test_neighbours_compute_the_same_and_a_step_is_what_it_is_without(dp, tp, zero, microbatches):
    losses = on_ranks(lambda: stages.mlp(dp, tp, zero, microbatches))
    assert losses == pytest.approx([stages.reference(3)["losses"][2]] * len(losses), rel=1e-12)


@pytest.mark.parametrize(("dp", "wrong", "named"), [(4, 1, (1,)), (4, 3, (3,)), (8, 0, (0,)), (2, 1, (0, 1))])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", ["w1", "b2"])
def test_one_wrong_bit_of_one_gradient_names_its_rank(dp, wrong, named, zero, name):
    said = on_ranks(lambda: stages.mlp(dp, 1, zero), wrong, one_bit(name))
    assert {one.ranks for one in said} == {named}
    assert f"computed other gradients ({name}) than " in str(said[0])
    assert f"{wrong} (m{wrong})" in str(said[0])


def test_a_fault_that_happens_once_is_named_too():
    """The third rank tells whose it was."""
    times = []

    def once(rt: Any, name: str, grad: torch.Tensor) -> torch.Tensor:
        times.append(name)
        return one_bit("w2")(rt, name, grad) if len(times) > 12 and times.count("w2") == 4 else grad

    said = on_ranks(lambda: stages.mlp(4, 1), 2, once)
    assert {one.ranks for one in said} == {(2,)}


def test_the_axis_is_that_along_which_least_is_to_be_sent():
    def axis(comm: Comm) -> str:
        return cheapest_axis(session_of(stages.mlp(2, 2, zero=0), comm))

    assert set(run_threads(4, {"dp": 2, "tp": 2}, axis)) == {"dp"}


def test_a_pipeline_is_refused_by_name():
    program = pipelines.chain([(1, 1), (1, 1)], pipelines.one_f_one_b(2, 4), 4)

    said = run_threads(2, program.mesh, lambda comm: why_not(session_of(program, comm)))
    assert (
        said == ["a rank cannot take the place of another in a pipeline: stages have other weights on other ranks"] * 2
    )


def test_sums_of_other_places_are_other_sums():
    """The check would compare nothing otherwise."""

    def rank(comm: Comm) -> list[Any]:
        session = session_of(stages.mlp(4, 1), comm)
        session.load_weights(stages.weights())
        return [sums_of(session, stages.batches(1)[0], "dp", by) for by in range(4)]

    told = run_threads(4, {"dp": 4, "tp": 1}, rank)
    for by in range(4):
        assert told[by][by] == told[0][0]
        assert list(told[by][by]) == ["the loss", "b2", "w2", "b1", "w1"]
    assert len({tuple(told[rank][0].values()) for rank in range(4)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("gpt2", 0), ("llama", 1), ("moe", 3), ("resnet", 0)])
def test_models_under_random_plans_compute_the_same_everywhere(name: str, seed: int):
    assert_recomputed(name, range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BY_NAME))
def test_all_models_under_random_plans_compute_the_same_everywhere(name: str):
    assert_recomputed(name, range(4))


def assert_recomputed(name: str, seeds: range) -> None:
    """Assert that ranks that recompute a step agree, in the dtypes of the model, dropout and all, or cannot and say so."""
    zoo = BY_NAME[name]
    program = compiled_zoo(zoo, 4)
    batch = program.leaves(zoo.batch(seed=1))

    def body(session: Any) -> None:
        session.train_step(list(batch))
        if why := why_not(session):
            assert why == "parameters rest in blocks of unequal size along every axis"
            assert session.stages[0].comm.mesh != {axis: int(n) for axis, n in session.comm.mesh.items()}
        else:
            recompute(session, list(batch), 2, MACHINES)

    for seed in seeds:
        program.with_plan(autopar.random_plan(program, seed, pp=1)).on_ranks(body)


MISCOMPUTING = """
def miscomputing():
    def harm(n, batch):
        if (RANK, n) == (2, 7):
            module = session().stages[0].tables.module
            right = module.backward
            def backward(rt, *arguments):
                add = rt.grads.add
                rt.grads.add = lambda name, grad, owned=False: add(name, grad * (1 + 1e-12 * (name == "w2")), owned)
                try:
                    return right(rt, *arguments)
                finally:
                    del rt.grads.add
            module.backward = backward
    return batches(harm)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_whose_device_computes_wrongly_ends_by_name(out: Path, tmp_path: Path):  # noqa: F811
    """Two replicas of two ranks: nobody can tell which of the two."""
    (out / "data.py").write_text(DATA + MISCOMPUTING)
    own = ["--run-dir", tmp_path / "run", "--steps", 30, "--recompute", 5, "--timeout", 100]
    codes, said = run_ranks(out, [*own, "--data", f"{out / 'data.py'}:miscomputing"], RANKS, tmp_path / "log")
    assert any(codes)
    assert "step 10: one of ranks 0 (" in said
    assert "computed other gradients (w2) than the other from the same data and parameters" in said
    assert conclusion(read_flights(tmp_path / "run")).culprits == (0, 2)
