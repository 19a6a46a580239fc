"""Example inputs: which go to the model and which to the loss, and what a microbatch of them is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.examples.inputs import batch_size, microbatch, split_example
from autopar.errors import InputError

X, Y, W = torch.zeros(8, 3), torch.zeros(8), torch.zeros(4)


class Weighted(nn.Module):
    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return x if weight is None else x * weight


def own_loss(out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    return (out - y).mean()


def any_targets(out: Tensor, *targets: Tensor) -> Tensor:
    return out.mean()


@pytest.mark.parametrize(
    ("inputs", "loss_fn", "targets"),
    [
        ((X,), None, 0),
        ((X, W), None, 0),
        ((X, Y), F.cross_entropy, 1),
        ((X, W, Y), nn.MSELoss(), 1),
        ((X, W, Y), own_loss, 1),
        ((X, W, Y, Y), own_loss, 2),
        ((X, W, Y, Y, Y), any_targets, 3),
        ({"x": X, "y": Y}, own_loss, 1),
    ],
)
def test_the_fewest_targets_that_leave_what_forward_takes(inputs: object, loss_fn: object, targets: int) -> None:
    assert split_example(Weighted(), inputs, loss_fn)[1] == targets  # type: ignore[arg-type]


def test_targets_given_by_name_go_last() -> None:
    inputs, targets = split_example(Weighted(), {"y": Y, "x": X, "weight": W}, own_loss)
    assert (list(inputs), targets) == (["x", "weight", "y"], 1)


def test_one_tensor_is_one_argument_and_a_list_is_a_tuple() -> None:
    assert split_example(Weighted(), X, None)[0] == (X,)
    assert isinstance(split_example(Weighted(), [X, W], None)[0], tuple)


def test_inputs_that_no_split_makes_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"got 4 positional inputs, 1 of them for loss_fn"):
        split_example(Weighted(), (X, X, X, Y), F.cross_entropy)


def test_a_microbatch_takes_its_part_of_what_has_the_batch() -> None:
    inputs = {"x": torch.zeros(8, 3), "table": torch.zeros(5, 3), "ids": (torch.zeros(2, 8), 7)}
    piece = microbatch(inputs, {"ids.0": 1}, 4)
    assert [piece["x"].shape, piece["table"].shape, piece["ids"][0].shape] == [(2, 3), (5, 3), (2, 2)]
    assert piece["ids"][1] == 7
    assert microbatch(inputs, None, 1) is inputs


def test_the_batch_is_that_of_the_first_input_that_has_one() -> None:
    assert batch_size((torch.tensor(1.0), torch.zeros(6, 2)), None) == 6
    assert batch_size((torch.zeros(6, 2), torch.zeros(4)), {"0": 1}) == 2
    assert batch_size((torch.tensor(1.0),), None) == 1
