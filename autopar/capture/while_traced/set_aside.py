"""Parameters that torch.export does not see: those of blocks that are most likely like an earlier one.

A call that is like an earlier one is a single op (`alike.py`), for which it does not matter what its parameters are. Export
pays for each of its inputs many times over, therefore the parameters of all blocks but the first of a family are taken out of
the modules while it looks for inputs, and are back when forward runs. One that an op reads after all becomes the value of a
`parameter` node before all others, and in the end all of them are inputs of the graph as if they had never been away
(`autopar.capture.export.repeated`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from autopar.capture.while_traced.repeat_ops import PARAMETER


class SetAside:
    """The parameters set aside of a module whose parameters are fake. names: theirs, by id. is_lost: whether one was read
    where it cannot be a node, so that the step must be traced without parameters set aside."""

    def __init__(self, model: nn.Module, later: Sequence[nn.Module]) -> None:
        """later: blocks that are not the first of their family."""
        named = list(model.named_parameters(remove_duplicate=False))
        times = collections.Counter(id(parameter) for _, parameter in named)
        candidates = {
            id(parameter)
            for block in later
            for parameter in block.parameters()
            if times[id(parameter)] == 1 and type(parameter) is FakeTensor and parameter.requires_grad
        }
        self.order = [name for name, _ in named]
        self.tensors = {name: parameter for name, parameter in named if id(parameter) in candidates}
        self.names = {id(parameter): name for name, parameter in self.tensors.items()}
        self.is_lost = False
        self._places = [
            (table, name, parameter)
            for module in model.modules()
            if not isinstance(module, nn.RNNBase)
            for table in (module._parameters,)
            for name, parameter in table.items()
            if id(parameter) in candidates
        ]
        self._tracer: Any = None
        self._first: fx.Node | None = None

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within the context the modules have None in place of them."""
        for table, name, _ in self._places:
            table[name] = None
        try:
            yield
        finally:
            for table, name, parameter in self._places:
                table[name] = parameter

    @contextmanager
    def shown(self, tracer: Any) -> Iterator[None]:
        """Within the context, inside `hidden`, they are back, and known to the tracer of the step as soon as an op reads them."""
        self._tracer = tracer
        for table, name, parameter in self._places:
            table[name] = parameter
        try:
            yield
        finally:
            for table, name, _ in self._places:
                table[name] = None

    @contextmanager
    def read_as_nodes(self) -> Iterator[None]:
        """Within the context tracers take one that is an argument for a node."""
        plain = proxy_tensor.PythonKeyTracer.create_arg

        def create_arg(tracer: Any, value: Any) -> Any:
            if isinstance(value, Tensor) and id(value) in self.names:
                return self._node(tracer, value)
            return plain(tracer, value)

        with mock.patch.object(proxy_tensor.PythonKeyTracer, "create_arg", create_arg):
            yield

    def is_unread(self, tensor: Tensor) -> bool:
        """Whether the trace has no node of a tensor, which is one of them."""
        return id(tensor) in self.names and tensor not in self._tracer.tensor_tracker

    def _node(self, tracer: Any, value: Tensor) -> Any:
        """The node of one, made where it is read for the first time."""
        if tracer is not self._tracer:
            self.is_lost = True
            raise RuntimeError(
                f"the parameter {self.names[id(value)]} was set aside, and is read in a trace of its own"
            )
        if value not in tracer.tensor_tracker:
            graph: fx.Graph = tracer.graph
            self._first = self._first or next((n for n in graph.nodes if n.op != "placeholder"), None)
            with graph.inserting_before(self._first) if self._first is not None else graph.inserting_after():
                proxy = tracer.create_proxy("call_function", PARAMETER, (self.names[id(value)],), {})
            proxy.node.meta["val"] = value
            with torch._C.DisableTorchFunction():
                proxy_tensor.set_proxy_slot(value, tracer, proxy_tensor._ProxyTensor(proxy, None))
        return tracer.tensor_tracker[value].proxy.node
