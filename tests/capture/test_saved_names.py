"""Names in the model's own state dict of what a program holds."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.saved_names import saved_names


class Tied(nn.Module):
    """A head that is the embedding, with the head first; a buffer of either kind inside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.embed = nn.Embedding(8, 4)
        self.embed.weight = self.head.weight
        self.inner = nn.Module()
        self.inner.register_buffer("kept", torch.ones(2))
        self.inner.register_buffer("passing", torch.ones(3), persistent=False)


def test_every_name_of_a_state_dict_is_given_to_the_tensor_that_it_names() -> None:
    model = Tied()
    names = saved_names(model, ["head.weight", "inner.kept", "inner.passing", "captured_0"])
    assert names == {
        "head.weight": ("head.weight", "embed.weight"),
        "inner.kept": ("inner.kept",),
        "inner.passing": (),
        "captured_0": (),
    }
    assert {name for every in names.values() for name in every} == model.state_dict().keys()


def test_the_name_that_a_model_calls_a_copy_is_not_the_one_that_is_written() -> None:
    model = Tied()
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert saved_names(model, ["head.weight"]) == {"head.weight": ("embed.weight", "head.weight")}
