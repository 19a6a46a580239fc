"""Checkpoints without processes: threads write and read them, full weights load, and misfits are named."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import CheckpointError, Session, checkpoint, run_threads

from . import stages


def session_on(comm, stage):
    session = Session(stage, comm, stages.adamw)
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
        session = Session(second, comm, stages.adamw)
        checkpoint.load(tmp_path, session)
        assert session.rt.step == 2
        return [session.train_step(batch).item() for batch in stages.batches(4)[2:]]

    run_threads(4, first.MESH, start, timeout_s=60)
    for losses in run_threads(2, second.MESH, go_on, timeout_s=60):
        assert losses == pytest.approx(want["losses"][2:], rel=1e-12)


def test_learning_rates_changed_while_training_come_back(tmp_path):
    stage = stages.mlp(1, 1)

    def body(comm):
        session = session_on(comm, stage)
        session.train_step(stages.batches(1)[0])
        session.optimizer.param_groups[0]["lr"] = 0.125
        checkpoint.save(tmp_path, session)
        again = Session(stage, comm, stages.adamw)
        checkpoint.load(tmp_path, again)
        return again.optimizer.param_groups[0]["lr"]

    assert run_threads(1, stage.MESH, body) == [0.125]


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    stage = stages.mlp(1, 1)

    def body(comm):
        session = session_on(comm, stage)
        session.train_step(stages.batches(1)[0])
        checkpoint.save(tmp_path, session)
        checkpoint.load(tmp_path, Session(stage, comm, torch.optim.SGD))

    with pytest.raises(CheckpointError, match="written with AdamW, this program trains with SGD"):
        run_threads(1, stage.MESH, body)


def test_full_weights_start_at_step_zero(tmp_path):
    stage = stages.mlp(2, 1, 3)
    checkpoint.write_full(tmp_path, stages.weights())

    def body(comm):
        session = Session(stage, comm, stages.adamw)
        checkpoint.load(tmp_path, session)
        assert session.rt.step == 0
        return session.train_step(stages.batches(1)[0]).item()

    assert run_threads(2, stage.MESH, body, timeout_s=60) == pytest.approx(stages.reference(1)["losses"] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("w2"), "no tensor 'w2'"),
        (lambda w: w.update(w2=torch.zeros(3, 3)), r"w2 has shape \(3, 3\), the program has \(8, 16\)"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, change, words):
    weights, stage = stages.weights(), stages.mlp(1, 1)
    change(weights)
    checkpoint.write_full(tmp_path, weights)
    with pytest.raises(CheckpointError, match=words):
        run_threads(1, stage.MESH, lambda comm: checkpoint.load(tmp_path, Session(stage, comm)))


def test_a_directory_without_checkpoint_is_refused(tmp_path):
    stage = stages.mlp(1, 1)
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        run_threads(1, stage.MESH, lambda comm: checkpoint.load(tmp_path / "none", Session(stage, comm)))


def test_parameters_named_like_checkpoint_entries_are_refused():
    stage = stages.inference(1, 1)
    stage.PARAMETERS["step"] = stage.PARAMETERS.pop("w")
    with pytest.raises(CheckpointError, match="step"):
        run_threads(1, stage.MESH, lambda comm: Session(stage, comm).state_dict())
