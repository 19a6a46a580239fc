"""Sums over selected rows: their number, sums, means, extremes, losses and the statistics of a batch norm."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.while_traced.selected import USES, Selected, asked, refused, use

_FIELDS: Any = Tensor
Dims = int | Sequence[int] | None


# --- sizes


@use(_FIELDS.shape.__get__, Tensor.size)
def _size(x: Selected, dim: int | None = None) -> Any:
    sizes = list(x.flat().shape)
    counted: list[Any] = [x.count() if d == x.rows.dim else n for d, n in enumerate(sizes)]
    return tuple(counted) if dim is None else counted[dim]


@use(Tensor.numel, torch.numel, Tensor.nelement)
def _numel(x: Selected) -> Tensor:
    return x.mask.count * _per_row(x)


@use(Tensor.__len__)
def _len(x: Selected) -> Any:
    return int(x.count()) if x.rows.dim == 0 else x.x.shape[0]


@use(_FIELDS.data.__get__)
def _data(x: Selected) -> Any:
    return x.detach()


@use(Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__)
def _value(x: Selected) -> Any:
    raise refused("the values")


def _per_row(x: Selected) -> int:
    return x.x.numel() // max(x.mask.flat.numel(), 1)


# --- reductions


def _summed(x: Selected, dim: Dims) -> list[int] | None:
    """Dims of all rows that a reduction over rows takes; None: it does not take rows. Every dim where dim is None."""
    rank = x.x.ndim - (x.mask.grid.ndim - 1 if x.in_grid else 0)
    dims = (
        list(range(rank))
        if dim is None
        else [d % rank for d in ([dim] if isinstance(dim, int) else dim)] or list(range(rank))
    )
    return dims if x.rows.dim in dims else None


def _over(x: Selected, kept: Tensor, dims: list[int], reduce: Callable[..., Tensor], keepdim: bool) -> Tensor:
    """A reduction of all rows. kept: these, as x has them."""
    extra = x.mask.grid.ndim - 1 if x.in_grid else 0
    if extra and keepdim:
        kept, extra = kept.flatten(x.rows.dim, x.rows.dim + extra), 0
    inside = [
        e for d in dims for e in (range(d, d + extra + 1) if d == x.rows.dim else (d + extra * (d > x.rows.dim),))
    ]
    return reduce(kept) if len(inside) == kept.ndim and not keepdim else reduce(kept, inside, keepdim)


@use(torch.sum, Tensor.sum)
def sum(input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum, of all rows or within each."""
    dims = _summed(input, dim)
    if dims is None:
        return NotImplemented
    kept = input.filled()
    return _over(input, kept if dtype is None else kept.to(dtype), dims, torch.sum, keepdim)


def _terms(x: Selected, dims: list[int]) -> Tensor:
    """How many numbers each sum over these dims has."""
    shape = x.flat().shape
    return x.count() * math.prod(shape[d] for d in dims if d != x.rows.dim)


@use(torch.mean, Tensor.mean)
def mean(input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The mean, of all rows or within each."""
    dims = _summed(input, dim)
    if dims is None:
        return NotImplemented
    wanted = dtype or input.dtype
    wide = (
        torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
    )  # numbers of rows are rounded in few bits
    return (sum(input, dims, keepdim, dtype=wide) / _terms(input, dims)).to(wanted)


@use(torch.var, Tensor.var)
def var(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float | None = None
) -> Any:
    """The variance, of all rows or within each."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = _summed(input, dim)
    if dims is None:
        return NotImplemented
    less = correction if correction is not None else 0 if unbiased is False else 1
    away = Selected(input.flat() - mean(input, dims, True), input.mask, input.rows)
    return sum(asked(Tensor.square, away), dims, keepdim) / (_terms(input, dims) - less).clamp(min=0)


@use(torch.std, Tensor.std)
def std(*args: Any, **kwargs: Any) -> Any:
    """The root of the variance."""
    value = var(*args, **kwargs)
    return value if value is NotImplemented else value.sqrt()


def _extreme(name: str) -> Callable[..., Any]:
    def extreme(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if not isinstance(input, Selected) or isinstance(dim, (Tensor, Selected)):
            return NotImplemented
        dims = _summed(input, dim)
        if dims is None:
            return NotImplemented
        if dim is not None and name in ("max", "min"):
            raise refused(f"{name} over dim {dim}, with places,")
        input.mask.masks.hold(input.mask.count > 0, True)  # eager has no extreme of nothing
        limit = torch.finfo(input.dtype) if input.is_floating_point() else torch.iinfo(input.dtype)
        lowest = -math.inf if input.is_floating_point() else limit.min
        value = lowest if name.endswith("max") else -lowest if input.is_floating_point() else limit.max
        return _over(input, input.filled(value), dims, torch.amax if name.endswith("max") else torch.amin, keepdim)

    return extreme


for _name in ("max", "min", "amax", "amin"):
    use(getattr(torch, _name), getattr(Tensor, _name))(_extreme(_name))


@use(torch.any, Tensor.any)
def _any(input: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    dims = _summed(input, dim)
    return NotImplemented if dims is None else _over(input, input.filled(0), dims, torch.any, keepdim)


@use(torch.all, Tensor.all)
def _all(input: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    dims = _summed(input, dim)
    return NotImplemented if dims is None else _over(input, input.filled(1), dims, torch.all, keepdim)


# --- losses


@use(F.ctc_loss)
def _ctc_loss(
    log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **options: Any
) -> Tensor:
    """Targets that a mask of (batch, labels) selects, row by row; lengths must be those of its rows."""
    if not (isinstance(targets, Selected) and isinstance(target_lengths, Tensor) and targets.mask.grid.ndim == 2):
        raise refused("ctc_loss with lengths that are no tensor, or no mask of rows,")
    mask = targets.mask.grid
    lengths = mask.sum(-1)
    surplus = torch.ops.autopar.in_range(target_lengths.long() - lengths, 0, 1)
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    return F.ctc_loss(
        log_probs, targets.x.reshape(mask.shape).gather(1, order), input_lengths, lengths + surplus, *rest, **options
    )


def _classified(func: Any) -> Callable[..., Any]:
    """A loss of class indices: rows outside the mask are ignored."""

    def loss(input: Any, target: Any, weight: Any = None, *args: Any, **options: Any) -> Any:
        of_rows = isinstance(input, Selected) and isinstance(target, Selected)
        if not of_rows or input.mask.key != target.mask.key:
            raise refused(f"{func.__name__} (which takes scores and targets selected by one and the same mask)")
        if args or options.get("reduction", "mean") == "none" or target.is_floating_point():
            return _reduced(func)(input, target, weight, *args, **options)
        ignored = options.setdefault("ignore_index", -100)
        return func(input.safe(True), _filled_rows(target, ignored), weight, **options)

    return loss


def _filled_rows(x: Selected, value: float) -> Tensor:
    x.flat()
    return x.filled(value)


for _func in (F.cross_entropy, F.nll_loss):
    use(_func)(_classified(_func))


def _reduced(func: Any) -> Callable[..., Any]:
    """A loss by what it is of every row: torch divides by numbers of rows that it takes from shapes."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction = options["reduction"]
        if reduction == "none" or options.get("size_average") is not None or options.get("reduce") is not None:
            return NotImplemented
        rows = _asked_rows(func, {**options, "reduction": "none"})
        if reduction == "sum":
            return sum(rows)
        return sum(rows) / rows.count() if reduction == "batchmean" else mean(rows)

    return loss


def _asked_rows(func: Any, options: Any) -> Selected:
    kept = {name: value for name, value in options.items() if name not in ("size_average", "reduce")}
    return asked(func, **kept)


@functools.cache
def _loss(func: Any) -> Callable[..., Any] | None:
    try:
        return _reduced(func) if "reduction" in inspect.signature(func).parameters else None
    except (TypeError, ValueError):
        return None


USES["loss"] = _loss


# --- the statistics of a batch


@use(F.batch_norm)
def _batch_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The norm by the statistics of the selected rows."""
    if not training:
        return NotImplemented
    if not isinstance(input, Selected) or input.rows.dim != 0 or input.rows.inner != 1:
        raise refused("batch_norm over rows in another dim than the first")
    dims = [0, *range(2, input.flat().ndim)]
    shape = [1, -1, *[1] * (input.ndim - 2)]
    number = _terms(input, dims)
    input.mask.masks.hold(number > 1, True)  # as torch asks of a batch
    middle, spread = mean(input, dims), var(input, dims, False)
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            unbiased = spread.detach() * (number / (number - 1))
            for running, now in ((running_mean, middle.detach()), (running_var, unbiased)):
                running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    y = (input - middle.reshape(shape)) * torch.rsqrt(spread + eps).reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)
