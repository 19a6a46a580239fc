"""Checkpoints without processes: threads write and read them, full weights load, and misfits are named."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import CheckpointError, run_threads
from autopar.runtime.checkpoint import checkpoint
from tests.runtime import pipelines, stages
from tests.runtime.scenarios import session_of
from tests.runtime.step.test_pipeline import CASES, made


def session_on(comm, program):
    session = session_of(program, comm)
    session.load_weights(stages.weights())
    return session


def test_threads_save_and_resume_under_another_mesh(tmp_path):
    want = stages.reference(4)
    first, second = stages.mlp(2, 2, 3), stages.mlp(2, 1, 1)

    def start(comm):
        session = session_on(comm, first)
        for batch in stages.batches(2):
            session.train_step(batch)
        checkpoint.save(tmp_path, session)

    def go_on(comm):
        session = session_of(second, comm)
        checkpoint.load(tmp_path, session)
        assert session.rt.step == 2
        return [session.train_step(batch).item() for batch in stages.batches(4)[2:]]

    run_threads(4, first.mesh, start, timeout_s=60)
    for losses in run_threads(2, second.mesh, go_on, timeout_s=60):
        assert losses == pytest.approx(want["losses"][2:], rel=1e-12)


@pytest.mark.parametrize(("saved", "loaded"), [("tied", "stages of one group"), ("v", "zero bubble"), ("skip", "skip")])
def test_checkpoints_move_between_pipelines(tmp_path, saved, loaded):
    """Stages, meshes, groups and schedules differ; the names are those of the longer chain, tied as in the first."""
    first, known = made(saved)
    options = CASES[loaded] | {"tied": known["tied"], "skip": known["skip"]}
    options |= {"meshes": [(1, 1)] * known["stages"], "groups": None, "split": False, "zero": False}
    options |= {"table": pipelines.one_f_one_b(known["stages"], options["microbatches"])}
    second = pipelines.chain(**options)
    data, want = pipelines.batches(4), pipelines.reference(4, **known)

    def start(comm):
        session = session_of(first, comm)
        session.load_weights(pipelines.weights(known["stages"], known["tied"]))
        for batch in data[:2]:
            session.train_step(batch)
        checkpoint.save(tmp_path, session)
        return session.state_dict()

    def go_on(comm, state=None):
        session = session_of(second, comm)
        if state is None:
            checkpoint.load(tmp_path, session)
        else:
            session.load_state_dict(state)
        losses = [session.train_step(batch).item() for batch in data[2:]]
        return losses, {name: session.gather_full(name) for name in want["weights"]}

    states = run_threads(first.ranks, first.mesh, start, timeout_s=60)
    assert len({frozenset(state) for state in states}) == 1
    for state in (None, states[0]):
        for losses, weights in run_threads(second.ranks, second.mesh, lambda c, s=state: go_on(c, s), timeout_s=60):
            assert losses == pytest.approx(want["losses"][2:], rel=1e-12)
            for name, value in want["weights"].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)


def test_learning_rates_changed_while_training_come_back(tmp_path):
    program = stages.mlp(1, 1)

    def body(comm):
        session = session_on(comm, program)
        session.train_step(stages.batches(1)[0])
        session.optimizer.param_groups[0]["lr"] = 0.125
        checkpoint.save(tmp_path, session)
        again = session_of(program, comm)
        checkpoint.load(tmp_path, again)
        return again.optimizer.param_groups[0]["lr"]

    assert run_threads(1, program.mesh, body) == [0.125]


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    program = stages.mlp(1, 1)

    def body(comm):
        session = session_on(comm, program)
        session.train_step(stages.batches(1)[0])
        checkpoint.save(tmp_path, session)
        checkpoint.load(tmp_path, session_of(program, comm, torch.optim.SGD))

    with pytest.raises(CheckpointError, match="written with AdamW, this program trains with SGD"):
        run_threads(1, program.mesh, body)


def test_full_weights_start_at_step_zero(tmp_path):
    program = stages.mlp(2, 1, 3)
    checkpoint.write_full(tmp_path, stages.weights())

    def body(comm):
        session = session_of(program, comm)
        checkpoint.load(tmp_path, session)
        assert session.rt.step == 0
        return session.train_step(stages.batches(1)[0]).item()

    assert run_threads(2, program.mesh, body, timeout_s=60) == pytest.approx(
        stages.reference(1)["losses"] * 2, rel=1e-12
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("w2"), "no tensor 'w2'"),
        (lambda w: w.update(w2=torch.zeros(3, 3)), r"w2 has shape \(3, 3\), the program has \(8, 16\)"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, change, words):
    weights, program = stages.weights(), stages.mlp(1, 1)
    change(weights)
    checkpoint.write_full(tmp_path, weights)
    with pytest.raises(CheckpointError, match=words):
        run_threads(1, program.mesh, lambda comm: checkpoint.load(tmp_path, session_of(program, comm, None)))


def test_a_directory_without_checkpoint_is_refused(tmp_path):
    program = stages.mlp(1, 1)
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        run_threads(1, program.mesh, lambda comm: checkpoint.load(tmp_path / "none", session_of(program, comm, None)))


def test_parameters_named_like_checkpoint_entries_are_refused():
    program = stages.inference(1, 1)
    program.stage.PARAMETERS["step"] = program.stage.PARAMETERS.pop("w")
    with pytest.raises(CheckpointError, match="step"):
        run_threads(1, program.mesh, lambda comm: session_of(program, comm, None).state_dict())
