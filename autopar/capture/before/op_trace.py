"""Whether two runs of a step compute the same, without a trace of either: the ops that reach torch's kernels are compared.

A run on fake tensors is recorded as lines, one an op: its arguments (tensors by the line that made them, those from outside by
what they are, numbers by their text), and whether autograd follows: grad mode, and which tensors require a gradient. Casts of
autocast are ops too. Tensors that hold values are compared by their bytes. Equal lines are equal graphs.

With `Constants`, what ops make of numbers and unwritten buffers alone is computed and compared by its bytes too, and these ops
are no lines. So a step that builds a mask and keeps it is equal to the next one, which finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

Line = tuple[Any, ...]
_BY_SHAPE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Ops that read the shape and dtype of their operand alone."""


class Unclear(Exception):
    """A constant is written to in a way that leaves open what later steps find."""


@dataclass
class Constants:
    """Values of fake tensors that are the same in every step. buffers: values of the model's, by id of the fake one; earlier: the
    memory of constants that an earlier run made."""

    buffers: dict[int, Tensor] = field(default_factory=dict)
    _values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _read: dict[int, Tensor] = field(default_factory=dict)
    _earlier: frozenset[int] = frozenset()

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor; None for one that is no constant."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach()
        if id(tensor) in self._values:
            return self._values[id(tensor)][1]
        if id(tensor) in self.buffers and id(tensor) not in self._read:
            with _disable_current_modes(), torch.no_grad():
                self._read[id(tensor)] = self.buffers[id(tensor)].detach().cpu().clone()
        return self._read.get(id(tensor))

    def see(self, func: Any, args: Any, kwargs: Any) -> None:
        """A buffer that an op writes to, and that nothing read as a constant, is none."""
        statistics = [t for t in args if isinstance(t, Tensor)] if "batch_norm" in str(func) else []
        for tensor in (*_written(func, args, kwargs), *statistics):
            if id(tensor) not in self._read:
                self.buffers.pop(id(tensor), None)

    def end_run(self) -> None:
        """From now on nothing is written to constants that were made until now."""
        self._earlier = frozenset(_memory(value) for _, value in self._values.values())

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Note what an op gives, if that is a constant. Raises Unclear."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        written = _written(func, args, kwargs)
        with _disable_current_modes(), torch.no_grad():
            known = None if torch.Tag.nondeterministic_seeded in func.tags else self._known(func, tensors)
            if known is None or not results or any(t.requires_grad for t in results):
                self._forget(written)
                return False
            if any(self.value(t) is not known[id(t)] or _memory(known[id(t)]) in self._fixed() for t in written):
                raise Unclear
            args, kwargs = tree_map_only(Tensor, lambda t: known[id(t)], (args, kwargs))
            if "device" in kwargs or any(value.is_meta for value in known.values()):
                kwargs = {**kwargs, "device": torch.device("cpu")}
            values = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            if func.overloadpacket.__name__ in ("empty", "empty_strided", "empty_like", "new_empty"):
                values[0].zero_()
        for one, value in zip(results, values, strict=True):
            self._values[id(one)] = one, value
        return True

    def _known(self, func: Any, tensors: Sequence[Tensor]) -> dict[int, Tensor] | None:
        """The values of operands by id, or their shape alone where that is enough."""
        if func.overloadpacket in _BY_SHAPE:
            return {id(t): torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors}
        values = {id(t): self.value(t) for t in tensors}
        known = {key: value for key, value in values.items() if value is not None}
        return known if len(known) == len(values) else None

    def _fixed(self) -> frozenset[int]:
        return self._earlier | {_memory(value) for value in self._read.values()}

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Raises Unclear where something else than constants is written to one."""
        if any(id(t) in self._values or id(t) in self._read or not isinstance(t, FakeTensor) for t in written):
            raise Unclear


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an op writes to."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    marked = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in marked for t in tree_leaves(named.get(name)) if isinstance(t, Tensor)]


class Recorded(TorchDispatchMode):
    """Within the context the ops of one run are noted in `lines`; `described` tells what a result is. constants: those of two
    runs that are compared without them."""

    def __init__(self, constants: Constants | None = None) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.constants = constants
        self._made: dict[int, tuple[Line, Tensor]] = {}
        self._given: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)  # a question, which computes nothing
        if self.constants is not None:
            self.constants.see(func, args, kwargs)
        line = str(func), torch.is_grad_enabled(), *self.described((args, kwargs))
        result = func(*args, **kwargs)
        if self.constants is not None and self.constants.computed(func, args, kwargs, result):
            return result
        for i, value in enumerate(tree_flatten(result)[0]):
            if isinstance(value, Tensor):
                self._made[id(value)] = ("made", len(self.lines), i), value
        self.lines.append(line)
        return result

    def described(self, values: Any) -> tuple[Any, str]:
        """A description of arguments or results, such that equal ones of two runs are described alike."""
        leaves, structure = tree_flatten(values)
        return tuple(self._tensor(v) if isinstance(v, Tensor) else _text(v) for v in leaves), str(structure)

    def _tensor(self, tensor: Tensor) -> Line:
        made, _ = self._made.get(id(tensor), (None, tensor))
        if made is not None:
            return *made, tensor.requires_grad
        value = tensor if self.constants is None else self.constants.value(tensor)
        if value is None or isinstance(value, FakeTensor):
            self._given[id(tensor)] = tensor  # kept alive, so that no other tensor gets its id
            return "given", id(tensor), tensor.requires_grad
        with _disable_current_modes(), torch.no_grad():
            held = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return "held", value.dtype, tuple(value.shape), tensor.requires_grad, held


def _text(value: Any) -> tuple[type, str]:
    return type(value), repr(value)


def compute_the_same(runs: Sequence[Recorded], results: Sequence[Any]) -> bool:
    """Whether these recorded runs, with these results, are equal. The runs must be alive together."""
    one, other = runs
    return one.lines == other.lines and one.described(results[0]) == other.described(results[1])
