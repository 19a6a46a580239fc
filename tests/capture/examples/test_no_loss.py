"""A model that was meant to be trained is trained on the only scalar with a gradient in what it returns; where there is none, or
several, it is refused with the loss_fn to write. Nothing said means inference."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cli.main import main

X, Y = torch.randn(4, 8), torch.arange(4)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
Pair = namedtuple("Pair", ["logits", "objective"])


@dataclass
class Made:
    logits: torch.Tensor
    objective: torch.Tensor


class Net(nn.Module):
    """A model like nanoGPT: logits and loss, in what `made` puts them in."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.head, self.made = nn.Linear(8, 8), made

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(x)
        return self.made(logits, F.cross_entropy(logits, y))


def tuple_of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values


def nested(logits: torch.Tensor, loss: torch.Tensor) -> dict[str, Any]:
    return {"aux": [logits.detach().mean()], "losses": (logits, loss)}


def as_dict(logits: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": logits, "objective": loss}


def ordered(logits: torch.Tensor, loss: torch.Tensor) -> Any:
    return OrderedDict(logits=logits, objective=loss)


def two(logits: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits, loss, 2 * loss


def compiled(made: Any, **given: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    return autopar.compile(Net(made), autopar.ClusterSpec.local(1), (X, Y), **given)


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (lambda logits, loss: [logits, loss.reshape(1)], "out[1]"),
        (lambda logits, loss: {"loss": None, "objective": loss}, 'out["objective"]'),
        (Made, "out.objective"),
        (lambda logits, loss: loss.reshape(1), "out"),
    ],
)
def test_the_loss_among_the_outputs_is_named_as_one_writes_it_and_trains(made: Any, written: str) -> None:
    with pytest.raises(autopar.InputError) as refused:
        compiled(made, optimizer=SGD)
    assert f"pass loss_fn=lambda out: {written}." in str(refused.value)
    check_trained(compiled(made, optimizer=SGD, loss_fn=eval(f"lambda out: {written}")), made)


@pytest.mark.parametrize("made", [tuple_of, as_dict, ordered, Pair, nested, lambda logits, loss: [loss, logits]])
def test_the_only_scalar_with_a_gradient_is_trained_on(made: Any) -> None:
    program = compiled(made, optimizer=SGD)
    check_trained(program, made)
    assert "trained on out" in program.report()


def test_of_several_scalars_none_is_taken() -> None:
    with pytest.raises(
        autopar.InputError, match=r"out\[1\] \(or out\[2\]\) is the loss, pass loss_fn=lambda out: out\[1\]"
    ):
        compiled(two, optimizer=SGD)


def check_trained(program: autopar.ParallelProgram, made: Any) -> None:
    """The program is trained on the cross-entropy, and gives nothing beside it."""
    assert program.training
    model = Net(made)
    torch.manual_seed(0)
    model.head.reset_parameters()
    result = program.run([(X, Y)], steps=1)
    torch.testing.assert_close(result.losses, (F.cross_entropy(model.head(X), Y),))
    assert not result.outputs


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": SGD},
        {"clip_grad_norm": 1.0},
        {"clip_grad_value": 1.0},
        {"loss_scaling": True},
        {"options": autopar.Options(compensated_sums=True)},
        {"options": autopar.Options(gradient_compression="bf16")},
        {"options": autopar.Options(recompute="full")},
        {"optimizer": SGD, "scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
    ],
    ids=lambda given: " ".join(given),
)
def test_whatever_means_nothing_in_inference_is_named(given: Any) -> None:
    name = next(iter(given))
    with pytest.raises(autopar.InputError, match=f"{name}=|Options.") as refused:
        compiled(two, **given)
    assert "leave" in str(refused.value)


def test_a_model_of_which_nothing_more_is_said_is_for_inference() -> None:
    assert not compiled(tuple_of).training


def test_where_no_output_is_a_scalar_a_loss_is_asked_for() -> None:
    with pytest.raises(autopar.InputError, match=r"shape \(4, 8\); let it return a scalar, or pass loss_fn\(output"):
        autopar.compile(nn.Linear(8, 8), autopar.ClusterSpec.local(1), (X,), optimizer=SGD)


def test_a_loss_without_a_gradient_is_told_why_it_is_none() -> None:
    with pytest.raises(autopar.InputError, match=r"out\[1\] is a scalar, but depends on no parameter that requires"):
        compiled(lambda logits, loss: (logits, loss.detach()), optimizer=SGD)


def model_for_the_command_line() -> dict[str, Any]:
    return {"model": Net(two), "example_inputs": (X, Y), "optimizer": SGD}


def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{__name__}:model_for_the_command_line", "--cluster", "dgx-h100"]) == 2
    assert "loss_fn=lambda out: out[1]" in capsys.readouterr().err
