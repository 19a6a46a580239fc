"""Options that torch has a setting of its own for: they are set where a program runs, and priced."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The settings of torch, which are the process's."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark


def compiled(cluster: autopar.ClusterSpec, width: int = 1024, rows: int = 64, **options: object) -> autopar.Program:
    batch = torch.ones(rows, width), torch.ones(rows, width)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return autopar.compile(
        model, cluster, batch, loss_fn=nn.functional.mse_loss, optimizer=sgd, options=autopar.Options(**options)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_settings_are_those_of_the_process_that_runs_the_program(precision: str, tmp_path: Path) -> None:
    program = compiled(autopar.ClusterSpec.local(1), matmul_precision=precision, cudnn_benchmark=True)
    batch = torch.ones(64, 1024), torch.ones(64, 1024)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("highest", False)
    program.run(batch, steps=1)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == (precision, True)
    program.save(tmp_path)
    told = json.loads((tmp_path / "manifest.json").read_text())
    assert (told["matmul_precision"], told["cudnn_benchmark"]) == (precision, True)


def test_what_nobody_asked_for_stays_as_it_is() -> None:
    torch.set_float32_matmul_precision("high")
    compiled(autopar.ClusterSpec.local(1)).run((torch.ones(64, 1024), torch.ones(64, 1024)), steps=1)
    assert torch.get_float32_matmul_precision() == "high"


def test_products_of_float32_are_priced_as_tf32_where_that_is_asked_for() -> None:
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device="h100")
    with torch.device("meta"):  # so large that no host launches it more slowly
        exact, fast = (compiled(cluster, 8192, 8192, **asked) for asked in ({}, {"matmul_precision": "high"}))
    assert fast.predicted.step_time_s < exact.predicted.step_time_s
    assert "priced as TF32 on devices that have it" in fast.report()
    assert "TF32" not in exact.report()


def test_a_precision_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(autopar.InputError, match="matmul_precision must be"):
        autopar.Options(matmul_precision="tf32")
