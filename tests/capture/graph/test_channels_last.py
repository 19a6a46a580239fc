"""Images whose channels lie together stay so in the emitted program, however the user says it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from tests.measure import measure_peak

LAST = torch.channels_last


class Images(nn.Module):
    """Two convolutions with what is usually around them. inside: the layout is asked for in forward."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            x = x.to(memory_format=LAST)
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.interpolate(self.second(x) + x, scale_factor=2.0)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Convolutions(TorchDispatchMode):
    """Notes whether the images that convolutions read have their channels together."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.together.append(args[0].is_contiguous(memory_format=LAST) and not args[0].is_contiguous())
        return func(*args, **(kwargs or {}))


def made(how: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, batch = Images(how == "inside"), (torch.randn(8, 8, 16, 16), torch.randint(0, 10, (8,)))
    if how in ("weights", "both"):
        model = model.to(memory_format=LAST)
    if how in ("inputs", "both"):
        batch = batch[0].to(memory_format=LAST), batch[1]
    return model, batch


def compiled(how: str, ranks: int = 1) -> tuple[autopar.Program, tuple[Tensor, Tensor]]:
    model, batch = made(how)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    cluster, options = autopar.ClusterSpec.local(ranks), autopar.Options(coupled="per-microbatch")
    return autopar.compile(model, cluster, batch, loss_fn=F.cross_entropy, optimizer=sgd, options=options), batch


@pytest.mark.parametrize("how", ["nowhere", "inputs", "weights", "both", "inside"])
def test_convolutions_read_images_as_the_user_lays_them(how: str) -> None:
    program, batch = compiled(how)

    def body(comm: Comm) -> list[bool]:
        session = program.in_process.session(comm, program.request.update, 0)
        with Convolutions() as seen:
            session.train_step(batch)
        return seen.together

    assert run_threads(1, {"dp": 1}, body, timeout_s=60) == [[how != "nowhere"] * 2]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["weights", "inside"])
def test_such_programs_compute_what_eager_does(how: str) -> None:
    program, _ = compiled(how, ranks=2)
    assert autopar.verify(program, *made(how)).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["weights", "inside", "both"])
def test_memory_is_not_more_than_is_promised(how: str) -> None:
    """Copies that a processor's pool makes of images whose channels lie apart are counted, and not made here."""
    program, batch = compiled(how)
    (measured,) = measure_peak(program, batch)
    assert measured <= program.predicted.peak_bytes + 256


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["weights", "inside"])
def test_a_program_says_it_once(how: str, tmp_path: Path) -> None:
    compiled(how)[0].save(tmp_path)
    said = (tmp_path / "stages" / "stage_0.py").read_text()
    assert said.count("memory_format=torch.channels_last") == 1
