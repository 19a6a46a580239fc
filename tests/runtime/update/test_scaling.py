"""Dynamic loss scaling: torch.amp.GradScaler's numbers, and a step that overflows on one rank is skipped on all."""

from __future__ import annotations

import functools

import pytest
import torch

from autopar.runtime import run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.update.scaling import Scaler
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from tests.runtime import pipelines, stages
from tests.runtime.scenarios import session_of
from tests.runtime.step.test_pipeline import made
from tests.runtime.updates import agree, chain_reference

SCALING = LossScaling(initial=2.0**10, interval=2)
HALVE = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def scaled(program):
    """The hand-written program with the seed that emitted programs have: what the last stage calls its first gradient."""
    for module in program.modules:
        module.backward = _seeded(module.backward, module)
    return program


def _seeded(backward, module):
    """Every gradient a stage makes is linear in the seed: multiplied where the loss is, passed on elsewhere."""
    last = any(row["index"] == 0 for row in module.OUTPUTS)

    def run(rt, state, received):
        if not last:
            return backward(rt, state, received)
        add = rt.grads.add
        rt.grads.add = lambda name, grad, owned=False: add(name, grad * rt.loss_scale, True)
        try:
            sent, left = backward(rt, state, received)
        finally:
            rt.grads.add = add
        return [value * rt.loss_scale for value in sent], left

    return run


def data(steps, bad):
    found = pipelines.batches(steps)
    for step in bad:
        found[step][0][1, 3] = float("inf")
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("clip", [None, ClipNorm(0.05)])
@pytest.mark.parametrize("case", ["two stages", "tp to dp x tp, optimizer shards", "tied over unequal meshes"])
def test_an_overflow_on_one_rank_is_skipped_by_all_as_eager_skips_it(case, clip, monkeypatch):
    steps, bad = 6, (1, 3)
    rule = UpdateRule(stages.adamw, HALVE, clip, loss_scaling=SCALING)
    program, known = made(case)
    full, batches = pipelines.weights(known["stages"], known["tied"]), data(steps, bad)
    monkeypatch.setattr(pipelines, "batches", lambda count: batches)
    want = chain_reference(steps, rule, **known)
    assert want["log"]["scale"] == [1024.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    scaled(program)

    def body(comm):
        session = session_of(program, comm, rule)
        session.load_weights(full)
        rows, losses = [], []
        for batch in batches:
            losses.append(session.train_step(batch).item())
            rows.append((session.updater.loss_scale, session.updater.skipped, session.optimizer.param_groups[0]["lr"]))
        weights = {name: session.gather_full(name) for name in want["weights"] if name != "gain"}
        return {"losses": losses, "grads": session.full_grads(), "weights": weights, "rows": rows}

    want["weights"].pop("gain")
    for got in run_threads(program.ranks, program.mesh, body, timeout_s=60):
        assert [row[0] for row in got["rows"]] == want["log"]["scale"]
        assert [row[1] for row in got["rows"]] == [step in bad for step in range(steps)]
        assert [row[2] for row in got["rows"]] == pytest.approx(want["log"]["lr"], rel=1e-15)
        agree(got, want)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_scale_is_taken_off_whatever_dtype_a_script_computes_in(default):
    scaler, grads = Scaler(LossScaling(initial=8.0)), [torch.tensor([8.0, 16.0], dtype=torch.float64)]
    try:
        torch.set_default_dtype(default)
        assert scaler.unscale(grads, torch.device("cpu")).item() == 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert grads[0].tolist() == [1.0, 2.0]


def test_the_scale_moves_as_that_of_torch():
    """Random overflows, factors that are no powers of two."""
    choice = LossScaling(1000.0, 1.7, 0.3, 3)
    theirs, ours = torch.amp.GradScaler("cpu", 1000.0, 1.7, 0.3, 3), Scaler(choice)
    parameter = torch.nn.Parameter(torch.zeros(2))
    sgd, make = torch.optim.SGD([parameter], lr=0.1), torch.Generator().manual_seed(3)
    for _ in range(60):
        overflow = bool(torch.rand((), generator=make) < 0.2)
        parameter.grad = torch.tensor([1.0, float("inf") if overflow else 2.0])
        mine = parameter.grad.clone()
        theirs.scale(torch.ones(()))
        theirs.unscale_(sgd)
        found = ours.unscale([mine], torch.device("cpu"))
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=0)
        assert bool(found.item()) == overflow
        theirs.step(sgd)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5])
def test_a_run_that_goes_on_inside_a_growth_interval_scales_as_one_that_was_not_broken(saved_after, tmp_path):
    """Grows after three steps without overflow, so what is counted of them is part of what is saved."""
    rule = UpdateRule(stages.adamw, loss_scaling=LossScaling(initial=2.0**10, interval=3))
    program, batches = stages.mlp(2, 1), stages.batches(8)

    def trained(session, steps):
        scales = []
        for batch in steps:
            session.train_step(batch)
            scales.append((session.updater.loss_scale, session.updater.scaler.growth_tracker))
        return scales

    def unbroken(comm):
        session = session_of(program, comm, rule)
        session.load_weights(stages.weights())
        before = trained(session, batches[:saved_after])
        checkpoint.save(tmp_path, session)
        return before + trained(session, batches[saved_after:])

    def goes_on(comm):
        session = session_of(program, comm, rule)
        checkpoint.load(tmp_path, session)
        return trained(session, batches[saved_after:])

    want = run_threads(2, program.mesh, unbroken, timeout_s=30)[0]
    assert [scale for scale, _ in want] == [2.0**10] * 2 + [2.0**11] * 3 + [2.0**12] * 3
    for got in run_threads(2, program.mesh, goes_on, timeout_s=30):
        assert got == want[saved_after:]


def test_without_loss_scaling_and_clipping_a_step_has_no_message_more():
    counted = []

    def body(comm, rule):
        session = session_of(program, comm, rule)
        session.load_weights(stages.weights())
        calls, start = [], comm._start
        comm._start = lambda call: calls.append(call.site) or start(call)
        session.train_step(stages.batches(1)[0])
        return calls

    program = stages.mlp(2, 2)
    for rule in (UpdateRule(stages.adamw), UpdateRule(stages.adamw, clip_norm=ClipNorm(1.0), loss_scaling=SCALING)):
        sites = run_threads(4, program.mesh, lambda comm, rule=rule: body(comm, rule), timeout_s=30)[0]
        counted.append([site for site in sites if "overflow" in site])
    assert [len(sites) for sites in counted] == [0, 1]
