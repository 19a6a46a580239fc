"""Whether two runs of a step compute the same, without a trace of either: the ops that reach torch's kernels are compared.

A run on fake tensors is recorded as lines, one an op: its arguments (tensors by the line that made them, those from outside by
what they are, numbers by their text), and whether autograd follows: grad mode, and which tensors require a gradient. Casts of
autocast are ops too. Tensors that hold values are compared by their bytes. Equal lines are equal graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

Line = tuple[Any, ...]


class Recorded(TorchDispatchMode):
    """Within the context the ops of one run are noted in `lines`; `described` tells what a result is."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._made: dict[int, tuple[Line, Tensor]] = {}
        self._given: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)  # a question, which computes nothing
        line = str(func), torch.is_grad_enabled(), *self.described((args, kwargs))
        result = func(*args, **kwargs)
        for i, value in enumerate(tree_flatten(result)[0]):
            if isinstance(value, Tensor):
                self._made[id(value)] = ("made", len(self.lines), i), value
        self.lines.append(line)
        return result

    def described(self, values: Any) -> tuple[Any, str]:
        """A description of arguments or results, such that equal ones of two runs are described alike."""
        leaves, structure = tree_flatten(values)
        return tuple(self._tensor(v) if isinstance(v, Tensor) else _text(v) for v in leaves), str(structure)

    def _tensor(self, value: Tensor) -> Line:
        made, _ = self._made.get(id(value), (None, value))
        if made is not None:
            return *made, value.requires_grad
        if isinstance(value, FakeTensor):
            self._given[id(value)] = value  # kept alive, so that no other tensor gets its id
            return "given", id(value), value.requires_grad
        with _disable_current_modes(), torch.no_grad():
            held = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return "held", value.dtype, tuple(value.shape), value.requires_grad, held


def _text(value: Any) -> tuple[type, str]:
    return type(value), repr(value)


def compute_the_same(runs: Sequence[Recorded], results: Sequence[Any]) -> bool:
    """Whether these recorded runs, with these results, are equal. The runs must be alive together."""
    one, other = runs
    return one.lines == other.lines and one.described(results[0]) == other.described(results[1])
