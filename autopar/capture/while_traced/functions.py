"""Custom autograd.Functions: kept whole through export, dissolved with their own backward when differentiated.

Non-strict export traces a Function's forward and drops its backward without a word (a straight-through gradient becomes
0). While `recording` is active `Function.apply` becomes one opaque op that remembers the class and its arguments; when a
template is traced the op runs the real `apply`, so make_fx records the user's own backward. Activation checkpoints of
torch (reentrant ones are Functions) vanish instead: what to recompute is the planner's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.explain import current_user_line
from autopar.capture.while_traced.selected import Selected, refused
from autopar.errors import CaptureError
from autopar.runtime.data.origin import name_of, package_of

_LIBRARY = torch.library.Library("autopar_user", "DEF")
_LIBRARY.define("function(int key, Tensor[] tensors) -> Tensor[]")
OP = torch.ops.autopar_user.function.default
_ORIGINAL: Any = Function.__dict__["apply"]


@dataclass
class _Record:
    """One use of a Function: its arguments with tensors replaced by slots; whether it returns a tuple."""

    cls: type
    template: tuple[Any, ...]
    many: bool = False

    @property
    def name(self) -> str:
        return f"the custom autograd.Function {name_of(self.cls)}"

    def call(self, tensors: list[torch.Tensor]) -> Any:
        """The real `apply`. Raises CaptureError when it cannot be traced."""
        try:
            return _ORIGINAL.__func__(
                self.cls, *(tensors[a.index] if isinstance(a, _Slot) else a for a in self.template)
            )
        except Exception as error:
            raise CaptureError(f"{self.name} cannot be traced ({error}); {_FIX}") from error


_RECORDS: list[_Record] = []
_FIX = "write its forward and backward with torch ops only, or register it with @autopar.register_op"


class _Slot:
    """Marks the place of tensor number `index` among recorded arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _shapes(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    record = _RECORDS[key]
    plain = [t.detach() for t in tensors]
    versions = [t._version for t in plain]
    with torch.no_grad():
        out = record.call(plain)
    record.many = isinstance(out, (tuple, list))
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    if not all(isinstance(o, torch.Tensor) for o in outs):
        raise CaptureError(f"{record.name} returns something else than tensors; return tensors only")
    if versions != [t._version for t in plain]:
        raise CaptureError(f"{record.name} writes to its input in place; return a new tensor instead")
    return [torch.empty_like(o, memory_format=torch.contiguous_format) for o in outs]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> Any:
    raise CaptureError("a recorded autograd.Function was differentiated before its template was traced")


_LIBRARY.impl("function", _shapes, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_user::function", _shapes, lib=_LIBRARY)
torch.library.register_autograd("autopar_user::function", _backward, lib=_LIBRARY)


def run(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The real Function, for tracing with gradients. Raises CaptureError when it cannot be traced."""
    out = _RECORDS[key].call(tensors)
    return list(out) if isinstance(out, (tuple, list)) else [out]


@contextmanager
def recording() -> Iterator[list[str]]:
    """Within the context, applying a user's Function records one `autopar_user.function` op. Yields the lines of reentrant
    checkpoints inside which nothing gets a gradient, once they have run."""
    without_gradient: list[str] = []

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(without_gradient, *args)
        if any(isinstance(a, Selected) for a in args):
            raise refused(f"the custom autograd.Function {name_of(cls)}")
        if package_of(cls) in ("torch", "autopar"):
            return _ORIGINAL.__func__(cls, *args, **kwargs)
        if kwargs or any(isinstance(a, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in a) for a in args):
            raise CaptureError(
                f"the custom autograd.Function {name_of(cls)} takes keyword arguments or lists of "
                "tensors, which cannot be kept with its backward; pass each tensor as one positional argument"
            )
        tensors: list[torch.Tensor] = []
        template: list[Any] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                template.append(_Slot(len(tensors)))
                tensors.append(arg)
            else:
                template.append(arg)
        record = _Record(cls, tuple(template))
        _RECORDS.append(record)
        outs = OP(len(_RECORDS) - 1, tensors)
        return tuple(outs) if record.many else outs[0]

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield without_gradient
    finally:
        Function.apply = _ORIGINAL  # type: ignore[method-assign]


def _checkpointed(without_gradient: list[str], run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """The function itself; as in a reentrant checkpoint nothing gets a gradient unless one of its inputs needs one."""
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return run_function(*args)
    if torch.is_grad_enabled():
        without_gradient.append(current_user_line())
    with torch.no_grad():
        return run_function(*args)


def identity(key: int) -> tuple[Any, ...]:
    """The identity of a recorded use, by which two are equal: class and non-tensor arguments."""
    record = _RECORDS[key]
    return record.cls, tuple("tensor" if isinstance(a, _Slot) else repr(a) for a in record.template)
