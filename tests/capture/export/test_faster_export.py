"""Export that leaves work out gives the graph that torch gives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, fx, nn
from torch._export import utils as export_utils
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.export.faster_export import lean, of_functions
from autopar.capture.export.functional import functional, traced_step


class Scaled(nn.Module):
    """Layers of torch inside methods `forward`, a helper, a region without gradients and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.register_buffer("steps", torch.zeros(()))

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.layers(x) / (1 + self.scale(x))


def _described(graph: fx.Graph) -> list[tuple[str, ...]]:
    metas = ("stack_trace", "nn_module_stack", "torch_fn", "val")
    return [(n.name, str(n.target), str(n.args), *(str(n.meta.get(key)) for key in metas)) for n in graph.nodes]


def _export(around: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch) -> fx.Graph:
    monkeypatch.setattr("autopar.capture.export.functional.lean", around)
    with around():
        return functional(*traced_step(Scaled(), [torch.ones(2, 4)])).graph


def test_nodes_keep_the_arguments_stacks_and_modules_that_torch_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_torch = _export(lean, monkeypatch), _export(nullcontext, monkeypatch)
    assert any("in scale" not in text and "in forward" in text for _, _, _, text, *_ in _described(own))
    assert _described(own) == _described(of_torch)
    assert not any(n.meta.get("tensor_meta") for n in own.nodes)
    assert any(n.meta.get("tensor_meta") for n in of_torch.nodes)


def test_a_graph_that_was_not_compiled_runs_when_it_is_called() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with lean():
        exported = torch.export.export(model, (x,), strict=False)
    assert torch.equal(exported.module()(x), model(x))


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_afterwards_what_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with lean():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_trace_of_functions_is_the_same_and_leaves_modules_alone() -> None:
    layer, calls = nn.Linear(4, 4), []

    def run(x: Tensor) -> Tensor:
        calls.append(nn.Module.__call__)
        return layer(x).relu()

    own_call, x = nn.Module.__call__, torch.ones(2, 4)
    of_torch = make_fx(run)(x)
    with of_functions():
        own = make_fx(run)(x)
    assert calls[0] is not own_call
    assert calls[1] is own_call
    assert own.code == of_torch.code
    assert nn.Module.__call__ is own_call


def test_ops_are_asked_for_once_where_a_step_is_made_functional(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, of_torch = [], export_utils._materialize_cpp_cia_ops
    monkeypatch.setattr(export_utils, "_materialize_cpp_cia_ops", lambda: asked.append(of_torch()))
    with lean():
        torch.export.export(Scaled(), (torch.ones(2, 4),), strict=False).run_decompositions({})
    assert asked == [None]
