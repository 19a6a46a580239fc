"""A U-Net on a batch smaller than the ranks: every rank holds a part of the image, and all is as on one device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from tests.measure import measure_peak
from tests.warm import torchrun

Tensor = torch.Tensor
TOLERANCE = 1e-9


class Block(nn.Module):
    def __init__(self, before: int, after: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(2, after) if norm == "group" else nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, padding_mode="zeros")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.norm(self.first(x))))


class UNet(nn.Module):
    """One level down and up, with a skip. x: (n, 3, h, w), y: (n, 2, h, w); gives the loss."""

    def __init__(self, c: int, norm: str, down: str, up: str) -> None:
        super().__init__()
        downs = {"max": nn.MaxPool2d(3, 2, 1), "average": nn.AvgPool2d(2), "strided": nn.Conv2d(c, c, 3, 2, 1)}
        ups = {"transposed": nn.ConvTranspose2d(2 * c, 2 * c, 4, 2, 1)}
        self.down = downs[down]
        self.up = ups[up] if up in ups else nn.Upsample(scale_factor=2, mode=up)
        self.left, self.bottom, self.right = Block(3, c, norm), Block(c, 2 * c, norm), Block(3 * c, c, norm)
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.left(x)
        up = self.up(self.bottom(self.down(left)))
        return F.mse_loss(self.head(self.right(torch.cat([left, up], 1))), y)


FORMS = {
    "group norm, max pool, bilinear": ("group", "max", "bilinear"),
    "batch norm, strided, transposed": ("batch", "strided", "transposed"),
    "group norm, average pool, bicubic": ("group", "average", "bicubic"),
    "batch norm, max pool, nearest": ("batch", "max", "nearest"),
}
every_form = pytest.mark.parametrize("form", FORMS)


def images(samples: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    return draw(samples, 3, size, size), draw(samples, 2, size, size)


@functools.cache
def compiled(form: str, ranks: int, samples: int, size: int, axis: str = "") -> autopar.ParallelProgram:
    torch.manual_seed(1)
    options = autopar.Options(pp=1, mesh={axis: ranks} if axis else None)
    cluster, optimizer = autopar.ClusterSpec.local(ranks), functools.partial(torch.optim.SGD, lr=0.1)
    return autopar.compile(UNet(8, *FORMS[form]), cluster, images(samples, size), optimizer=optimizer, options=options)


def choices(program: autopar.ParallelProgram, of: str = "") -> Iterator[str]:
    """The choices of the axes in ops of this name."""
    for stage in program.plan.stages:
        for template in stage.templates.values():
            for name, strategy in template.strategies.items():
                if name.startswith(of):
                    yield from strategy


def equals_one_device(program: autopar.ParallelProgram, form: str, batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(1)
    result = autopar.verify(program, UNet(8, *FORMS[form]), batch)
    assert max(result.errors.values()) <= TOLERANCE, result


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_image_on_several_ranks_is_cut_by_the_search_itself(form: str, ranks: int) -> None:
    program = compiled(form, ranks, 1, 128, "sp" if ranks == 4 else "")
    assert set(choices(program, "conv")) & {"+h2+y2", "+h3+y3"}, program.report()
    assert "rt.along(" in program.source(0)
    equals_one_device(program, form, images(1, 128))
    for measured, predicted in zip(measure_peak(program, images(1, 128)), program.account.peaks * ranks, strict=False):
        assert 0.98 * measured <= predicted <= 1.05 * measured


@pytest.mark.slow
def test_two_images_on_four_ranks_are_each_cut_in_two() -> None:
    form = "group norm, max pool, bilinear"
    program = compiled(form, 4, 2, 128)
    assert len(program.plan.stages[0].mesh.axes) == 2
    assert {"n", "+h3+y3"} <= {*choices(program, "conv")} or {"n", "+h2+y2"} <= {*choices(program, "conv")}
    equals_one_device(program, form, images(2, 128))


def carried(form: str, ranks: int, seeds: range) -> int:
    """How often random plans carry an image dim; each is verified."""
    program, count = compiled(form, ranks, 1, 16), 0
    for seed in seeds:
        plan = autopar.random_plan(program, seed, pp=1)
        changed = program.with_plan(plan)
        count += sum(choice.startswith("+") for choice in choices(changed))
        equals_one_device(changed, form, images(1, 16))
    return count


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans_that_cut_images_equal_one_device(form: str, ranks: int) -> None:
    assert carried(form, ranks, range(4)) > 0


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_random_plans_that_cut_images_equal_one_device(form: str, ranks: int) -> None:
    assert carried(form, ranks, range(100, 160)) > 60


@pytest.mark.slow
def test_processes_exchange_rows_as_threads_do(tmp_path: Path) -> None:
    program, batch = compiled("batch norm, strided, transposed", 2, 1, 128), images(1, 128)
    directory = program.save(tmp_path / "program")
    torch.save(batch, directory / "batch.pt")
    (directory / "data.py").write_text("import torch\ndef batches():\n    yield from [torch.load('batch.pt')] * 3\n")
    done = torchrun(2, "run.py", "--data", "data.py:batches", "--steps", 3, cwd=directory)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [float(line.split("loss ")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert said == pytest.approx([t.item() for t in program.run([batch] * 3)], abs=1e-5)
