"""Models whose samples are independent, though an op of theirs seems to bring them together, train in microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CoupledError
from autopar.ir.call import OpCall, Operand
from autopar.ir.mesh import Mesh
from autopar.ir.types import TensorType
from autopar.passes.rules.book import RuleBook

BATCH, WIDTH, CODES = 8, 6, 5


class Net(nn.Module):
    """Two products around what a case does; a codebook beside them."""

    def __init__(self, f: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.f(self, self.first(x)))


def _nearest(net: Net, z: Tensor) -> Tensor:
    return (z.unsqueeze(-2) - net.codes).pow(2).sum(-1).argmin(-1)


def _indexed(net: Net, z: Tensor) -> Tensor:
    return z + net.codes[_nearest(net, z)]


def _indexed_columns(net: Net, z: Tensor) -> Tensor:
    return z + net.codes.t()[:, _nearest(net, z)].t()


def _selected(net: Net, z: Tensor) -> Tensor:
    return z + torch.index_select(net.codes, 0, _nearest(net, z))


def _gathered(net: Net, z: Tensor) -> Tensor:
    return z + net.codes.gather(0, _nearest(net, z).unsqueeze(1).expand(-1, WIDTH))


def _metric(z: Tensor) -> Tensor:
    return z.unsqueeze(-1) * z.unsqueeze(-2) + 3 * torch.eye(WIDTH, dtype=z.dtype)


def _solved(net: Net, z: Tensor) -> Tensor:
    return torch.linalg.solve(_metric(z), z)


def _inverted(net: Net, z: Tensor) -> Tensor:
    return torch.linalg.inv(_metric(z)).sum(-1) + torch.linalg.slogdet(_metric(z)).logabsdet.unsqueeze(-1)


def _by_cholesky(net: Net, z: Tensor) -> Tensor:
    root = torch.linalg.cholesky(_metric(z))
    return torch.cholesky_solve(z.unsqueeze(-1), root).squeeze(-1)


def _on_a_grid(align_corners: bool) -> Callable[[Net, Tensor], Tensor]:
    def run(net: Net, z: Tensor) -> Tensor:
        grid = F.affine_grid(z.view(-1, 2, 3), [len(z), 1, 1, 3], align_corners=align_corners)
        return grid.flatten(1)

    return run


CASES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "codes[index]": _indexed,
    "codes[:, index]": _indexed_columns,
    "index_select": _selected,
    "gather": _gathered,
    "solve": _solved,
    "inv, slogdet": _inverted,
    "cholesky": _by_cholesky,
    "affine_grid": _on_a_grid(False),
    "affine_grid of corners": _on_a_grid(True),
}


def _metric_of_weights(net: Net) -> Tensor:
    w = net.last.weight
    return w @ w.t() + 3 * torch.eye(WIDTH, dtype=w.dtype)


OF_WEIGHTS: dict[str, Callable[[Net], Tensor]] = {
    "diag": lambda net: torch.diag(net.codes[0]),
    "diagonal_scatter": lambda net: net.last.weight.diagonal_scatter(net.codes[0]),
    "rot90": lambda net: torch.rot90(net.last.weight),
    "slogdet": lambda net: net.last.weight * torch.linalg.slogdet(_metric_of_weights(net)).logabsdet,
    "solve": lambda net: torch.linalg.solve(_metric_of_weights(net), net.last.weight),
    "cholesky_solve": lambda net: torch.cholesky_solve(net.last.weight, torch.linalg.cholesky(_metric_of_weights(net))),
    "qr": lambda net: torch.linalg.qr(_metric_of_weights(net)).Q,
    "cross": lambda net: torch.linalg.cross(net.last.weight[:, :3], net.last.weight[:, 3:]).repeat(1, 2),
    "bilinear": lambda net: F.bilinear(net.last.weight, net.first.weight, net.first.weight.expand(WIDTH, -1, -1)),
    "sort": lambda net: net.last.weight.sort(0).values,
    "index_put": lambda net: net.last.weight.index_put((torch.tensor([0, 1]),), net.codes[:2]),
    "index_copy": lambda net: net.last.weight.index_copy(0, torch.tensor([0, 1]), net.codes[:2]),
    "scatter": lambda net: net.last.weight.scatter(0, torch.zeros(1, WIDTH, dtype=torch.int64), net.codes[:1]),
    "scatter of a number": lambda net: net.last.weight.scatter(0, torch.zeros(1, WIDTH, dtype=torch.int64), 0.0),
    "take": lambda net: net.last.weight.take(torch.arange(WIDTH * WIDTH).flip(0).view(WIDTH, WIDTH)),
    "trace": lambda net: net.last.weight * net.last.weight.trace(),
    "pixel_shuffle": lambda net: F.pixel_shuffle(net.last.weight.reshape(1, 4, 3, 3), 2)[0, 0],
    "xlogy": lambda net: torch.xlogy(net.last.weight, net.last.weight.abs() + 1),
    "stft": lambda net: torch.stft(
        net.last.weight.flatten(), 12, 6, window=torch.ones(12, dtype=net.last.weight.dtype), return_complex=True
    ).abs()[:WIDTH, :WIDTH],
    "gather of a number": lambda net: net.last.weight * net.codes[0].gather(0, torch.tensor(2)),
    "scatter_add of a number": lambda net: (
        net.last.weight * net.codes[0].scatter_add(0, torch.tensor(2), net.codes[1, 1])
    ),
    "windows of a number": lambda net: net.last.weight * net.codes[0, 0].unfold(0, 1, 1),
    "matrix_exp": lambda net: torch.matrix_exp(net.last.weight - net.last.weight.t()),
    "linspace": lambda net: net.last.weight * torch.linspace(net.codes[0, 0].detach(), 3.0, WIDTH, dtype=torch.float64),
    "number along its dim": lambda net: net.last.weight * net.codes[0, 0].sum(0).mean(-1),
    "similarity of vectors": lambda net: net.last.weight * F.cosine_similarity(net.codes[0], net.codes[1], 0),
    "loss of one row": lambda net: net.last.weight * F.multi_margin_loss(net.codes[0], torch.tensor(2)),
    "loss of one number": lambda net: net.last.weight * F.multi_margin_loss(net.codes[0, 0], torch.tensor(0)),
}


class Made(Net):
    """A product with a matrix that is made of weights alone, whose gradient is a sum over samples."""

    def __init__(self, make: Callable[[Net], Tensor]) -> None:
        super().__init__(lambda net, z: z @ make(net).t())


class Counting(nn.Module):
    """Counts of what a batch chooses, in a buffer of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("used", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.used += torch.bincount(y.argmax(-1), minlength=WIDTH)
        return y


class Tangent(nn.Module):
    """A derivative along a direction of inputs, by forward-mode differentiation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]


def compiled(model: nn.Module, batch: tuple[Tensor, ...], microbatches: int, **options: Any) -> autopar.Program:
    return autopar.compile(
        model,
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=F.mse_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        options=autopar.Options(mesh={"dp": 2}, microbatches=microbatches, **options),
    )


@pytest.mark.parametrize("name", CASES)
def test_microbatches_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Net(CASES[name]), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    program = compiled(model, batch, 2)
    assert program.plan.microbatches == 2
    result = autopar.verify(program, model, batch, steps=2)
    assert result.max_error <= 1e-9, result.errors


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_gradients_of_what_weights_alone_make_add_up(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Made(OF_WEIGHTS[name]), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    result = autopar.verify(compiled(model, batch, 2), model, batch, steps=2)
    assert result.max_error <= 1e-9, result.errors


@pytest.mark.parametrize("make", [Counting, Tangent])
def test_counts_and_tangents_of_microbatches_add_up(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = make(), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    result = autopar.verify(compiled(model, batch, 2), model, batch, steps=2)
    assert result.max_error <= 1e-9, result.errors


@pytest.mark.parametrize("name", ["codes[index]", "gather", "solve"])
def test_random_plans_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Net(CASES[name]), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    program = compiled(model, batch, 1)
    for seed in range(3):
        result = autopar.verify(program.with_plan(autopar.random_plan(program, seed)), model, batch, steps=2)
        assert result.max_error <= 1e-9, result.errors


def test_one_matrix_for_all_samples_on_the_right_is_not_cut_along_them() -> None:
    """B of (n, k) is one for each of the n matrices where k is their size, and else one for all of them."""

    def rule(right: tuple[int, ...]) -> str:
        a, b = TensorType((4, 4, 4), torch.float64), TensorType(right, torch.float64)
        out = (4, 4) if right == (4, 4) else (4, *right)
        types = (out, (4, 4, 4), (4, 4), (4,))
        arguments = {"A": Operand(0), "B": Operand(1), "left": True, "check_errors": False}
        call = OpCall("aten._linalg_solve_ex", arguments, (a, b), tuple(TensorType(s, torch.float64) for s in types))
        return ", ".join(RuleBook().rule(call).shardable)

    assert rule((4, 4)) == "d0"
    assert rule((4, 3)) == ""


def test_what_is_added_to_is_one_term_of_the_sum_of_all_ranks() -> None:
    x, index, source = (
        TensorType((5, 3), torch.float64),
        TensorType((8,), torch.int64),
        TensorType((8, 3), torch.float64),
    )
    call = OpCall(
        "aten.index_add",
        {"self": Operand(0), "dim": 0, "index": Operand(1), "source": Operand(2), "alpha": 1},
        (x, index, source),
        (x,),
    )
    rule, mesh = RuleBook().rule(call), Mesh.of(dp=2)
    specs = [str(rule.operand_spec(i, ("j",), mesh)) for i in range(3)]
    assert specs == ["[., .] ~sum(dp)", "[@dp]", "[@dp, .]"]
    assert str(rule.result_spec(0, ("j",), mesh)) == "[., .] ~sum(dp)"


class Counts(nn.Module):
    """A buffer of how often each code was near, in numbers that can be shared out among microbatches or in integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, CODES)
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(CODES, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.first(x)
        chosen = logits.argmax(-1)
        with torch.no_grad():
            self.counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=self.counts.dtype))
        return logits


def test_a_buffer_to_which_samples_are_added_has_all_of_them() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, CODES))
    model = Counts(torch.float32)
    result = autopar.verify(compiled(model, batch, 2), model, batch, steps=2)
    assert result.max_error <= 1e-9, result.errors


def test_integers_to_which_samples_are_added_cannot_be_shared_out() -> None:
    batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, CODES))
    with pytest.raises(CoupledError, match=r"index_add.* adds integers of the batch to others"):
        compiled(Counts(torch.int64), batch, 2)
