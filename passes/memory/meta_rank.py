"""A rank on which the calls that lines are (`autopar.codegen.runtime_call`) are made over tensors without data."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch

from autopar.codegen.runtime_call import RuntimeCall
from autopar.ir.lines import Ref, Site
from autopar.ir.mesh import Extent
from autopar.ops.registry import AlongAxis, Offset
from autopar.ops.runtime_modules import RUNTIME_MODULES
from autopar.passes.played.meta_comm import MetaComm
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.guards import Guards

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_MODULES: dict[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "user_ops": torch.ops.autopar_ops,
    **RUNTIME_MODULES,
}


class MetaRank:
    """The part of `rt` that a line may ask for, on meta tensors. rank: by default the last. asked_mesh: whether anybody asked for
    what there is of the mesh, as whoever sends a message or wants to know its place does."""

    device = torch.device("meta")

    def __init__(self, mesh: Mapping[str, int], rank: int | None = None) -> None:
        self._comm = MetaComm(mesh, rank)
        self.guards = Guards()
        self.asked_mesh = False

    @property
    def comm(self) -> MetaComm:
        self.asked_mesh = True
        return self._comm

    @property
    def asked_index(self) -> bool:
        """Whether anybody asked where the rank is along an axis."""
        return self._comm.asked_index

    def listen(self) -> None:
        """Forget what was asked so far."""
        self._comm.asked_index = self.asked_mesh = False

    def key(self, call: int, site: int) -> int:
        return 1

    def along(self, axis: str, *inner: str) -> Along:
        return Along(self.comm, axis, *inner)

    def result(self, call: RuntimeCall, values: Mapping[str, Any]) -> Any:
        """The result of a call with these values by name."""
        args = [self._argument(x, values) for x in call.args]
        kwargs = {name: self._argument(x, values) for name, x in call.kwargs.items()}
        if call.function in _OPERATORS:
            return functools.reduce(_OPERATORS[call.function], args) if len(args) > 1 else operator.neg(args[0])
        owner, _, name = call.function.partition(".")
        if not owner:
            return getattr(args[0], name)(*args[1:], **kwargs)
        return operator.attrgetter(name)(self if owner == "rt" else _MODULES[owner])(*args, **kwargs)

    def _argument(self, x: Any, values: Mapping[str, Any]) -> Any:
        match x:
            case Ref(name):
                return values[name]
            case RuntimeCall():
                return self.result(x, values)
            case Offset(axes, _, start, size) if size:
                return self.comm.block_start(size, axes) + start
            case Extent():
                return self.comm.block_size(*x.told)
            case Offset(axes, chunk, start):
                return self.comm.axis_index(axes[0] if len(axes) == 1 else axes) * chunk + start
            case AlongAxis(axes):
                return self.along(*axes)
            case Site(number):
                return self.key(0, number)
            case torch.device():
                return self.device
            case list():
                return [self._argument(one, values) for one in x]
            case tuple():
                return tuple(self._argument(one, values) for one in x)
        return x
