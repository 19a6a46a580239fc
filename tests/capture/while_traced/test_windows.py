"""`as_strided` becomes slices and windows of the same elements, and is refused where there are none."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from autopar.capture.while_traced.windows import as_strided
from autopar.errors import CaptureError
from tests.capture.equal import Net, assert_equal_to_eager, square
from tests.capture.nets import refusal


def _tensor(draw: random.Random) -> Tensor:
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    if draw.random() < 0.5:
        x = x.permute(draw.sample(range(x.ndim), x.ndim))
    if draw.random() < 0.3:
        dim = draw.randrange(x.ndim)
        start = draw.randrange(x.shape[dim])
        x = x.narrow(dim, start, draw.randint(1, x.shape[dim] - start))
    return x.unsqueeze(0).expand(2, *x.shape) if draw.random() < 0.2 else x


def test_every_view_that_is_named_is_that_of_torch() -> None:
    """The same elements, in the same memory: shapes, values, strides and places are torch's."""
    draw = random.Random(0)
    named = 0
    for _ in range(2000):
        x = _tensor(draw)
        strides = [draw.choice(x.stride()) * draw.choice([0, 1, 1, 1, 2, 3]) for _ in range(draw.randint(1, 4))]
        sizes = [draw.randint(1, 4) for _ in strides]
        offset = draw.choice([None, x.storage_offset() + draw.randint(0, 5)])
        try:
            expected = x.as_strided(sizes, strides, offset)
            view = as_strided(x, sizes, strides, offset)
        except (RuntimeError, CaptureError):
            continue
        assert torch.equal(view, expected)
        assert view.data_ptr() == expected.data_ptr()
        assert [s for n, s in zip(sizes, view.stride(), strict=True) if n > 1] == [
            s for n, s in zip(sizes, strides, strict=True) if n > 1
        ]
        named += 1
    assert named > 500


def _chunks(net: Net, x: Tensor) -> Tensor:
    """Overlapping chunks of a sequence, as Longformer has them."""
    x = net.first(x).view(4, 2, 4, 8)
    sizes, strides = list(x.shape), list(x.stride())
    sizes[1], strides[1] = sizes[1] * 2 - 1, strides[1] // 2
    return net.last(x.as_strided(sizes, strides))


def _diagonal(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return torch.as_strided(h, size=(4, 8), stride=(64, 9)) * net.last(h[:, 0])


def _transposed(net: Net, x: Tensor) -> Tensor:
    h = net.first(x).view(-1, 2, 4).transpose(0, 1)
    return h.as_strided((2, h.shape[1] - 1, 2, 4), (4, 8, 8, 1)).cos()


def _written(net: Net, x: Tensor) -> Tensor:
    h = net.first(x) * 2
    h.as_strided((4, 8), (64, 9)).mul_(3.0)
    return net.last(h)


@pytest.mark.parametrize("f", [_chunks, _diagonal, _transposed, _written])
def test_a_model_that_reads_windows_is_equal_to_eager(f: object) -> None:
    torch.manual_seed(0)
    assert_equal_to_eager(Net(f), (torch.randn(4, 8, 8),), square)  # type: ignore[arg-type]


def test_elements_that_are_no_windows_are_refused_with_the_line() -> None:
    def across_rows(net: Net, x: Tensor) -> Tensor:
        return net.first(x)[:, :4].as_strided((3, 4), (7, 1))

    text = refusal(Net(across_rows))
    assert "in across_rows: `return net.first(x)[:, :4].as_strided((3, 4), (7, 1))`" in text
    assert "unfold" in text
