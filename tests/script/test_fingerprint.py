"""A kept program depends on all that it follows from, and on nothing else."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api import request_of
from autopar.request import Request
from autopar.script.fingerprint import Asked, fingerprint, key_of_batches

MODEL = """
import torch
from torch import nn
from {helpers} import activation
import {helpers} as helpers

WIDTH = 8


class Block(nn.Module):
    def __init__(self, slope=0.1):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slope = slope
        self.table = torch.arange(4.0)
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x):
        from {helpers} import late
        x = activation(self.one(x), self.slope) * helpers.FACTOR
        return late(self.two(x)) * self.mask
"""
HELPERS = """
import torch

FACTOR = 2.0


def activation(x, slope):
    return inner(x, slope)


def inner(x, slope):
    return torch.nn.functional.leaky_relu(x, slope)


def late(x):
    return x + 1.0
"""
COUNT = iter(range(1000))


def written(folder: Path, model: str = MODEL, helpers: str = HELPERS) -> ModuleType:
    """The module of a model, in files that this process has not imported yet, under names that it had."""
    for name in ("fp_model", "fp_helpers"):
        sys.modules.pop(name, None)
    own = folder / str(next(COUNT))
    own.mkdir()
    (own / "fp_model.py").write_text(model.format(helpers="fp_helpers"))
    (own / "fp_helpers.py").write_text(helpers)
    sys.path.insert(0, str(own))
    try:
        importlib.invalidate_caches()
        importlib.import_module("fp_helpers")
        return importlib.import_module("fp_model")
    finally:
        sys.path.remove(str(own))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in ("fp_model", "fp_helpers"):
        sys.modules.pop(name, None)


def smoothed(by: float) -> Callable[..., torch.Tensor]:
    return lambda out, target: nn.functional.mse_loss(out, target) * by


def request(model: nn.Module, **others: Any) -> Request:
    draw = torch.Generator().manual_seed(others.pop("seed", 0))
    rows = others.pop("rows", 4)
    names = ("scheduler", "clip_grad_norm", "clip_grad_value", "options", "plan", "buckets", "pad_values")
    asked: dict[str, Any] = dict.fromkeys(names) | {"loss_scaling": False}
    asked |= {"loss_fn": smoothed(1.0), "optimizer": functools.partial(torch.optim.SGD, lr=0.1)} | others
    cluster = asked.pop("cluster", autopar.ClusterSpec.local(2))
    batch = tuple(torch.randn(rows, 8, generator=draw) for _ in range(2))
    return request_of(model, cluster, batch, **asked)


def asked(model: nn.Module, **others: Any) -> Asked:
    return fingerprint(request(model, **others))


def test_what_does_not_matter_changes_nothing(tmp_path: Path) -> None:
    first = asked(written(tmp_path).Block())
    torch.manual_seed(1)
    assert not first.unknown
    assert (
        asked(written(tmp_path, "# a comment\n\n" + MODEL).Block(), seed=1).key == first.key
    )  # other weights, other batch


def test_hooks_count_by_their_order_and_not_by_numbers_of_the_process(tmp_path: Path) -> None:
    def hooked(*hooks: Callable[..., Any]) -> str:
        model = written(tmp_path).Block()
        for hook in hooks:
            model.one.register_forward_hook(hook)
        return asked(model).key

    assert hooked(torch.relu, torch.tanh) == hooked(torch.relu, torch.tanh)
    assert len({hooked(torch.relu, torch.tanh), hooked(torch.tanh, torch.relu), hooked(torch.relu)}) == 3


def test_a_global_that_has_the_name_of_an_attribute_alone_changes_nothing(tmp_path: Path) -> None:
    first = asked(written(tmp_path, MODEL + "\n\ndef one():\n    return 0\n").Block())
    assert asked(written(tmp_path, MODEL + "\n\ndef one():\n    return 1\n").Block()).key == first.key


CHANGED = {
    "forward": (lambda m: m.replace("* self.mask", "+ self.mask"), None),
    "a global": (lambda m: m.replace("* helpers.FACTOR", "* WIDTH"), None),
    "a function it imports": (None, lambda h: h.replace("x + 1.0", "x + 2.0")),
    "a function that one calls": (None, lambda h: h.replace("leaky_relu(x, slope)", "leaky_relu(x, -slope)")),
    "a number of another module": (None, lambda h: h.replace("FACTOR = 2.0", "FACTOR = 3.0")),
}


@pytest.mark.parametrize("what", CHANGED)
def test_code_counts_wherever_it_is(what: str, tmp_path: Path) -> None:
    first = asked(written(tmp_path).Block())
    in_model, in_helpers = CHANGED[what]
    model, helpers = (
        MODEL if in_model is None else in_model(MODEL),
        HELPERS if in_helpers is None else in_helpers(HELPERS),
    )
    assert (model, helpers) != (MODEL, HELPERS)
    assert asked(written(tmp_path, model, helpers).Block()).parts["model"] != first.parts["model"]


def test_what_code_imports_when_it_runs_counts(tmp_path: Path) -> None:
    model = MODEL.replace("import {helpers} as helpers\n", "").replace(" * helpers.FACTOR", "")
    first = asked(written(tmp_path, model).Block())
    assert not first.unknown
    other = HELPERS.replace("x + 1.0", "x + 2.0")
    assert asked(written(tmp_path, model, other).Block()).parts["model"] != first.parts["model"]


def tied(model: Any) -> None:
    model.two.weight = model.one.weight


def equal(model: Any) -> None:
    model.two.weight = nn.Parameter(model.one.weight.detach().clone())


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda m: setattr(m, "slope", 0.2),
    "a constant": lambda m: m.table.add_(1),
    "a buffer that no state dict has": lambda m: m.mask.mul_(2),
    "a shape": lambda m: setattr(m, "one", nn.Linear(8, 8, bias=False)),
    "a dtype": lambda m: m.double(),
    "the mode": lambda m: m.eval(),
    "what is frozen": lambda m: m.one.weight.requires_grad_(False),
    "a hook": lambda m: m.one.register_forward_hook(lambda module, given, out: out * 2),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x: x * 2),
    "tied parameters": tied,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_model_holds_counts(what: str, tmp_path: Path) -> None:
    module = written(tmp_path)
    model = module.Block()
    CHANGES[what](model)
    assert asked(model).parts["model"] != asked(module.Block()).parts["model"]


def test_parameters_that_are_equal_are_not_tied(tmp_path: Path) -> None:
    module = written(tmp_path)
    one, other = module.Block(), module.Block()
    equal(one)
    assert asked(one).key == asked(other).key


ARGUMENTS: dict[str, dict[str, Any]] = {
    "loss_fn": {"loss_fn": smoothed(2.0)},
    "inputs": {"rows": 8},
    "cluster": {"cluster": autopar.ClusterSpec.local(4)},
    "options": {"options": autopar.Options(microbatches=2)},
    "update": {"optimizer": functools.partial(torch.optim.SGD, lr=0.2)},
    "buckets": {"buckets": {"0": {0: (4, 2)}, "1": {0: (4, 2)}}},
}


@pytest.mark.parametrize("part", ARGUMENTS)
def test_every_argument_counts(part: str, tmp_path: Path) -> None:
    model = written(tmp_path).Block()
    first, other = asked(model), asked(model, **ARGUMENTS[part])
    assert {name for name in first.parts if first.parts[name] != other.parts[name]} >= {part}
    assert first.key != other.key


def test_variables_of_the_environment_that_code_reads_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = HELPERS.replace("import torch", "import os\nimport torch", 1)
    helpers = helpers.replace("x + 1.0", 'x + float(os.environ.get("FP_SHIFT", "1"))')
    model = written(tmp_path, helpers=helpers).Block()
    first = asked(model)
    monkeypatch.setenv("FP_OTHER", "2")
    assert asked(model).key == first.key
    monkeypatch.setenv("FP_SHIFT", "2")
    assert asked(model).parts["model"] != first.parts["model"]


def test_the_numbers_of_example_batches_count_in_a_key_of_their_own(tmp_path: Path) -> None:
    model = written(tmp_path).Block()
    first, same, other = (request(model, seed=seed) for seed in (0, 0, 1))
    keys = [key_of_batches(one, fingerprint(one)) for one in (first, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert fingerprint(first).key == fingerprint(other).key


def test_what_cannot_be_seen_is_named(tmp_path: Path) -> None:
    model = written(tmp_path).Block()
    model.one.lock = threading.Lock()
    assert "model.one.lock is a _thread.lock" in asked(model).unknown


def test_a_library_is_known_by_its_files_and_autopar_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path).Block()
    first = asked(model)
    monkeypatch.setattr("autopar.script.fingerprint.versions", lambda: "another")
    assert asked(model).key != first.key
    torch.set_default_dtype(torch.float64)
    try:
        assert asked(model).parts["torch's defaults"] != first.parts["torch's defaults"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_request_of_a_plan_is_another(tmp_path: Path) -> None:
    own = request(written(tmp_path).Block())
    assert fingerprint(replace(own, targets=0)).key != fingerprint(own).key


def test_what_an_entry_trains_counts_by_name_and_the_numbers_of_its_module_do_not() -> None:
    def key(seed: int, trains: int, width: int = 3) -> str:
        torch.manual_seed(seed)
        layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, width), nn.Linear(width, 8)])
        update = functools.partial(torch.optim.SGD, lr=0.1)
        entry = autopar.Entry(module=nn.Sequential(*layers), train=True, optimizer=update, trains=layers[trains])
        return asked(layers[0], entries={"other": entry}).key

    assert key(0, 1) == key(1, 1)
    assert len({key(0, 1), key(0, 0), key(0, 1, width=5)}) == 3
