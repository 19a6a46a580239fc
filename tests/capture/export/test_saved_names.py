"""Names in the model's own state dict of what a program holds."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export.saved_names import saved_names
from tests.warm import torchrun


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


class Trained(Tied):
    """A loss of both names of the tied weight and of both buffers, one of which moves; some Python state goes along."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.ModuleList([self.unused])

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids) * self.inner.kept.sum() * self.inner.passing.sum())
        return nn.functional.cross_entropy(self.head(x), ids)


@pytest.mark.parametrize("options", [{}, {"pp": 2, "microbatches": 1}], ids=["one stage", "two stages"])
def test_the_state_of_a_run_goes_strictly_into_the_model(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, ids = Trained(), torch.arange(8)
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(2),
        (ids,),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(**options),
    )
    state = program.run([(ids,)], steps=2).state_dict()
    assert list(state) == list(model.state_dict())
    assert state["head.weight"] is state["embed.weight"]
    other = Trained()
    other.load_state_dict(state, strict=True)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        eager(ids).backward()
        optimizer.step()
    torch.testing.assert_close(
        {name: t for name, t in other.state_dict().items() if isinstance(t, torch.Tensor)},
        {name: t for name, t in eager.state_dict().items() if isinstance(t, torch.Tensor)},
        rtol=1e-5,
        atol=1e-6,
    )


LOADED = """import os, sys, traceback, torch, autopar
sys.path[:0] = sys.argv[2:4]
from test_saved_names import Trained
def main():
    program = autopar.load(sys.argv[1])
    program(torch.arange(8))
    full = lambda state: {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    model, state = Trained(), program.state_dict(optimizer=False)
    names = [name for name in model.state_dict() if name != "_extra_state"]
    assert sorted(state) == sorted(names), (sorted(state), sorted(names))
    model.load_state_dict(full(state) | {"_extra_state": {"version": 3}}, strict=True)
    whole = {name: value.clone() if hasattr(value, "clone") else value for name, value in program.state_dict().items()}
    assert set(names) < set(whole) and "inner.passing" in whole and whole["step"].item() == 1
    before = program(torch.arange(8)).item()
    del whole["head.weight"]
    program.load_state_dict(whole)
    assert program(torch.arange(8)).item() == before
try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # a rank that leaves may not wait for the other
torch.distributed.destroy_process_group()
"""


def test_the_state_of_a_loaded_program_goes_strictly_into_the_model_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.arange(8)
    autopar.compile(
        Trained(),
        autopar.ClusterSpec.local(2),
        (ids,),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        options=autopar.Options(strategy="zero3"),
    ).save(tmp_path / "out")
    (tmp_path / "loaded.py").write_text(LOADED)
    done = torchrun(2, tmp_path / "loaded.py", tmp_path / "out", Path(__file__).parent, Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
