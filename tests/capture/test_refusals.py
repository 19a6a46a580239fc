"""What cannot be captured fails with the user's source line and the usual fix, never with a wrong program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import Net, compiled

X, IDS = torch.randn(4, 8), torch.randint(0, 8, (4, 6))


def _branch(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.sum() > 0:  # here
        return net.last(h)
    return h


def _tolist(net: Net, x: Tensor) -> Tensor:
    sizes = (x.sum(-1) > 0).sum(dim=-1, keepdim=True).tolist()  # here
    return net.first(x)[: sizes[0]]


def _item(net: Net, x: Tensor) -> Tensor:
    count = int((x > 0).sum().item())  # here
    return net.first(x)[:, :count]


def _nonzero(net: Net, x: Tensor) -> Tensor:
    rows = (x.sum(-1) > 0).nonzero().squeeze(-1)  # here
    return net.first(x[rows])


def _unique(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * torch.unique(x.round()).numel()  # here


def _loop(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    while h.norm() > 1:  # here
        h = h / 2
    return h


class Router(nn.Module):
    """Mixture of experts in the style of a hand-written loop: every expert takes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(choice == i)[0]  # here
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def marked_line(source: Any) -> int:
    lines, first = inspect.getsourcelines(source)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


def refusal(model: nn.Module, batch: tuple[Tensor, ...] = (X,)) -> str:
    with pytest.raises(autopar.CaptureError) as caught:
        compiled(model, batch, lambda out: out.sum())
    return str(caught.value)


@pytest.mark.parametrize("forward", [_branch, _tolist, _item, _nonzero, _unique, _loop])
def test_data_dependent_control_flow_and_shapes_name_the_line_and_the_fix(forward: Callable[..., Tensor]) -> None:
    message = refusal(Net(forward))
    assert re.search(rf"test_refusals\.py:{marked_line(forward)} in {forward.__name__}", message), message
    assert "depends on the data" in message
    assert "torch.where instead of if" in message


def test_data_dependent_expert_routing_names_the_line_and_the_static_form() -> None:
    message = refusal(Router())
    assert f"test_refusals.py:{marked_line(Router)} in forward" in message
    assert "@autopar.forward_of(TheModule)" in message


def test_data_dependence_inside_a_layer_of_torch_names_the_line_of_that_layer() -> None:
    message = refusal(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)))
    assert "batchnorm.py" in message
    assert "num_batches_tracked" in message


def test_a_refusal_prints_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    refusal(Net(_branch))
    assert capfd.readouterr().err == ""


def test_numpy_inside_forward_is_refused_with_the_line() -> None:
    model = Net(lambda net, x: net.first(x) * torch.from_numpy(np.sign(x.numpy())))
    assert re.search(r"test_refusals\.py:\d+ .* leaves torch for numpy", refusal(model))


def test_an_embedding_that_renormalizes_its_weight_is_refused_by_name() -> None:
    message = refusal(Net(lambda net, ids: net.e(ids), e=nn.Embedding(8, 8, max_norm=1.0)), (IDS,))
    assert "writes to the parameter e.weight" in message
    assert "max_norm" in message


def test_a_module_that_is_cast_in_forward_is_refused_unless_it_has_that_dtype() -> None:
    compiled(Net(lambda net, x: net.last.to(torch.float32)(net.first(x))), (X,), lambda out: out.sum())
    message = refusal(Net(lambda net, x: net.last.to(torch.float64)(net.first(x).double())))
    assert "casts the parameters of a module to torch.float64" in message
    assert "test_refusals.py" in message


def test_writing_to_an_input_is_refused_by_name() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y += 1
            return self.lin(x * y)

    with pytest.raises(autopar.CaptureError, match=r"writes to its input y in place.*clone"):
        compiled(Shift(), {"x": X, "y": torch.randn(4, 8)}, lambda out: out.sum())


def test_random_numbers_that_would_differ_between_ranks_are_refused_by_name() -> None:
    message = refusal(Net(lambda net, x: net.first(x)[torch.randperm(4)]))
    assert "aten.randperm" in message
    assert "differ from rank to rank" in message


def test_an_error_of_the_model_itself_keeps_its_words_and_its_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.first(x) @ net.first(x)  # here

    message = refusal(Net(forward))
    assert f"test_refusals.py:{marked_line(forward)}" in message


def test_the_model_is_as_before_after_a_refusal() -> None:
    model = Net(_branch)
    before = dict(model.named_parameters())
    refusal(model)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert F.linear(X, model.first.weight).shape == (4, 8)


def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat((self.cache, x.detach()))
            return self.lin(x)

    assert "replaces the buffer cache of shape (0, 8)" in refusal(Growing())
