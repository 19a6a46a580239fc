"""Sessions whose gradients are compressed: the bits that ranks share, checkpoints, skipped steps, and what is refused."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch

from autopar.runtime import CheckpointError, RuntimeProgramError, run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.gradients.compression import CODECS
from autopar.runtime.update.update_rule import LossScaling, UpdateRule
from tests.runtime import stages
from tests.runtime.scenarios import session_of

SGD = functools.partial(torch.optim.SGD, lr=0.05)


def compressed(program, name):
    """A program whose gradients travel so."""
    for module in program.modules:
        module.GRADS = {g: row | {"compression": name} for g, row in module.GRADS.items()}
    return program


def trained(comm, program, data, directory=None, save_at=None, load=False):
    """Losses and final weights. Saved after a batch, or begun from what was saved."""
    session = session_of(program, comm, SGD)
    if load:
        checkpoint.load(directory, session)
    else:
        session.load_weights(stages.weights())
    losses = []
    for number, batch in enumerate(data, 1):
        losses.append(session.train_step(batch).item())
        if number == save_at:
            checkpoint.save(directory, session)
    return losses, {name: session.gather_full(name) for name in program.stage.PARAMETERS}


@pytest.mark.parametrize("name", CODECS)
def test_ranks_that_hold_the_same_parameter_hold_the_same_bits(name):
    """Along tp ranks have other shards of w1, w2 and b1 and the same b2, in one bucket."""
    program = compressed(stages.mlp(2, 2), name)

    def body(comm):
        session = session_of(program, comm, SGD)
        session.load_weights(stages.weights())
        for batch in stages.batches(3):
            session.train_step(batch)
        return {name: p.clone() for name, p in session.rt.params.items()}

    ranks = run_threads(4, program.mesh, body, timeout_s=60)
    assert all(torch.equal(ranks[0]["b2"], other["b2"]) for other in ranks)
    assert all(torch.equal(ranks[r][n], ranks[2 + r][n]) for r in (0, 1) for n in ranks[r])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(tmp_path, zero):
    program, data = compressed(stages.mlp(2, 2, zero), "int8"), list(stages.batches(5))
    run = lambda **more: run_threads(4, program.mesh, lambda c: trained(c, program, **more), timeout_s=60)  # noqa: E731
    whole = run(data=data, directory=tmp_path, save_at=3)
    rest = run(data=data[3:], directory=tmp_path, load=True)
    plain = run_threads(4, program.mesh, lambda c: trained(c, stages.mlp(2, 2, zero), data), timeout_s=60)
    for (losses, weights), (later, again), (_, exact) in zip(whole, rest, plain, strict=True):
        assert losses[3:] == later
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert any(not torch.equal(weights[name], exact[name]) for name in weights)


def test_another_layout_begins_with_nothing_unsent_and_says_so(tmp_path):
    program, data = compressed(stages.mlp(2, 2, 1), "int8"), list(stages.batches(3))
    run_threads(4, program.mesh, lambda c: trained(c, program, data, tmp_path, 3), timeout_s=60)
    for other in (compressed(stages.mlp(2, 1, 1), "int8"), stages.mlp(2, 1, 1), compressed(stages.mlp(2, 2), "int8")):
        with pytest.warns(UserWarning, match="have not sent .* of another layout"):
            run_threads(
                other.ranks, other.mesh, lambda c, o=other: trained(c, o, data, tmp_path, load=True), timeout_s=60
            )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(4, program.mesh, lambda c: trained(c, program, data, tmp_path, load=True), timeout_s=60)


def test_what_is_unsent_must_fit_its_gradient(tmp_path):
    program = compressed(stages.mlp(2, 1), "int8")

    def misfit(comm, shape):
        session = session_of(program, comm, SGD)
        session.load_weights(stages.weights())
        session.train_step(stages.batches(1)[0])
        state = session.state_dict()
        name = next(name for name in state if name.startswith("optim_unsent") and name.endswith(".w1"))
        session.load_state_dict(state | {name: torch.zeros(shape, dtype=torch.float64)})
        session.train_step(stages.batches(1)[0])

    for shape in ((2, 1000), (3, 16, 8), ()):
        with pytest.raises(CheckpointError, match=r"optim_unsent.* has shape"):
            run_threads(2, program.mesh, lambda c, s=shape: misfit(c, s), timeout_s=60)
    with pytest.raises(RuntimeProgramError, match="what compression has not sent has shape"):
        run_threads(2, program.mesh, lambda c: misfit(c, (2, 8, 8)), timeout_s=60)


def test_a_step_that_is_skipped_leaves_nothing_unsent():
    """A gradient that is no number would stay for ever."""
    program, data = compressed(stages.mlp(2, 1), "int8"), list(stages.batches(3))
    spoilt = [data[0], [torch.full_like(data[1][0], math.nan), data[1][1]], data[2]]

    def body(comm):
        session = session_of(program, comm, SGD)
        session.load_weights(stages.weights())
        session.skip_not_finite()
        skipped, held = [], []
        for batch in spoilt:
            session.train_step(batch)
            skipped.append(session.updater.not_finite)
            held.append(len(session.rt.grads.unsent.values))
        return skipped, held, all(session.gather_full(n).isfinite().all() for n in program.stage.PARAMETERS)

    assert run_threads(2, program.mesh, body, timeout_s=60) == [([False, True, False], [4, 0, 4], True)] * 2


def test_a_loss_scale_that_moves_and_feedback_do_not_go_together():
    rule = UpdateRule(SGD, loss_scaling=LossScaling())
    with pytest.raises(RuntimeProgramError, match="in units of the loss scale, which moves"):
        run_threads(2, {"dp": 2, "tp": 1}, lambda c: session_of(compressed(stages.mlp(2, 1), "int8"), c, rule))
    run_threads(2, {"dp": 2, "tp": 1}, lambda c: session_of(compressed(stages.mlp(2, 1), "bf16"), c, rule))


def test_an_unknown_codec_is_named():
    with pytest.raises(RuntimeProgramError, match="compression 'fp4' is unknown, this runtime has bf16, int8"):
        run_threads(2, {"dp": 2, "tp": 1}, lambda c: session_of(compressed(stages.mlp(2, 1), "fp4"), c))
