"""Branches on what forward makes of numbers alone go the way they go in eager; those on data are refused as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.equal import Net, assert_equal_to_eager, square
from tests.capture.nets import X, refusal, squares

SEQUENCES = torch.randn(4, 6, 8)
PADDED = torch.zeros(4, 6, dtype=torch.bool)
PADDED[1, 4:] = PADDED[2, 3:] = True
Forward = Callable[..., Tensor]


def _one_way(net: Any, x: Tensor, causal: bool) -> Tensor:
    return net.last(net.first(x)) if causal else net.first(x)


def _mask_in_place(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4).masked_fill_(torch.ones(4, 4).triu(1).bool(), 2.0).add_(1)
    return _one_way(net, x, bool(mask.sum() == 28))


def _written_through_a_view(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[0].fill_(1.0)
    return _one_way(net, x, bool(mask.sum() == 4))


def _written_by_index(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[0] = 1.0
    return _one_way(net, x, bool(mask.any()))


def _filled_with_data(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 8)
    mask.add_(x)
    return _one_way(net, x, bool(mask.any()))


def _drawn(net: Any, x: Tensor) -> Tensor:
    return _one_way(net, x, bool(torch.zeros(4).normal_().sum() > 0))


KNOWN: dict[str, Forward] = {
    "a comparison": lambda m, x: _one_way(m, x, bool((torch.ones(3, 3).tril() == torch.eye(3)).all())),
    "a number": lambda m, x: m.first(x) * torch.arange(5).sum().item(),
    "a size": lambda m, x: m.first(x)[:, : int(torch.full((2,), 3).max())],
    "written in place": _mask_in_place,
    "filled like the data": lambda m, x: _one_way(m, x, bool(x.new_ones(4, 4).triu(1).any())),
    "like it in dtype": lambda m, x: _one_way(m, x, bool((torch.full_like(x, 3.0) == 3).all())),
    "moved to where it is": lambda m, x: _one_way(m, x, bool(torch.eye(3).to(x.device).sum() == 3)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_branch_on_constants_goes_eagers_way(name: str) -> None:
    assert_equal_to_eager(Net(KNOWN[name]), (X,), squares)


@pytest.mark.parametrize("forward", [_written_through_a_view, _written_by_index, _filled_with_data, _drawn])
def test_what_was_written_to_in_parts_with_data_or_at_random_is_no_constant(forward: Forward) -> None:
    text = refusal(Net(forward), branches="refuse")
    assert "depends on the data" in text or "random number" in text
    assert f"in {forward.__name__}" in text


def _others(net: Any, x: Tensor) -> Tensor:
    """Similarities of rows, those with themselves left out."""
    y = net.last(net.first(x))
    similar = y @ y.T
    mask = torch.eye(len(x), dtype=torch.bool).to(x.device)
    return similar[~mask].view(len(x), -1).log_softmax(-1)


def _selected_of_selected(net: Any, x: Tensor) -> Tensor:
    labels = torch.arange(4).repeat(2)
    alike = (labels[None] == labels[:, None])[:, :4]
    y = net.last(net.first(x))[:, :4]
    columns = torch.arange(4) % 2 == 0
    return y[alike[: len(x)]].view(-1, 1) * y.masked_select(columns.expand(len(x), 4)).mean() + y[:, columns].sum()


def _none_selected(net: Any, x: Tensor) -> Tensor:
    y = net.last(net.first(x))
    return torch.cat([y, y[torch.zeros(len(x)).bool()]])


def _unread_beside_the_same(net: Any, x: Tensor) -> Tensor:
    torch.tensor([0, 2, 1]).add(1)
    return net.last(net.first(x))[:, torch.tensor([0, 2, 1])]


@pytest.mark.parametrize("forward", [_others, _selected_of_selected, _none_selected, _unread_beside_the_same])
def test_rows_that_a_constant_mask_selects_are_known(forward: Forward) -> None:
    assert_equal_to_eager(Net(forward), (X,), squares)


def _by_data(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(len(x)).bool()
    mask.logical_or_(x.sum(1) > 0)
    return net.first(x)[mask].view(-1, 2)


def test_a_mask_that_data_is_written_to_is_no_constant() -> None:
    assert_equal_to_eager(Net(_by_data), (X,), squares)


def _causal(size: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size)


def _layers(kind: Any, layers: int = 1) -> Any:
    return kind(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), layers)


TRANSFORMERS: dict[str, tuple[Forward, nn.Module]] = {
    "causal encoder": (lambda m, x, p: m.t(m.first(x), mask=_causal(6)), _layers(nn.TransformerEncoder)),
    "causal and padded encoder": (
        lambda m, x, p: m.t(m.first(x), mask=torch.ones(6, 6).triu(1).bool(), src_key_padding_mask=p),
        _layers(nn.TransformerEncoder, 2),
    ),
    "encoder and decoder": (
        lambda m, x, p: m.t(m.first(x), x, tgt_mask=_causal(6), src_key_padding_mask=p, memory_key_padding_mask=p),
        nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_masks_of_nn_transformer_need_no_option(name: str) -> None:
    forward, module = TRANSFORMERS[name]
    assert_equal_to_eager(Net(forward, t=module), (SEQUENCES, PADDED), square, ranks=4, seeds=(0, 1))
