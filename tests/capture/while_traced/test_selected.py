"""Rows that a mask selects: sums, means and losses of them equal eager, everything else is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import InputError
from tests.capture.equal import Net, assert_equal_to_eager, square
from tests.capture.nets import capture, refusal

X = torch.randn(4, 6, 8)
LABELS = torch.randint(0, 8, (4, 6))
MASK = torch.zeros(4, 6, dtype=torch.bool)
MASK[0, 2:] = MASK[2] = MASK[3, 1] = True
BATCH = (X, MASK, LABELS)
Forward = Callable[..., Tensor]
USES: dict[str, Forward] = {
    "sum": lambda m, x, k, t: m.first(x)[k].sum(),
    "sum of rows": lambda m, x, k, t: square(m.first(x)[k].sum(0)),
    "mean": lambda m, x, k, t: m.first(x)[k].mean(),
    "mean of rows": lambda m, x, k, t: square(torch.mean(m.first(x)[k], 0)),
    "of single elements": lambda m, x, k, t: m.first(x).square().mean(-1).masked_select(k).mean(),
    "a mask of samples": lambda m, x, k, t: m.first(x)[k[:, 2]].mean(),
    "cross-entropy": lambda m, x, k, t: F.cross_entropy(m.first(x)[k], t[k], label_smoothing=0.1),
    "cross-entropy, sum": lambda m, x, k, t: F.cross_entropy(
        m.first(x)[k], t[k], ignore_index=2, reduction="sum", weight=torch.arange(1.0, 9.0)
    ),
    "infinite where it is not selected": lambda m, x, k, t: m.first(x).masked_fill(~k[..., None], torch.inf)[k].mean(),
}
REFUSED: dict[str, tuple[Forward, str]] = {
    "product": (lambda m, x, k, t: (m.first(x)[k] * 2).sum(), "__mul__"),
    "layer": (lambda m, x, k, t: m.last(m.first(x)[k]).sum(), "linear"),
    "shape": (lambda m, x, k, t: m.first(x)[k].shape[0] * x.sum(), "shape"),
    "sum over features": (lambda m, x, k, t: m.first(x)[k].sum(-1).mean(), "sum over dim -1"),
    "other mask": (lambda m, x, k, t: F.cross_entropy(m.first(x)[k], t[t > 2]), "one and the same mask"),
    "per row": (lambda m, x, k, t: F.cross_entropy(m.first(x)[k], t[k], reduction="none").sum(), "every row"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", USES)
def test_a_use_of_selected_rows_equals_eager(name: str) -> None:
    assert_equal_to_eager(Net(USES[name]), BATCH, ranks=4, seeds=(0, 1))


@pytest.mark.parametrize("name", REFUSED)
def test_what_else_is_asked_of_them_is_named_with_its_line(name: str) -> None:
    forward, what = REFUSED[name]
    text = refusal(Net(forward), BATCH, None)
    assert what in text
    assert "test_selected.py" in text
    assert "torch.where(mask, x, 0)" in text


def test_they_are_no_output() -> None:
    model: Any = Net(lambda m, x, k: (m.first(x)[k], x)).eval()
    with pytest.raises(InputError, match="fixed shape"):
        capture(model, (X, MASK), None)
