"""The training loop alone, over a program that computes nothing: what listeners hear, and when."""

from __future__ import annotations

import contextlib
import re
import types
from typing import Any

import pytest
import torch

from autopar.runtime.comm.backends import CUDA, HOST, OF_TYPE, Backend
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.arguments import parser
from autopar.runtime.program.batches import BatchInput
from autopar.runtime.run import train_loop
from autopar.runtime.run.metrics import StepLine


def loop_of(steps: int, training: bool = True, **how: Any) -> train_loop.Loop:
    """A loop over a program whose loss is the position in the data; every third step is saved."""
    comm = types.SimpleNamespace(rank=0, device=torch.device("cpu"), excused=lambda what: contextlib.nullcontext())
    heard = how.pop("heard", lambda what: None)
    updater = types.SimpleNamespace(not_finite=False, skips=types.SimpleNamespace(in_a_row=0))
    updater.settle_look, updater.forget_look = (lambda step: heard(f"look {step}")), (lambda: None)
    guards = types.SimpleNamespace(settle=lambda: heard("guards"), forget=lambda: None)

    class Program:
        own_rows = False
        session = types.SimpleNamespace(
            comm=comm,
            training=training,
            updater=updater,
            guards=guards,
            grad_norm=None,
            extras=None,
            recorder=None,
            next_inputs=types.SimpleNamespace(),
        )
        manifest = types.SimpleNamespace(inputs=[BatchInput(shape=(1,), dtype="float32")], show=lambda: "a program")

        def leaves(self, batch: Any) -> list[torch.Tensor]:
            raise RuntimeProgramError("a batch that the program refuses")

        def __call__(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return torch.full((1,) if training else (2,), float(loop.position))

    arguments = parser().parse_args(["--steps", str(steps)])
    loop = train_loop.Loop(Program(), arguments, 0, 3, reads=True, **how)  # type: ignore[arg-type]
    return loop


class Noting(train_loop.Listener):
    """Notes what it hears; the loss of step 3 takes the run back to step 1 once."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.went_back = False

    def on_loss(self, loop: train_loop.Loop, done: train_loop.Done) -> bool:
        self.heard.append(f"loss {done.loss:g} of {done.step} at {loop.step}")
        if done.step == 3 and not self.went_back:
            self.went_back = True
            loop.go_to(1, loop.position)
            return True
        return False

    def save(self, loop: train_loop.Loop) -> None:
        self.heard.append(f"save {loop.step}")


@pytest.mark.parametrize(
    ("late", "heard"),
    [
        (
            0,
            "loss 0 of 1 at 1, loss 1 of 2 at 2, loss 2 of 3 at 3, loss 3 of 2 at 2, loss 4 of 3 at 3, save 3, loss 5 of 4 at 4",
        ),
        (
            1,
            "loss 0 of 1 at 2, loss 1 of 2 at 3, loss 2 of 3 at 3, loss 3 of 2 at 3, loss 4 of 3 at 3, save 3, loss 5 of 4 at 5",
        ),
    ],
)
def test_losses_are_heard_in_order_before_a_save_and_a_step_that_was_taken_back_is_not_saved(late, heard):
    """Losses that are read a step late are read at once where the step is saved."""
    loop, noting = loop_of(5, late=late), Noting()
    loop.go_to(0, 0)
    loop.run([noting])
    assert noting.heard == [*heard.split(", "), "loss 6 of 5 at 5", "save 5"]


def test_what_else_is_read_late_is_read_before_a_save():
    noting = Noting()
    noting.went_back = True
    loop = loop_of(4, late=1, heard=noting.heard.append)
    loop.go_to(0, 0)
    loop.run([noting])
    said = ", ".join(noting.heard)
    assert (
        "loss 0 of 1 at 2, guards, look 3, loss 1 of 2 at 3, loss 2 of 3 at 3, save 3, guards, look 4, loss 3 of 4"
        in said
    )
    assert (loop.program.session.guards.late, loop.program.session.updater.late) == (1, 1)


@pytest.mark.parametrize(("row", "late"), [(HOST, 0), (CUDA, 1)])
def test_losses_are_read_late_where_kernels_queue_behind_the_host(row: Backend, late: int, monkeypatch):
    monkeypatch.setitem(OF_TYPE, "cpu", row)
    assert loop_of(1).late == late


def test_batches_that_are_inferred_are_counted_and_have_no_loss(capsys):
    loop = loop_of(2, training=False)
    loop.go_to(0, 0)
    loop.run([StepLine(2)])
    assert re.sub(r"[\d.]+ ms", "ms", capsys.readouterr().out) == (
        "a program, cpu, steps 1 to 2\nstep 1  done  ms\nstep 2  done  ms\n"
    )
