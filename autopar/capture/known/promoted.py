"""Computing in a wider dtype than a model says: whatever float dtype an op names is replaced, so that no cast rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.grouped import grouped_by_loops

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


def replaced(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """The dtype that every float dtype, and every complex one, becomes when `dtype` is computed in: complex numbers
    have two of it (two of float32 where it has 16 bits)."""
    pair = torch.complex128 if dtype == torch.float64 else torch.complex64
    return {**dict.fromkeys(FLOATS, dtype), **dict.fromkeys(COMPLEX, pair)}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype that replaces its own, without its history."""
    return x.detach().to(replaced(dtype).get(x.dtype, x.dtype))


class AnyDtype(TorchDispatchMode):
    """Grouped products also in float64, which torch's kernel does not take."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = grouped_by_loops if func is torch.ops.aten._grouped_mm.default else func
        return func(*args, **(kwargs or {}))


class Promote(AnyDtype):
    """Every float dtype named in an op becomes `dtype`: a cast inside the model must not round."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.replaced = dtype, replaced(dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        aliased = [a.alias_info is not None for a in func._schema.arguments]
        named = {a.name for a, alias in zip(func._schema.arguments, aliased, strict=True) if alias}
        kwargs = {k: a if k in named else self._argument(a) for k, a in (kwargs or {}).items()}
        args = tuple(a if alias else self._argument(a) for a, alias in zip(args, aliased, strict=False))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _argument(self, a: Any) -> Any:
        """An argument in the other dtype, also of tensors that the model does not own, such as class weights inside a
        loss function."""
        if isinstance(a, torch.dtype):
            return self.replaced.get(a, a)
        if isinstance(a, (list, tuple)):
            return type(a)(map(self._argument, a))
        foreign = isinstance(a, torch.Tensor) and self.replaced.get(a.dtype, a.dtype) != a.dtype
        return cast(a, self.dtype) if foreign else a
