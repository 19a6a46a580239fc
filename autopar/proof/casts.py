"""A model in another dtype than its own, casts inside it included, and without its dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.known.promoted import Promote, cast
from autopar.capture.while_traced.control_flow import control_flow_in_python


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters and buffers are cast (`Module.to` would drop imaginary parts)."""
    return copy_of(model)._apply(lambda t: cast(t, dtype))


def map_tensors(value: Any, f: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested user data with `f` of every tensor."""
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, f) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, f) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, f) for v in value)
    return value


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that a module computed from its parameters (old weight_norm) are copied as values, and what cannot
    be copied (a registered op, a lock) is shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
            elif not isinstance(value, (torch.Tensor, nn.Module, dict)) and not _can_be_copied(value):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def _can_be_copied(value: object) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:  # whatever a class raises that is not made to be copied
        return False
    return True


@contextmanager
def promoted(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """The model computes in `dtype` whatever it says. Updates stay outside: the optimizer's own dtypes are part of it."""
    previous, own = torch.get_default_dtype(), _dtype_of(model)
    constants = _KeepConstants(dtype, own, previous)
    torch.set_default_dtype(dtype)
    try:
        with Promote(dtype), _KeepEps(_eps(model)), constants, _finfo_as(dtype, own), control_flow_in_python():
            yield
    finally:
        torch.set_default_dtype(previous)


class DividedAs(TorchDispatchMode):
    """Integers that an op turns into floats, as a division does, become `dtype` and not torch's default.

    For the ranks of one process: the default is the process's, and their optimizers read it while others still compute.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        widened = isinstance(result, torch.Tensor) and result.dtype == torch.get_default_dtype() != self.dtype
        if (
            not widened
            or not tensors
            or any(a.is_floating_point() or a.is_complex() for a in tensors)
            or "dtype" in kwargs
        ):
            return result
        return func(*(a.to(self.dtype) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)


@contextmanager
def _finfo_as(dtype: torch.dtype, own: torch.dtype) -> Iterator[None]:
    """`torch.finfo` of the promoted dtype says what it says of the model's own: constants made of it are the model's."""
    real = torch.finfo

    def finfo(of: torch.dtype | None = None) -> torch.finfo:
        of = of or dtype
        return real(own if of == dtype else of)

    torch.finfo = finfo  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.finfo = real  # type: ignore[misc]


class _KeepEps(TorchFunctionMode):
    """`rms_norm` without eps takes the eps of its dtype; the promoted model keeps that of the original dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.rms_norm and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            args = args[:3]
            kwargs["eps"] = self.eps
        return func(*args, **kwargs)


class _KeepConstants(TorchFunctionMode):
    """Tensors that a model makes of numbers hold them as its own dtype does: a captured program has that rounding."""

    def __init__(self, dtype: torch.dtype, own: torch.dtype, default: torch.dtype) -> None:
        """own: the model's dtype, which is promoted for code that asks a tensor. default: of code that names none."""
        super().__init__()
        self.dtype, self.named = dtype, {dtype: own, None: default}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and _has_floats(args[:1]):
            asked = kwargs.get("dtype")
            made = func(*args, **{**kwargs, "dtype": self.named.get(asked, asked)})
            return cast(made, self.dtype).requires_grad_(made.requires_grad) if made.is_floating_point() else made
        return func(*args, **kwargs)


def _has_floats(data: Any) -> bool:
    """Whether nested lists hold a float and nothing but numbers."""
    if isinstance(data, (list, tuple)):
        return any(map(_has_floats, data)) and not any(isinstance(value, torch.Tensor) for value in data)
    return isinstance(data, float)


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _eps(model: nn.Module) -> float:
    """Numbers of 16 bits are normalised in float32."""
    own = _dtype_of(model)
    return torch.finfo(torch.float32 if own.itemsize == 2 else own).eps


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model that drops nothing while the context lasts."""
    quiet = copy_of(model)
    quiet.train(model.training)
    for module in quiet.modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    with _Quiet():
        yield quiet


class _Quiet(TorchFunctionMode):
    """A mode in which dropout does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and func is not F.scaled_dot_product_attention:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs = {k: (0.0 if k == "dropout_p" else v) for k, v in kwargs.items()}
        return func(*args, **kwargs)
