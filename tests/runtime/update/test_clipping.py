"""Clipping sees the gradients of the whole program: every tensor once, whoever holds shards or copies of it."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.runtime import run_threads
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from tests.runtime import pipelines, stages
from tests.runtime.scenarios import session_of, train
from tests.runtime.step.test_pipeline import CASES, made
from tests.runtime.updates import agree, chain_reference, mlp_reference

NORMS = [1.0, 2.0, 3.5, math.inf]


def logging(comm, program, rule, steps, full=None, data=None):
    """The steps of `train`, with the norm of every step."""
    session = session_of(program, comm, rule)
    session.load_weights(full or stages.weights())
    losses, norms = [], []
    for batch in data or stages.batches(steps):
        losses.append(session.train_step(batch).item())
        norms.append(session.grad_norm.item())
    names = dict.fromkeys(name for module in program.modules for name in module.PARAMETERS)
    weights = {name: session.gather_full(name) for name in names}
    return {"losses": losses, "grads": session.full_grads(), "weights": weights, "norms": norms}


@pytest.mark.few(3)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(("dp", "tp", "zero"), [(1, 1, 0), (2, 2, 0), (2, 2, 1), (4, 2, 3)])
def test_the_global_norm_is_that_of_one_device(dp, tp, zero, norm_type):
    rule = UpdateRule(stages.adamw, clip_norm=ClipNorm(0.05, norm_type))
    program, want = stages.mlp(dp, tp, zero), mlp_reference(3, rule)
    assert min(want["log"]["norm"]) > 0.05, "nothing would be clipped"
    for got in run_threads(dp * tp, program.mesh, lambda comm: logging(comm, program, rule, 3), timeout_s=60):
        assert got["norms"] == pytest.approx(want["log"]["norm"], rel=1e-12)
        want["weights"].pop("seen", None)
        agree(got, want)


@pytest.mark.few(4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("case", CASES)
def test_stages_and_shared_parameters_count_once(case, norm_type):
    rule = UpdateRule(stages.adamw, clip_norm=ClipNorm(0.01, norm_type))
    program, known = made(case)
    full, data = pipelines.weights(known["stages"], known["tied"]), pipelines.batches(2)
    want = chain_reference(2, rule, **known)
    want["weights"].pop("gain")
    for got in run_threads(
        program.ranks, program.mesh, lambda comm: logging(comm, program, rule, 2, full, data), timeout_s=60
    ):
        assert got["norms"] == pytest.approx(want["log"]["norm"], rel=1e-12)
        agree(got, want)


def test_a_norm_below_the_limit_changes_nothing():
    program = stages.mlp(2, 2, 1)
    free = run_threads(4, program.mesh, lambda comm: train(comm, program, 2), timeout_s=60)[0]
    rule = UpdateRule(stages.adamw, clip_norm=ClipNorm(1e6))
    got = run_threads(4, program.mesh, lambda comm: train(comm, program, 2, rule), timeout_s=60)[0]
    assert all(torch.equal(got["weights"][name], free["weights"][name]) for name in free["weights"])


def test_clipping_by_value():
    rule = UpdateRule(stages.adamw, clip_value=0.01)
    program, want = stages.mlp(2, 2, 1), mlp_reference(3, rule)
    assert all(g.abs().max() == 0.01 for g in want["grads"].values())
    for got in run_threads(4, program.mesh, lambda comm: train(comm, program, 3, rule), timeout_s=60):
        agree(got, want)


def gradients_in_one_memory(rule):
    """A step in which two parameters are given one tensor as gradient: (gradients, norm, whether that tensor was changed). On
    one rank nothing is reduced, so nobody copies it on the way."""
    program = stages.mlp(1, 1)
    backward, seen = program.stage.backward, []
    program.stage.PARAMETERS["c2"] = dict(program.stage.PARAMETERS["b2"])
    program.stage.GRADS["c2"] = {"contributions": 1, "steps": ()}

    def twice(rt, state, received):
        add, given = rt.grads.add, []

        def adding(name, grad, owned=False):
            add(name, grad, owned and name != "b2")
            if name == "b2":
                given.append(grad)
                seen.extend((grad, grad.clone()))
                add("c2", grad)

        rt.grads.add = adding
        try:
            return backward(rt, state, received)
        finally:
            rt.grads.add = add

    program.stage.backward = twice

    def body(comm):
        session = session_of(program, comm, rule)
        session.load_weights(stages.weights() | {"c2": torch.zeros(8, dtype=torch.float64)})
        session.train_step(stages.batches(1)[0])
        return session.full_grads(), session.grad_norm

    grads, norm = run_threads(1, program.mesh, body, timeout_s=30)[0]
    assert torch.equal(grads["b2"], grads["c2"])
    return grads, norm, not torch.equal(*seen)


def test_gradients_in_one_memory_are_clipped_once():
    grads, norm, changed = gradients_in_one_memory(UpdateRule(stages.adamw, clip_norm=ClipNorm(0.5)))
    assert not changed
    total = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().item()
    assert norm.item() > 0.5
    assert total == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        UpdateRule(stages.adamw, clip_value=0.01),
        UpdateRule(stages.adamw, clip_norm=ClipNorm(0.5)),
        UpdateRule(stages.adamw, loss_scaling=LossScaling(initial=4.0)),
    ],
)
def test_what_others_may_hold_of_a_gradient_is_never_written_to(rule):
    grads, _, changed = gradients_in_one_memory(rule)
    assert not changed
    if rule.clip_value is not None:
        assert grads["b2"].abs().max() == rule.clip_value
