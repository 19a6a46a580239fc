"""A batch of a loaded program is built like the example inputs, in what is no tensor too."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.errors import GuardError, RuntimeProgramError
from autopar.runtime.program.batches import leaves, own_leaves
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.loaded import LoadedProgram

X, Y = torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
FIXED = {"2": 0.5, "scale": 0.5, "mask": None, "way": "one"}


def test_a_batch_is_taken_as_tuple_list_or_mapping_in_any_order() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    batch: Any
    for batch in ((x, y), [x, y], {"1": y, "0": x}):
        assert [t.sum().item() for t in leaves(batch, ["0", "1"], {})] == [0, 2]
    nested = {"mask": y, "extra": y, "ids": {"a": x}}
    assert [t.sum().item() for t in leaves(nested, ["ids.a", "mask"], {})] == [0, 2]
    with pytest.raises(RuntimeProgramError, match=r"takes 2: ids, mask; missing ids: every batch"):
        leaves({"mask": y}, ["ids", "mask"], {})
    with pytest.raises(RuntimeProgramError, match=r"a batch of 1 tensors \(0\), the program takes 2"):
        leaves(x, ["0", "1"], {})


def test_a_plain_value_of_a_batch_is_the_one_that_the_program_was_compiled_for() -> None:
    for batch in ({"x": X, "scale": 0.5, "way": "one", "mask": None}, {"x": X, "scale": np.float32(0.5)}, {"x": X}):
        assert leaves(batch, ["x"], FIXED) == [X]
    assert leaves((X, Y, 0.5), ["0", "1"], FIXED) == [X, Y]
    assert leaves((X, Y), ["0", "2"], {"1": 0.5}) == [X, Y], "tensors alone, in order"
    for batch, words in (
        ({"x": X, "scale": 0.25}, "input scale is 0.25, and the program was compiled for 0.5 there"),
        ({"x": X, "way": "other"}, "'other', and the program was compiled for 'one'"),
        ({"x": X, "mask": Y}, r"input mask is a tensor of shape \(4, 2\), and the program was compiled for None there"),
        ({"x": X, "mask": {"of": [Y]}}, r"input mask\.of\.0 is a tensor"),
        ({"x": X, "mask": object()}, "input mask is <object"),
    ):
        with pytest.raises(GuardError, match=words):
            leaves(batch, ["x"], FIXED)
    with pytest.raises(GuardError, match=r"input 2 is 0\.25"):
        leaves((X, Y, 0.25), ["0", "1"], FIXED)


def test_a_rank_of_its_own_rows_may_be_given_anything_for_what_it_does_not_take() -> None:
    for given in (Y, None, "anything"):
        assert own_leaves({"x": X, "y": given, "scale": None, "way": "one"}, ["x", "y"], ["x"], FIXED) == [X]
    with pytest.raises(GuardError, match="input mask is a tensor"):
        own_leaves({"x": X, "mask": Y}, ["x", "y"], ["x"], FIXED)
    with pytest.raises(GuardError, match="scale"):
        own_leaves({"x": X, "scale": 0.25}, ["x"], ["x"], FIXED)


def test_a_tensor_that_is_missing_is_named_with_what_is_there_instead() -> None:
    with pytest.raises(RuntimeProgramError, match="missing y, mask is None: every batch has the tensors that"):
        leaves({"x": X, "mask": None}, ["x", "y", "mask"], {})


class Scaled(nn.Module):
    """A model with an optional input and a number, which some loops change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out = self.one(x) if mask is None else self.one(x) * mask
        return (out * scale).mean()


def test_a_program_keeps_what_its_example_had_beside_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = UserDict({"x": X, "scale": 0.5})
    evaluate = autopar.Entry({"x": X, "mask": Y})
    program = autopar.compile(
        Scaled().double(), autopar.ClusterSpec.local(1), example, optimizer=sgd, entries={"evaluate": evaluate}
    )
    manifest = Manifest.read(program.save(tmp_path / "out"))
    assert (manifest.fixed, manifest.entries["evaluate"].fixed) == ({"mask": None, "scale": 0.5}, {"scale": 1.0})

    def trained(session: Any) -> None:
        loaded = LoadedProgram(manifest, session)
        assert loaded(x=X, scale=0.5).item() == loaded({"x": X}).item()
        with pytest.raises(GuardError, match=r"input scale is 1\.0"):
            loaded(x=X, scale=1.0)
        with pytest.raises(GuardError, match="input mask is a tensor"):
            loaded(x=X, mask=Y)
        with pytest.raises(
            RuntimeProgramError, match="in order or by name, and this one has 1 in order and mask by name"
        ):
            loaded(X, mask=Y)
        loaded.entry("evaluate")(x=X, mask=Y)
        with pytest.raises(GuardError, match="scale"):
            loaded.entry("evaluate")(x=X, mask=Y, scale=0.5)
        with pytest.raises(GuardError, match="shape") as other_rows:
            loaded.entry("evaluate")(x=X[:3], mask=Y[:3])
        assert other_rows.value.__notes__ == [
            "This is of the entry 'evaluate', whose batches and buckets are its own: see autopar.Entry."
        ]

    program.on_ranks(trained)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.0)
