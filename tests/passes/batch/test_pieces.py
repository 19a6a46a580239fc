"""Models that join several batches, or several views of one, run them through their layers at once and take them apart again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.differential.eager import LR, MOMENTUM, STEPS, difference, trained

ROWS, WIDTH = 8, 6
OPTIMIZER = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


class Net(nn.Module):
    """Two small networks and whatever a case does with them and several batches."""

    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        self.f = f

    def forward(self, *batches: Tensor) -> Tensor:
        return self.f(self, *batches)


def _two_views(net: Net, x: Tensor, u: Tensor) -> Tensor:
    """SimSiam: each view's prediction against the other's projection, which is held fixed."""
    z = net.body(torch.cat([x, u]))
    (z1, z2), (p1, p2) = z.detach().chunk(2), (z + net.head(z)).chunk(2)
    return -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())


def _domains(net: Net, x: Tensor, u: Tensor) -> Tensor:
    """Domain-adversarial training: a task for the first batch alone, and which batch a row is of."""
    z, rows = net.body(torch.cat([x, u])), x.shape[0]
    domains = torch.cat([torch.zeros(rows, 1, dtype=x.dtype), torch.ones(rows, 1, dtype=x.dtype)])
    return z[:rows].pow(2).mean() + F.binary_cross_entropy_with_logits(net.head(z), domains)


def _preferred(net: Net, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Direct preference optimization: chosen and rejected answers in one forward."""
    scores = net.body(torch.cat([chosen, rejected], 0)).log_softmax(-1).sum(-1)
    return -F.logsigmoid(scores[: chosen.shape[0]] - scores[chosen.shape[0] :]).mean()


def _three(net: Net, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    z, rows = net.body(torch.cat([anchor, near, far])), anchor.shape[0]
    return F.triplet_margin_loss(z[:rows], z[rows : 2 * rows], z[2 * rows :]) + z[rows:].pow(2).mean()


def _joined_twice(net: Net, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A batch that is joined to two that were joined: pieces of one size in operands of several."""
    z = net.body(torch.cat([torch.cat([a, b]), c]))
    first, second, third = z.view(3, a.shape[0], WIDTH)
    return (first * second - third).pow(2).mean() + net.head(z[a.shape[0] :].view(2, -1, WIDTH).sum(0)).pow(2).mean()


def _guided(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Guidance of a diffusion model: one batch twice."""
    with_it, without = net.body(x.repeat(2, 1)).split([x.shape[0], x.shape[0]])
    return F.mse_loss(with_it + 2 * (with_it - without.tanh()), y)


def _written(net: Net, x: Tensor, u: Tensor) -> Tensor:
    """Rows of one batch in the place of those that were joined."""
    return net.body(torch.cat([x, u]).slice_scatter(net.body(x), 0, 0, x.shape[0])).pow(3).mean()


def _in_pairs(net: Net, x: Tensor) -> Tensor:
    """A reward model: chosen and rejected answers take turns in the batch."""
    scores = net.head(net.body(torch.stack([x, x.sin()], 1).flatten(0, 1)))
    return -F.logsigmoid(scores[::2] - scores[1::2]).mean()


CASES = {
    "in pairs": (_in_pairs, 1),
    "two views": (_two_views, 2),
    "domains": (_domains, 2),
    "preferred": (_preferred, 2),
    "three": (_three, 3),
    "joined twice": (_joined_twice, 3),
    "guided": (_guided, 2),
    "written": (_written, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches=2": {"microbatches": 2},
    "microbatches=4": {"microbatches": 4},
    "pp=2": {"pp": 2, "microbatches": 2},
    "dp=2": {"mesh": {"dp": 2}},
}


@pytest.mark.few(9)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_joined_batches_train_as_in_eager(case: str, options: str) -> None:
    f, count = CASES[case]
    torch.manual_seed(0)
    model = Net(f).double()
    batches = [tuple(torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(count)) for _ in range(STEPS)]
    program = autopar.compile(
        copy.deepcopy(model),
        autopar.ClusterSpec.local(2),
        batches[0],
        optimizer=OPTIMIZER,
        options=autopar.Options(**OPTIONS[options]),
    )
    result = program.run(batches)
    ours = {f"loss {k}": loss.reshape(()).double() for k, loss in enumerate(result.losses)} | result.state
    assert difference(ours, trained(model, batches, None)) <= 1e-9


@pytest.mark.parametrize(
    "rows",
    [lambda z: z[1:9], lambda z: z[: ROWS + 4], lambda z: z[::2][:3], lambda z: torch.cat([z, z[:3]])],
    ids=["across both", "one and a half", "every second", "and three more"],
)
def test_rows_that_are_no_whole_batches_couple(rows: Callable[[Tensor], Tensor]) -> None:
    def f(net: Net, x: Tensor, u: Tensor) -> Tensor:
        return rows(net.body(torch.cat([x, u]))).pow(2).mean()

    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    with pytest.raises(autopar.CoupledError, match=r"test_pieces\.py:\d+"):
        autopar.compile(Net(f), autopar.ClusterSpec.local(2), batch, options=autopar.Options(microbatches=2))
