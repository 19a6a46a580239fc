"""`verify` computes everything in float64 or complex128, says ok of what is ok, and of nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.proof.compare import compare
from tests.capture.equal import SGD
from tests.proof.test_verify import with_stage

LOCAL = autopar.ClusterSpec.local(2)
DATA = autopar.Options(strategy="dp", mesh={"dp": 2})


def compiled(model: nn.Module, batch: Any, optimizer: Any = SGD, options: autopar.Options = DATA) -> autopar.Program:
    loss = F.cross_entropy if batch[-1].dtype == torch.int64 else F.mse_loss
    return autopar.compile(model, LOCAL, batch, loss_fn=loss, optimizer=optimizer, options=options)


# --- an alarm is an alarm: rounding that a step amplifies is none ------------------------------------------------------------


class BiasBeforeNorm(nn.Module):
    """The gradient of `inner.bias` is zero but for rounding, of which Adam makes updates of full size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)).tanh())


ADAM = functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-14)
ROWS = (torch.randn(8, 8), torch.arange(8))


def test_an_update_made_of_rounding_is_no_alarm_and_a_mistake_beside_it_is() -> None:
    torch.manual_seed(0)
    model = BiasBeforeNorm()
    program = compiled(model, ROWS, ADAM)
    assert autopar.verify(program, model, ROWS).ok
    stage = program.stages[0]
    reduced = [name for name, p in stage.parameters.items() if p.reduce and name.endswith("weight")]
    assert reduced
    for name in reduced:
        parameters = {**stage.parameters, name: replace(stage.parameters[name], reduce=())}
        result = autopar.verify(with_stage(program, replace(stage, parameters=parameters)), model, ROWS)
        assert not result.errors[f"grad/{name}"] <= 0.01
        assert not result.errors[f"param/{name}"] <= 1e-6


# --- ok is ok: everything counts at the scale of what the step makes of it -------------------------------------------------


def values(kind: str, **tensors: Tensor) -> dict[str, Tensor]:
    return {f"{kind}/{name}": x for name, x in tensors.items()}


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("share", [0.0, 0.5, 1 + 1e-6])
def test_an_update_that_is_missing_or_halved_is_as_wrong_as_it_is_large(size: float, share: float) -> None:
    start, step = torch.randn(8).double(), torch.randn(8).double() * size
    reference = values("param", a=start + step, b=torch.ones(2).double() * 10)
    errors = compare(values("param", a=start + share * step, b=torch.ones(2).double() * 10), reference, {"a": start})
    assert errors["param/a"] == pytest.approx(abs(1 - share), rel=1e-3)


def test_an_update_that_is_missing_is_an_alarm_even_where_it_is_a_billionth_of_the_largest_parameter() -> None:
    start = torch.randn(8).double()
    reference = values("param", a=start + 1e-8, b=torch.ones(2).double() * 10)
    assert compare(values("param", a=start, b=reference["param/b"]), reference, {"a": start})["param/a"] > 1e-5


def test_a_small_gradient_is_not_measured_against_large_ones() -> None:
    reference = values("grad", a=torch.full((2,), 1e-7).double(), b=torch.ones(2).double())
    halved = values("grad", a=torch.full((2,), 5e-8).double(), b=torch.ones(2).double())
    assert compare(halved, reference)["grad/a"] > 1e-3


def test_noise_excuses_rounding_and_nothing_of_the_size_of_a_contribution() -> None:
    start, reference = {"a": torch.zeros(2).double()}, values("param", a=torch.tensor([1e-2, -1e-2]).double())
    still = values("param", a=reference["param/a"] * (1 + 1e-12))
    loud = values("param", a=-reference["param/a"])
    halved = values("param", a=reference["param/a"] / 2)
    assert compare(halved, reference, start, [still])["param/a"] > 0.1
    assert compare(halved, reference, start, [still, loud])["param/a"] < 1e-9
    gradients = {name.replace("param", "grad"): x for name, x in (loud | reference).items()}
    noise = [{"grad/a": -gradients["grad/a"]}]
    assert compare({"grad/a": gradients["grad/a"] / 2}, gradients, noise=noise)["grad/a"] > 0.1


def test_a_number_of_another_sort_is_infinitely_wrong() -> None:
    one = torch.ones(2)
    assert compare({"output/0": one}, {"output/0": one > 0})["output/0"] == float("inf")
    assert compare({"output/0": one}, {"output/0": one.to(torch.complex64)})["output/0"] == float("inf")


# --- everything is in double precision ---------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A Fourier neural operator: real transforms, complex weights, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)
        self.first = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.complex64) * 0.2)
        self.second = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.complex64) * 0.2)

    def mix(self, x: Tensor, weight: Tensor) -> Tensor:
        kept = torch.zeros(*x.shape[:2], x.shape[-1] // 2 + 1, dtype=torch.complex64)
        kept[:, :, :4] = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[:, :, :4], weight)
        return torch.fft.irfft(kept, n=x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.mix(self.up(x).transpose(1, 2), self.first))
        return self.down(self.mix(x, self.second).transpose(1, 2))


class Rotary(nn.Module):
    """A complex table that every block reads, and casts that would round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(16, 8),
            nn.ModuleList(Turned() for _ in range(2)),
            nn.Linear(8, 4),
        )
        angles = torch.outer(torch.arange(6).float(), 1 / 100 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("table", torch.polar(torch.ones(6, 4), angles), persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        x, table = self.embed(index), self.table[: index.shape[1]]
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.query(x).float().unflatten(-1, (4, 2))) * table
        floor = torch.finfo(x.dtype).eps
        return x + self.out(torch.view_as_real(pairs).flatten(2).type_as(x)).clamp_min(floor)


PIPELINE = autopar.Options(mesh={"pp": 2})
DOUBLE = [
    (Spectral, (torch.randn(4, 12, 3), torch.randn(4, 12, 1)), DATA),
    (Rotary, (torch.randint(0, 16, (4, 6)), torch.randn(4, 6, 4)), DATA),
    (Rotary, (torch.randint(0, 16, (4, 6)), torch.randn(4, 6, 4)), PIPELINE),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("make", "batch", "options"), DOUBLE, ids=["spectral", "rotary", "rotary in stages"])
def test_nothing_is_left_in_single_precision(make: Any, batch: Any, options: autopar.Options) -> None:
    torch.manual_seed(0)
    model = make()
    assert autopar.verify(compiled(model, batch, options=options), model, batch).max_error < 1e-11
