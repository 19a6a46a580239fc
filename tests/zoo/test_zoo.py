"""Every zoo model computes on many ranks what it computes on one device: training, inference, under random plans."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import autopar
from tests.zoo.eager import loss_of
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

TOLERANCE = 1e-9
RANDOM_PLANS_IN_CI = 4
RANDOM_PLANS = 50

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)


@functools.cache
def compiled(name: str, ranks: int, training: bool = True, plan: autopar.Plan | None = None) -> autopar.Program:
    zoo = BY_NAME[name]
    cluster = autopar.ClusterSpec.local(ranks)
    if not training:
        return autopar.compile(zoo.make().eval(), cluster, zoo.inference_batch(), plan=plan)
    return compiled_zoo(zoo, cluster, plan=plan)


def assert_equal_to_one_device(zoo: ZooModel, program: autopar.Program, training: bool = True) -> None:
    model = zoo.make() if training else zoo.make().eval()
    batch = zoo.batch(seed=1) if training else zoo.inference_batch(seed=1)
    result = autopar.verify(program, model, batch)
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:5]
    assert result.ok, f"{zoo.name}: {worst}\n{program.report()}"
    assert result.max_error <= TOLERANCE, f"{zoo.name}: {worst}\n{program.report()}"


@pytest.mark.few(6)
@every_model
def test_the_model_is_seeded_and_trains_in_eager(zoo: ZooModel) -> None:
    model, again = zoo.make(), zoo.make()
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    losses = []
    optimizer = zoo.optimizer(model.parameters())
    for _ in range(8):
        loss = loss_of(zoo, model, zoo.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    silent = {name for name, p in model.named_parameters() if p.grad is None}
    assert bool(silent) == bool(zoo.tags & {"unused", "frozen"}), silent


@pytest.mark.few(2)
@every_model
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_training_equals_one_device(zoo: ZooModel, ranks: int) -> None:
    assert_equal_to_one_device(zoo, compiled(zoo.name, ranks))


@pytest.mark.few(2)
@every_model
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_inference_equals_one_device(zoo: ZooModel, ranks: int) -> None:
    assert_equal_to_one_device(zoo, compiled(zoo.name, ranks, training=False), training=False)


@pytest.mark.few(2)
@every_model
def test_inference_returns_the_tree_that_the_model_returns(zoo: ZooModel) -> None:
    program = compiled(zoo.name, 2, training=False)
    batch = zoo.inference_batch(seed=2)
    with torch.no_grad():
        model = zoo.make().eval()
        expected = model(**batch) if isinstance(batch, dict) else model(*batch)
    (got,) = program.run([batch])
    if not isinstance(expected, torch.Tensor | dict):
        assert type(got) is type(expected)
        got, expected = got.logits, expected.logits
    torch.testing.assert_close(got, expected)
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)


def check_random_plan(zoo: ZooModel, ranks: int, seed: int, training: bool = True) -> None:
    plan = autopar.random_plan(compiled(zoo.name, ranks, training), seed)
    cluster = autopar.ClusterSpec.local(ranks)
    if training:
        program = compiled_zoo(zoo, cluster, plan=plan)
    else:
        program = autopar.compile(zoo.make().eval(), cluster, zoo.inference_batch(), plan=plan)
    assert_equal_to_one_device(zoo, program, training)


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize("seed", range(RANDOM_PLANS_IN_CI))
def test_a_random_plan_equals_one_device(zoo: ZooModel, seed: int) -> None:
    check_random_plan(zoo, (2, 4, 8, 4)[seed % 4], seed)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("seed", range(RANDOM_PLANS_IN_CI, RANDOM_PLANS_IN_CI + RANDOM_PLANS))
def test_many_random_plans_equal_one_device(zoo: ZooModel, seed: int) -> None:
    check_random_plan(zoo, (2, 4, 8)[seed % 3], seed)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_for_inference_equal_one_device(zoo: ZooModel, seed: int) -> None:
    check_random_plan(zoo, (2, 4, 8)[seed % 3], seed, training=False)
