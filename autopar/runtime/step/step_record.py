"""The record of a step's calls of torch: the evidence that its kernels may be played again for the steps that come.

A graph of kernels holds addresses and numbers. It computes another step if that step asks for the same kernels with the
same numbers, and all that differs lies in memory at the same addresses. So a step is recorded: the name of every call, its
numbers, and which tensors it reads, which are numbered in the order in which they are made. Two steps whose records are
equal differ in nothing that Python knows (a step number, a random key, a learning rate).

`refused` says what no record can show to be alike: a number that Python asks a tensor for, a size that data decides,
torch's own random numbers, copies between host and device, and memory from outside the step, which may lie elsewhere, or
hold something else, in the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_HOST_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = ("aten::copy_", "aten::_to_copy")


@dataclass(frozen=True)
class Asked:
    """A call of torch: its op, its arguments with tensors by number, and the line of the emitted program (not compared)."""

    op: str
    arguments: Any
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.op} ({self.place or 'in the runtime'})"


class StepRecord(TorchDispatchMode):
    """The calls made inside. at_rest: tensors that lie where they are for all steps; namespaces: those of emitted modules."""

    def __init__(self, at_rest: Iterable[Tensor], namespaces: Collection[dict[str, Any]]) -> None:
        super().__init__()
        self.calls: list[Asked] = []
        self.refused = ""
        self._namespaces = {id(names) for names in namespaces}
        self._numbers = {_storage(t): number for number, t in enumerate(at_rest)}
        self._made = len(self._numbers)
        self._ended: list[StorageWeakRef] = []
        """While these are held, no other memory gets the names of what was let go."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        asked = Asked(str(func), pytree.tree_map(self._shown, (args, kwargs)), self._place())
        result = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if func is not torch.ops.aten.detach.default:  # no kernel; torch adds some where modes are nested
            self.calls.append(asked)
        if not self.refused and (why := self._why_not(func, args, kwargs, read, made)):
            self.refused = f"{why}: {asked}"
        known = {_storage(x) for x in read}
        for x in made:
            if _storage(x) not in known:
                self._made += 1
                self._numbers[_storage(x)] = self._made
                self._ended.append(StorageWeakRef(x.untyped_storage()))
        return result

    def _shown(self, x: Any) -> Any:
        """An argument as it is compared: a tensor by its number, other values by their text, as NaN is not itself."""
        if not isinstance(x, Tensor):
            return repr(x)
        return self._numbers.get(_storage(x)), x.dtype, tuple(x.shape), x.stride(), x.storage_offset()

    def _why_not(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor], made: list[Tensor]
    ) -> str:
        if any(tag in func.tags for tag in _HOST_WAITS) and not _indexes_by_numbers(func, args):
            return "the host waits for a number that the device computes, or a size depends on data"
        if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, args, kwargs, "dropout_p") != 0:
            return "it draws random numbers of torch's generator"
        if func.name().split(".")[0] in _COPIES and len({x.device.type for x in (*read, *made)}) > 1:
            return "memory is copied between host and device"
        if any(x.numel() and _storage(x) not in self._numbers for x in read):
            return "it reads memory that was made elsewhere and may lie elsewhere in the next step"
        return ""

    def _place(self) -> str:
        """The line of the emitted program that is being run."""
        frame = sys._getframe(2)
        while frame is not None:
            if id(frame.f_globals) in self._namespaces:
                return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def difference(first: Sequence[Asked], second: Sequence[Asked]) -> str:
    """A text of where two steps ask for something else, "" where they do not."""
    for one, other in zip_longest(first, second):
        if one is None or other is None or one.op != other.op:
            return f"two steps run other ops: {one or 'none'} and {other or 'none'}"
        if one != other:
            return f"a number or a tensor is another one in every step, as random keys are: {one}"
    return ""


def _indexes_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op takes places by their numbers, and not by a mask, whose size depends on data."""
    indices = args[1] if func is torch.ops.aten.index.Tensor else []
    return bool(indices) and not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value that a call gives an argument, None where it has none of that name."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
