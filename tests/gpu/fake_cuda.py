"""CUDA tensors without data, also where torch has no CUDA: signatures, shapes, dtypes and devices of what a GPU would run.

FakeTensorMode does nearly all of it. Some of Python's operators look for a GPU before they ask the mode, so they are taken apart
here into the ops that they are made of. Other ops torch itself would take apart, as it has no kernel of CUDA for them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from autopar.runtime.comm.devices import Device, standing_for

aten = torch.ops.aten
A100, H100 = Device("cuda", (8, 0)), Device("cuda", (9, 0))
ONE_KERNEL = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Ops that are one kernel on CUDA, and that torch without CUDA takes apart."""


@contextmanager
def fake_cuda(device: Device = H100) -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake, and those on "cuda" stand for ones on this device."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for name in ("Stream", "Event", "current_stream"):
                stack.enter_context(mock.patch.object(torch.cuda, name))
            stack.enter_context(_kernels())
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(standing_for(device))
        stack.enter_context(_Operators())
        yield mode


@contextmanager
def _kernels() -> Iterator[None]:
    """Inside, ops that CUDA has kernels for have some; none is ever reached, as tensors are fake."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in ONE_KERNEL:
            library.impl(name, mock.Mock(), "CUDA")
        yield
    finally:
        library._destroy()


class _Operators(TorchFunctionMode):
    """Operators of fake CUDA tensors by the ops that they are made of."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _OPERATORS.get(func)
        if own is not None and isinstance(args[0], Tensor) and (args[0].is_cuda or func in _OF_ANY_DEVICE):
            return own(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _get(x: Tensor, index: Any) -> Tensor:
    x, indices = _parts(x, index)
    return aten.index.Tensor(x, indices) if any(i is not None for i in indices) else x


def _set(x: Tensor, index: Any, value: Any) -> None:
    x, indices = _parts(x, index)
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    if any(i is not None for i in indices):
        aten.index_put_.default(x, indices, value)
    else:
        aten.copy_.default(x, value)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or x.device, dtype or x.dtype
    if not copy and device.type == x.device.type and dtype == x.dtype and memory_format is None:
        return x
    return aten._to_copy.default(x, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _set_data(x: Tensor, value: Tensor) -> None:
    """A fake tensor has the device of what it holds, as any tensor has."""
    Tensor.data.__set__(x, value)  # type: ignore[attr-defined]
    if isinstance(x, FakeTensor) and isinstance(value, FakeTensor):
        x.fake_device = value.fake_device


_OPERATORS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.contiguous: _contiguous,
    Tensor.copy_: aten.copy_.default,
    Tensor.to: _to,
    Tensor.float: _cast(torch.float32),
    Tensor.double: _cast(torch.float64),
    Tensor.int: _cast(torch.int32),
    Tensor.long: _cast(torch.int64),
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__int__: lambda x: int(x.item()),
    Tensor.__float__: lambda x: float(x.item()),
    Tensor.__index__: lambda x: int(x.item()),
}


_OF_ANY_DEVICE = {Tensor.to, Tensor.data.__set__}  # type: ignore[attr-defined]


def _parts(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that slices and numbers make, and the tensors that index its dims."""
    places = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in [place for place in places if not isinstance(place, Tensor)]:
        places.append(Ellipsis)
    indices: list[Tensor | None] = []
    dim = 0
    for place in places:
        if place is Ellipsis:
            skipped = x.dim() - dim - _left(places)
            indices += [None] * skipped
            dim += skipped
        elif place is None:
            x = aten.unsqueeze.default(x, dim)
            indices.append(None)
            dim += 1
        elif isinstance(place, slice):
            x = aten.slice.Tensor(x, dim, place.start, place.stop, place.step or 1)
            indices.append(None)
            dim += 1
        elif isinstance(place, Tensor):
            indices.append(place)
            dim += 1
        else:
            x = aten.select.int(x, dim, int(place))
    return x, indices


def _left(places: list[Any]) -> int:
    """Dims that the places after an ellipsis take."""
    after = places[next(i for i, place in enumerate(places) if place is Ellipsis) + 1 :]
    return sum(place is not None for place in after)
