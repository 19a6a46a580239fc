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

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, floats in `dtype`, without its history."""
    return x.detach().to(dtype) if x.dtype in FLOATS else x.detach()


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
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Promote(dtype), _KeepEps(_eps(model)):
            yield
    finally:
        torch.set_default_dtype(previous)


class _Promote(TorchDispatchMode):
    """Every float dtype named in an op becomes `dtype`: a cast inside the model must not round."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in FLOATS:
            kwargs["dtype"] = self.dtype
        written = {i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None}
        return func(*(self._argument(a) if i not in written else a for i, a in enumerate(args)), **kwargs)

    def _argument(self, a: Any) -> Any:
        """Also tensors that the model does not own, such as class weights inside a loss function."""
        if isinstance(a, torch.dtype) and a in FLOATS:
            return self.dtype
        return cast(a, self.dtype) if isinstance(a, torch.Tensor) and a.dtype in FLOATS else a


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


def _eps(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.finfo(dtype).eps


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
    """Dropout does nothing."""

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
