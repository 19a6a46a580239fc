"""A run whose updates are left out for ever ends by name within 20 steps, on every rank, and so does its restart."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime import RuntimeProgramError, run_threads
from autopar.runtime.errors import CheckpointError, TooManySkips
from autopar.runtime.update.scaling import LEAST_SCALE, Scaler
from autopar.runtime.update.skips import MOST_OVERFLOWS, MOST_SKIPPED, Skips
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from tests.runtime import stages
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.scenarios import session_of
from tests.warm import torchrun

RULES = {
    "scaled": UpdateRule(stages.adamw, loss_scaling=LossScaling()),
    "scaled and clipped": UpdateRule(stages.adamw, clip_norm=ClipNorm(1.0), loss_scaling=LossScaling(backoff=0.25)),
    "plain": UpdateRule(stages.adamw),
    "clipped": UpdateRule(stages.adamw, clip_norm=ClipNorm(1.0)),
    "largest": UpdateRule(stages.adamw, clip_norm=ClipNorm(1.0, math.inf)),
    "clamped": UpdateRule(stages.adamw, clip_value=1.0),
}


def endless(program, value):
    """The program with the gradient of w1 spoilt on the last rank from step 3 on."""
    backward = program.stage.backward

    def spoiling(rt, state, received):
        if rt.step >= 3 and rt.comm.rank == rt.comm.world_size - 1:
            state[0] = state[0].clone().fill_(value)  # x, which the gradient of w1 alone reads
        return backward(rt, state, received)

    program.stage.backward = spoiling
    return program


def until_it_ends(comm, program, rule, state=None, skip=False, steps=40, late=0):
    session = session_of(program, comm, rule)
    session.updater.late = late
    session.load_weights(stages.weights())
    if skip:
        session.skip_not_finite()
    if state is not None:
        session.load_state_dict(state)
    batch, first = stages.batches(1)[0], session.rt.step

    def endless_loop():
        for _ in range(steps):
            session.train_step(batch)

    with pytest.raises(RuntimeProgramError) as error:
        endless_loop()
    return session.rt.step - first, str(error.value), session.state_dict(), session.updater


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("rule", ["scaled", "scaled and clipped"])
def test_overflow_for_ever_ends_at_the_twentieth_skipped_step_and_a_restart_says_the_same(rule, value, capsys):
    program = endless(stages.mlp(2, 1), value)
    ended = run_threads(2, program.mesh, lambda comm: until_it_ends(comm, program, RULES[rule]), timeout_s=60)
    for steps, said, _, updater in ended:
        assert steps == 3 + MOST_OVERFLOWS + 1
        assert said.startswith("a gradient of step 23 overflows or is no number, and the loss scale is down to ")
        assert said.endswith("after 19 updates in a row that were skipped for this")
        assert updater.skips.total == 20
        assert updater.loss_scale >= LEAST_SCALE
    warned = capsys.readouterr().err
    assert warned.count("2 updates in a row are skipped; the run ends where that goes on for 20") == 1
    assert "a gradient of step 5 overflows" in warned
    state = ended[0][2]
    again = run_threads(2, program.mesh, lambda comm: until_it_ends(comm, program, RULES[rule], state), timeout_s=60)
    for steps, said, _, _ in again:
        assert steps == 1
        assert "updates in a row that were skipped for this" in said


def test_no_numbers_for_ever_end_at_the_eleventh_step_that_is_skipped_on_request():
    program = endless(stages.mlp(2, 1), math.nan)
    for steps, said, _, _ in run_threads(
        2, program.mesh, lambda comm: until_it_ends(comm, program, RULES["plain"], skip=True), timeout_s=60
    ):
        assert steps == 3 + MOST_SKIPPED + 1
        assert said == "a gradient of step 14 is no number, after 10 updates in a row that were skipped for this"


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("rule", ["plain", "clipped", "largest", "clamped"])
def test_parameters_that_nobody_kept_from_such_gradients_are_named_within_twenty_steps(rule, late):
    """Eager trains on; here the step after the tenth of a session looks."""
    program = endless(stages.mlp(2, 1), math.nan)
    ended = run_threads(
        2, program.mesh, lambda comm: until_it_ends(comm, program, RULES[rule], late=late), timeout_s=60
    )
    for steps, said, _, _ in ended:
        assert steps == 10 + late
        assert said.startswith(
            "step 10: there are parameters with entries that are no numbers, and so are their gradients (w1"
        )


def test_a_gradient_that_is_no_number_behind_a_finite_loss_ends_a_program_in_this_process():
    """The gradient of a root at zero is infinite times zero; the parameter that it spoils is then left out of the loss."""

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)
            self.gain = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + torch.where(self.gain > 0, self.gain.sqrt(), torch.zeros_like(self.gain))

    batch = (torch.randn(8, 4), torch.randn(8, 4))
    program = autopar.compile(
        Root(), autopar.ClusterSpec.local(2), batch, loss_fn=torch.nn.functional.mse_loss, optimizer=stages.adamw
    )
    assert math.isfinite(program.run(batch, steps=9).losses[-1])
    with pytest.raises(RuntimeProgramError, match=r"step 10: there are parameters .* \(gain"):
        program.run(batch, steps=20)


def test_a_good_step_between_begins_the_count_anew():
    skips = Skips()
    for step in range(200):
        skips.count(step % 20 != 0, True)
        assert not skips.judge(step, 1.0, 1.0) or skips.in_a_row == 2
    assert (skips.total, skips.in_a_row) == (190, 19)
    skips.count(True, True)
    with pytest.raises(TooManySkips):
        skips.judge(200, 1.0, 1.0)


def test_the_scale_has_a_floor_and_one_that_was_saved_below_it_comes_back_at_the_floor():
    scaler = Scaler(LossScaling())
    for _ in range(144):
        scaler.update(True)
    assert scaler.scale == LEAST_SCALE
    scaler.restore(1e-40, 0)
    assert scaler.scale == LEAST_SCALE
    assert Scaler(LossScaling(initial=1e-45)).scale == LEAST_SCALE


@pytest.mark.parametrize("saved", ["", "-1", "1.5", "NaN", "[1]", '"1"', "9" * 40, None, torch.zeros(())])
def test_a_damaged_count_of_skipped_steps_is_named(saved):
    with pytest.raises(CheckpointError, match="count of skipped steps is damaged"):
        Skips.read(saved)


def test_a_checkpoint_without_a_count_is_taken():
    program, rule = stages.mlp(2, 1), RULES["scaled"]

    def body(comm):
        session = session_of(program, comm, rule)
        session.load_weights(stages.weights())
        session.train_step(stages.batches(1)[0])
        state = session.state_dict()
        assert state.pop("optim_skipped") == "0"
        session.load_state_dict(state)
        return session.rt.step

    assert run_threads(2, program.mesh, body, timeout_s=60) == [1, 1]


STAGE = """from programs import stages
from autopar_runtime import Rank
program = stages.mlp(2, 1, zero=3)
kept = program.stage.backward

def backward(rt, state, received):
    if rt.step >= 3 and rt.comm.rank == 1:
        state[0] = state[0].clone().fill_(float("inf"))
    return kept(rt, state, received)

globals().update({**vars(program.stage), "backward": backward})
"""


@pytest.fixture
def overflowing(emitted: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A program whose gradients overflow for ever, from step 4 on."""
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (out / "stages" / "stage_0.py").write_text(STAGE)
    manifest = json.loads((out / "manifest.json").read_text())
    scaling = {"initial": 65536.0, "growth": 2.0, "backoff": 0.5, "interval": 2000}
    manifest["update"]["loss_scaling"] = scaling
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_that_overflows_for_ever_ends_by_name_and_so_does_the_same_command_again(overflowing, tmp_path):
    own = [str(overflowing / "run.py"), "--steps", "60", "--timeout", "20"]
    done = torchrun(2, *own)
    assert done.returncode != 0
    assert (
        "a gradient of step 23 overflows or is no number, and the loss scale is down to 0.0625, after 19" in done.stderr
    )
    run = [*own, "--run-dir", str(tmp_path / "run"), "--save-every", "5"]
    for last, saved in ((23, 20), (23, 20)):
        done = torchrun(2, *run)
        assert done.returncode != 0
        assert f"TooManySkips: a gradient of step {last} overflows" in done.stderr
        assert f"the last saved step is {saved}" in done.stderr
