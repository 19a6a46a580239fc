"""A step whose loss or gradients are no numbers counts for nothing, on all ranks, as where eager PyTorch leaves it out."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from autopar.runtime import run_threads
from autopar.runtime.run.loss_checks import LEAST, Losses
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from tests.runtime import pipelines, stages
from tests.runtime.scenarios import left, session_of
from tests.runtime.step.test_pipeline import made
from tests.runtime.update.test_scaling import HALVE, scaled
from tests.runtime.updates import agree, chain_reference, mlp_reference

BAD, STEPS = (0, 3, 4), 7
FUSED = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
RULES = {
    "plain": UpdateRule(stages.adamw, HALVE),
    "clipped": UpdateRule(stages.adamw, HALVE, ClipNorm(0.05)),
    "fused": UpdateRule(FUSED, HALVE, clip_value=0.1),
    "largest": UpdateRule(stages.adamw, None, ClipNorm(0.05, math.inf)),
}


def trained(comm, program, rule, full, batches, norm=False):
    """The steps of scenarios.train, skipping; with the updates that were skipped, learning rates, and Adam's own steps."""
    session = session_of(program, comm, rule)
    session.load_weights(full)
    session.skip_not_finite()
    session.updater.measure_norm = norm
    losses, skipped, norms = [], [], []
    for batch in batches:
        losses.append(session.train_step(batch).item())
        skipped.append(session.updater.not_finite)
        norms.append(session.grad_norm)
    return {
        "losses": losses,
        **left(session, program),
        "skipped": skipped,
        "lr": session.optimizer.param_groups[0]["lr"],
        "adam": {int(state["step"]) for state in session.optimizer.state.values() if state["step"].numel()},
        "steps": session.rt.step,
        "norms": norms,
    }


def spoilt(batches, value):
    """Every batch, of which some have an entry that is no number; and those alone that are whole."""
    every = list(batches)
    left = iter(batches)
    found = []
    for step in range(STEPS):
        batch = [t.clone() for t in (every[0] if step in BAD else next(left))]
        if step in BAD:
            batch[0][1, 3] = value
        found.append(batch)
    return found


@pytest.mark.few(11)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dp", "tp", "zero"), [(1, 1, 0), (2, 2, 1), (4, 1, 3)])
def test_a_skipped_step_leaves_everything_as_where_it_never_was(dp, tp, zero, rule, value):
    """The reference trains on the other batches alone; buffers, which every step writes, are as they are there."""
    program, want = stages.mlp(dp, tp, zero), mlp_reference(STEPS - len(BAD), RULES[rule])
    batches = spoilt(stages.batches(STEPS - len(BAD)), value)
    for got in run_threads(
        dp * tp, program.mesh, lambda comm: trained(comm, program, RULES[rule], stages.weights(), batches), timeout_s=60
    ):
        assert got["skipped"] == [step in BAD for step in range(STEPS)]
        got["losses"] = [loss for loss, skipped in zip(got["losses"], got["skipped"], strict=True) if not skipped]
        agree(got, want)
        assert got["lr"] == pytest.approx(want["log"]["lr"][-1], rel=1e-15)
        assert got["adam"] == {STEPS - len(BAD)}
        assert got["steps"] == STEPS


@pytest.mark.few(4)
@pytest.mark.parametrize("scaling", [None, LossScaling(initial=2.0**10, interval=2)], ids=["", "scaled"])
@pytest.mark.parametrize("case", ["two stages", "tp to dp x tp, optimizer shards", "tied over unequal meshes"])
def test_stages_skip_together(case, scaling, monkeypatch):
    rule = UpdateRule(stages.adamw, HALVE, ClipNorm(0.05))
    program, known = made(case)
    whole = pipelines.batches(STEPS - len(BAD))
    want = chain_reference(STEPS - len(BAD), rule, **known)
    if scaling is not None:
        scaled(program)
        rule = UpdateRule(stages.adamw, HALVE, ClipNorm(0.05), loss_scaling=scaling)
    full, batches = pipelines.weights(known["stages"], known["tied"]), spoilt(whole, math.nan)
    for got in run_threads(
        program.ranks, program.mesh, lambda comm: trained(comm, program, rule, full, batches), timeout_s=60
    ):
        assert got["skipped"] == [step in BAD for step in range(STEPS)]
        got["losses"] = [loss for loss, skipped in zip(got["losses"], got["skipped"], strict=True) if not skipped]
        agree(got, want)


def test_a_gradient_alone_that_is_no_number_on_one_rank_is_skipped_by_all():
    program = stages.mlp(2, 1, 3)
    backward = program.stage.backward

    def spoiling(rt, state, received):
        if rt.step == 1 and rt.comm.rank == 1:
            state[0] = state[0].clone().fill_(math.nan)  # x, which the gradient of w1 alone reads
        return backward(rt, state, received)

    program.stage.backward = spoiling
    rule = UpdateRule(stages.adamw)
    one, _, two = stages.batches(3)
    first = run_threads(
        2, program.mesh, lambda comm: trained(comm, program, rule, stages.weights(), [one, one, two]), timeout_s=60
    )
    want = run_threads(
        2, program.mesh, lambda comm: trained(comm, program, rule, stages.weights(), [one]), timeout_s=60
    )[0]
    for got in first:
        assert got["skipped"] == [False, True, False]
        assert all(map(math.isfinite, got["losses"]))
        assert got["adam"] == {2}
        assert not torch.equal(got["weights"]["w1"], want["weights"]["w1"])


def test_the_norm_is_measured_on_request():
    program, want = stages.mlp(2, 2, 1), mlp_reference(3, UpdateRule(stages.adamw, clip_norm=ClipNorm(1e9)))
    rule, batches = UpdateRule(stages.adamw), stages.batches(3)
    for got in run_threads(
        4, program.mesh, lambda comm: trained(comm, program, rule, stages.weights(), batches, norm=True), timeout_s=60
    ):
        assert [norm.item() for norm in got["norms"]] == pytest.approx(want["log"]["norm"], rel=1e-12)
        agree(got, want)


def test_a_spike_is_far_above_the_median_of_those_before():
    losses = Losses(3.0)
    assert [losses.spike(value) for value in [100.0, *[2.0] * (LEAST - 1)]] == [None] * LEAST
    assert losses.spike(5.9) is None
    assert losses.spike(6.1) == 2.0
    assert losses.spike(6.1) == 2.0  # a spike does not become usual
    assert Losses(0).spike(1e30) is None
    below = Losses(2.0)
    assert [below.spike(value) for value in [*[-1.0] * LEAST, 50.0]] == [None] * (LEAST + 1)
