"""Writes that are replaced in the graph: the same graph as functionalization makes, and only where nothing else can see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.export import functional as functional_form
from autopar.capture.export.functional import functional, traced_step
from autopar.errors import CaptureError
from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import Forward, X, capture, squares, with_attributes


def _sum(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h += x
    return net.last(h)


def _several(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h += x
    h -= 2 * x
    h.mul_(0.5)
    F.relu(h, inplace=True)
    return net.last(h.view(2, -1, 8)).reshape(x.shape) + h


def _normalized(net: Net, x: Tensor) -> Tensor:
    weights, _ = net.first(x).topk(8)
    weights /= weights.sum(-1, keepdim=True)
    return net.last(weights)


def _shifted(net: Net, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape)
    h[..., 1:] = x[..., :-1].clone()
    h[..., 0] = 2
    h.masked_fill_(h == 2, 0.5)
    return net.last(net.first(h))


def _scattered(net: Net, x: Tensor) -> Tensor:
    best = net.first(x).topk(2).indices
    mask = torch.zeros_like(x)
    mask.scatter_(-1, best, 1)
    mask.scatter_(-1, best[..., :1], x[..., :1])
    return net.last(net.first(x) * mask)


def _counted(net: Net, x: Tensor) -> Tensor:
    net.count.add_(1)
    net.count.add_(2)
    return net.last(net.first(x)) * (net.count + 1)


def _batch_norm(net: Net, x: Tensor) -> Tensor:
    h = net.norm(net.first(x))
    h += x
    return net.last(F.relu(h, inplace=True))


def _viewed_before(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    flat = h.view(-1)
    h += x
    return net.last(h) * flat.view(h.shape)


def _chained_views(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.t()[1:].mul_(2)
    return net.last(h)


def _read_piece(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    piece = h[:, 1:]
    piece += 1
    return net.last(h) + piece.sum()


def _two_pieces(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    one, other = h[1:], h[:-1]
    one += 1
    other *= 3
    return net.last(h)


def _of_itself(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h += h
    return net.last(h)


def _of_its_view(net: Net, x: Tensor) -> Tensor:
    h = net.first(x).clone()
    h[:1].add_(h[1:2])
    return net.last(h)


def _passed_on(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    same = F.dropout(h, 0.5, False)
    same += x
    return net.last(h) + same


def _in_another_dtype(net: Net, x: Tensor) -> Tensor:
    h = x.detach().bfloat16() + 1
    h += x.detach().double()
    return net.last(net.first(x)) + h


def _without_gradient(net: Net, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape)
    with torch.no_grad():
        h += net.first(x)
    return net.last(x) + h


def _passed_on_without_dropping(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    same = F.dropout(h, 0.0, True)
    same += x
    return net.last(h) + same


def _reassigned(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.last(net.first(x)) * net.count


def _buffer_viewed(net: Net, x: Tensor) -> Tensor:
    seen = net.mean.view(2, 4)
    net.mean += x.detach().mean(0)
    return net.last(net.first(x)) + seen.reshape(-1)


def _buffer_returned(net: Net, x: Tensor) -> Tensor:
    net.mean[:4] += 1
    return net.last(net.first(x)) * net.mean.clone()


def _norm_used_twice(net: Net, x: Tensor) -> Tensor:
    return net.last(net.norm(net.norm(net.first(x))))


def _beside_detached(net: Net, x: Tensor) -> Tensor:
    """A detached view is read after the write, which it shows, and passes no gradient."""
    h = net.first(x)
    seen = h.detach()
    h[:, 1] += 2 * h[:, 0].detach()
    return net.last(h) + h + seen


REWRITTEN: list[Forward] = [_sum, _several, _normalized, _shifted, _scattered, _counted, _batch_norm]
LEFT: list[Forward] = [
    *(
        _viewed_before,
        _chained_views,
        _read_piece,
        _two_pieces,
        _of_itself,
        _of_its_view,
        _in_another_dtype,
        _without_gradient,
        _reassigned,
        _beside_detached,
    ),
    *(_buffer_viewed, _buffer_returned, _norm_used_twice, _passed_on, _passed_on_without_dropping),
]


def net(forward: Forward) -> Net:
    model = with_attributes(forward)
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mean", torch.ones(8))
    model.norm = nn.BatchNorm1d(8)
    return model


def both_ways(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, bool]:
    """The traced step rewritten here, the same without rewriting, and whether the first is left to functionalization."""
    model = net(forward)
    ours, writes = traced_step(model, [X])
    monkeypatch.setattr(functional_form, "without_writes", lambda exported: False)
    theirs, _ = traced_step(model, [X])
    return ours, functional(theirs, True), writes


def operations(exported: Any) -> tuple[set[Any], dict[str, Any]]:
    """The computation of a graph, without names and order of nodes: its operations, and the updates of its buffers."""
    described: dict[Any, Any] = {}
    for node in exported.graph.nodes:
        args = torch.fx.map_arg((node.args, node.kwargs), lambda read: described[read])
        described[node] = node.name if node.op == "placeholder" else str((node.target, args))
    results = exported.graph.output_node().args[0]
    specs = exported.graph_signature.output_specs
    outputs = {str(s.target): described[n] for s, n in zip(specs, results, strict=True)}
    return {described[n] for n in described if n.op == "call_function"}, outputs


@pytest.mark.parametrize("forward", REWRITTEN, ids=lambda f: f.__name__)
def test_a_rewritten_step_is_what_functionalization_makes_of_it(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, writes = both_ways(forward, monkeypatch)
    assert not writes
    assert operations(ours.run_decompositions({})) == operations(theirs)


@pytest.mark.parametrize("forward", LEFT, ids=lambda f: f.__name__)
def test_memory_that_something_else_sees_is_left_to_functionalization(forward: Forward) -> None:
    _, writes = traced_step(net(forward), [X])
    assert writes


@pytest.mark.few(4)
@pytest.mark.parametrize("forward", [*REWRITTEN, *LEFT], ids=lambda f: f.__name__)
def test_a_step_that_writes_trains_like_eager(forward: Forward) -> None:
    assert_equal_to_eager(net(forward), (X,), squares, steps=3, seeds=())


def _needed_operand(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    squared = h * h
    h += x
    return net.last(h) + squared


def _needed_result(net: Net, x: Tensor) -> Tensor:
    h = net.first(x).exp()
    h += x
    return net.last(h)


def _needed_between(net: Net, x: Tensor) -> Tensor:
    h = F.relu(net.first(x) + 1, inplace=True)
    h += x
    return net.last(h)


@pytest.mark.parametrize("forward", [_needed_operand, _needed_result, _needed_between], ids=lambda f: f.__name__)
def test_a_write_to_what_backward_needs_is_refused_as_in_eager(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        capture(net(forward))
