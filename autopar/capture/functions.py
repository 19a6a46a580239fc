"""Custom autograd.Functions: kept whole through export, dissolved with their own backward when differentiated.

Non-strict export traces a Function's forward and drops its backward without a word (a straight-through gradient becomes
0). While `recording` is active `Function.apply` becomes one opaque op that remembers the class and its arguments; when a
template is traced the op runs the real `apply`, so make_fx records the user's own backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from autopar.errors import CaptureError

_LIBRARY = torch.library.Library("autopar_user", "DEF")
_LIBRARY.define("function(int key, Tensor[] tensors) -> Tensor[]")
_RECORDS: list[tuple[type, tuple[Any, ...], bool]] = []
OP = torch.ops.autopar_user.function.default


class _Slot:
    """Marks the place of tensor number `index` among recorded arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _arguments(template: tuple[Any, ...], tensors: list[torch.Tensor]) -> list[Any]:
    return [tensors[a.index] if isinstance(a, _Slot) else a for a in template]


def _shapes(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    cls, template, _ = _RECORDS[key]
    with torch.no_grad():
        out = _ORIGINAL.__func__(cls, *_arguments(template, [t.detach() for t in tensors]))
    outs = out if isinstance(out, (tuple, list)) else [out]
    return [torch.empty_like(o, memory_format=torch.contiguous_format) for o in outs]


_LIBRARY.impl("function", _shapes, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_user::function", _shapes, lib=_LIBRARY)
_ORIGINAL: Any = Function.__dict__["apply"]


def run(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The real Function, for tracing with gradients. Raises CaptureError when it cannot be traced."""
    cls, template, _ = _RECORDS[key]
    try:
        out = _ORIGINAL.__func__(cls, *_arguments(template, tensors))
    except Exception as error:
        raise CaptureError(
            f"the custom autograd.Function {cls.__module__}.{cls.__qualname__} cannot be traced ({error}); write its "
            "forward and backward with torch ops, or register it with @autopar.register_op"
        ) from error
    return list(out) if isinstance(out, (tuple, list)) else [out]


@contextmanager
def recording() -> Iterator[None]:
    """Within the context, applying a user's Function records one `autopar_user.function` op."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] in ("torch", "autopar"):
            return _ORIGINAL.__func__(cls, *args, **kwargs)
        if kwargs or any(isinstance(a, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in a) for a in args):
            raise CaptureError(
                f"the custom autograd.Function {cls.__module__}.{cls.__qualname__} takes keyword arguments or lists of "
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
        with torch.no_grad():
            many = isinstance(_ORIGINAL.__func__(cls, *[t.detach() if isinstance(t, torch.Tensor) else t for t in args]), tuple)
        _RECORDS.append((cls, tuple(template), many))
        outs = OP(len(_RECORDS) - 1, tensors)
        return tuple(outs) if many else outs[0]

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = _ORIGINAL  # type: ignore[method-assign]


def identity(key: int) -> tuple[Any, ...]:
    """What makes two recorded uses equal: class and non-tensor arguments."""
    cls, template, _ = _RECORDS[key]
    return cls, tuple("tensor" if isinstance(a, _Slot) else repr(a) for a in template)
