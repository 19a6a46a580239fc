"""Rows that a mask selects, `x[mask]`: how many there are only the data decides, so they stay in their places.

A `Selected` stands for the selected rows and holds all rows. A function that treats rows one by one
(`autopar.capture.while_traced.row_wise`) is applied to all of them; what adds rows up, or puts them back, has a function of its
own in `USES`; anything else is an error at the user's line. Rows that are not selected hold numbers that nobody asked for. They
start as zeros, and a function that may make numbers out of these which are not finite, or slopes, is given ones there, so that
nothing of these rows reaches a sum or a gradient: they are always replaced, never multiplied by zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from autopar.capture.explain import refusal
from autopar.capture.while_traced.row_masks import RowMask, count_of
from autopar.capture.while_traced.row_wise import HOW_MANY, Rows, row_wise

_INSTEAD = (
    "functions that treat rows one by one, sums, means and losses of them, and writing them back by the same mask may read them; "
    "keep all rows and give those outside the mask no weight: torch.where(mask, x, 0), ignore_index, or sums of x * mask. A loop "
    "over the experts that a batch chose: autopar.grouped_mm, or another forward to trace the module by: "
    "@autopar.forward_of(TheModule)"
)
USES: dict[Any, Callable[..., Any]] = {}
"""Function of torch → what it computes where an argument is Selected; NotImplemented: it treats rows one by one."""
FIRST_DIM = Rows(0)
_FIELDS: Any = Tensor
_GIVEN = (
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "ndim",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "itemsize",
)
_GIVEN_BY_CALL = ("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "is_signed")
_DIVIDES = ("div", "mod", "remainder")


def use(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what these functions compute where an argument is Selected."""

    def add(own: Callable[..., Any]) -> Callable[..., Any]:
        USES.update(dict.fromkeys(funcs, own))
        return own

    return add


@dataclass
class _Unselected:
    """The numbers that rows which are not selected hold, shared by views of one memory. zeros: zeros; finite: finite
    ones, which were computed with slopes that are finite. written: whether selected rows were written to."""

    zeros: bool
    finite: bool
    written: bool = False


class Selected:
    """The rows of a tensor where a mask is true. x: all rows, in dim `rows.dim`, or in dims of the mask's own shape from there
    on (`in_grid`). column: of indices, the dim of the mask in which they say where rows lie;
    -1: every dim, one after the other."""

    def __init__(
        self,
        x: Tensor,
        mask: RowMask,
        rows: Rows = FIRST_DIM,
        unselected: _Unselected | None = None,
        in_grid: bool = False,
        column: int | None = None,
    ) -> None:
        self.x, self.mask, self.rows, self.in_grid, self._column = x, mask, rows, in_grid, column
        self.unselected = unselected or _Unselected(False, False)

    @staticmethod
    def of(x: Tensor, mask: RowMask, dim: int = 0, column: int | None = None) -> Selected:
        """The rows of x, whose dims from `dim` on are those of the mask."""
        x = x if torch.is_grad_enabled() else _without_history(x)
        outside = mask.like(~mask.grid, x.ndim, dim)
        return Selected(x.masked_fill(outside, 0), mask, Rows(dim), _Unselected(True, True), True, column)

    @property
    def column(self) -> int | None:
        return None if self.unselected.written else self._column

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, kwargs = USES.get(func) or _loss_of(func), kwargs or {}
        result = own(*args, **kwargs) if own is not None else NotImplemented
        result = applied(func, args, kwargs) if result is NotImplemented else result
        return result if torch.is_grad_enabled() else tree_map_only(Tensor, _without_history, result)

    def __getattr__(self, name: str) -> Any:
        if name in _GIVEN:
            return getattr(self.x, name)
        if name in _GIVEN_BY_CALL:
            return getattr(self.x, name)
        what = getattr(Tensor, name, None)
        if what is None or name.startswith("__"):
            raise AttributeError(name)
        if not callable(what):
            return self.__torch_function__(what.__get__, (), (self,))
        return functools.partial(asked, what, self)

    def flat(self) -> Tensor:
        """All rows in one dim. Views of what is returned are views of what this holds."""
        if self.in_grid:
            last = self.rows.dim + self.mask.grid.ndim - 1
            self.x, self.in_grid = self.x.flatten(self.rows.dim, last), False
        return self.x

    def outside(self) -> Tensor:
        """A mask that x broadcasts with, of the rows that are not selected."""
        if self.in_grid:
            return self.mask.like(~self.mask.grid, self.x.ndim, self.rows.dim)
        one, mask = self.rows, ~self.mask.flat
        if one.inner > 1:
            mask = mask.unsqueeze(-1).expand(mask.numel(), one.inner).flatten()
        return self.mask.like(mask, self.x.ndim, one.dim)

    def filled(self, value: float = 0) -> Tensor:
        """All rows, those that are not selected filled: neither their values nor their gradients are seen."""
        if value == 0 and self.unselected.zeros:
            return self.x
        return self.x.masked_fill(self.outside(), value)

    def safe(self, finite: bool, one: bool = False) -> Tensor:
        """All rows in one dim, for a function that keeps finite numbers finite, or does not. one: integers are divided by."""
        self.flat()
        if self.x.is_floating_point() or self.x.is_complex():
            return self.x if finite and self.unselected.finite else self.filled(0 if finite else 1)
        return self.x if self.x.dtype == torch.bool else self.filled(int(one))

    def count(self) -> Tensor:
        """How many rows are selected: a number without dims."""
        return self.mask.count * self.rows.inner if self.rows.inner > 1 else self.mask.count


def refused(what: str) -> Exception:
    """The error for what is asked of selected rows."""
    return refusal(f"asks {what} of the rows that a mask selects, whose number depends on the data", _INSTEAD)


def same_mask(masks: Iterable[RowMask], what: str) -> RowMask:
    """The one mask that these are. Raises CaptureError where they are several."""
    by_key = {mask.key: mask for mask in masks}
    if len(by_key) != 1:
        raise refused(f"{what} (which takes rows selected by one and the same mask)")
    return next(iter(by_key.values()))


def applied(func: Any, args: Any, kwargs: Any) -> Any:
    """A function that treats rows one by one, of all rows. Raises CaptureError for any other."""
    name = getattr(func, "__name__", str(func))
    leaves, spec = tree_flatten((args, kwargs))
    selections = [x for x in leaves if isinstance(x, Selected)]
    counted = [mask for x in leaves if (mask := count_of(x)) is not None]
    mask = same_mask([*(one.mask for one in selections), *counted], name)
    number = mask.flat.numel()
    plain = [x.flat() if isinstance(x, Selected) else HOW_MANY if count_of(x) is not None else x for x in leaves]
    found = row_wise(func, plain, spec, {i: x.rows for i, x in enumerate(leaves) if isinstance(x, Selected)})
    if isinstance(found, str):
        raise refused(f"{name} ({found})")
    if any(not isinstance(leaves[i], Selected) for i in found.writes):
        raise refused(f"{name}, which writes what it makes of them to other tensors,")
    divides = any(part in name for part in _DIVIDES)
    values = list(plain)
    for i, one in enumerate(leaves):
        if plain[i] is HOW_MANY:
            values[i] = number
        elif isinstance(one, Selected):
            values[i] = (
                one.x if i in found.writes or (found.view and not found.writes) else one.safe(found.finite, divides)
            )
    for one in {id(leaves[i]): leaves[i] for i in found.writes}.values():
        if not (found.finite and one.unselected.finite):
            one.x.masked_fill_(one.outside(), 1)
        one.unselected.zeros, one.unselected.finite, one.unselected.written = False, found.finite, True
    args, kwargs = tree_unflatten(values, spec)
    result = func(*args, **kwargs)
    places = iter(found.results)
    finite = found.finite and (not found.view or all(one.unselected.finite for one in selections))

    def selected(tensor: Tensor) -> Selected:
        tensor = tensor if torch.is_grad_enabled() else _without_history(tensor)
        shared = next((one.unselected for one in selections if _same_memory(one.x, tensor)), None)
        return Selected(tensor, mask, next(places), shared or _Unselected(False, finite))

    return tree_map_only(Tensor, selected, result)


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    """`x[index] = value`, and x."""
    x[index] = value
    return x


def _without_history(x: Tensor) -> Tensor:
    """A tensor made without gradients: export forgets `no_grad` inside regions of autocast."""
    return x.detach() if x.is_floating_point() or x.is_complex() else x


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of torch, of arguments among which are Selected."""
    return Selected.__torch_function__(func, (), args, kwargs)


def _loss_of(func: Any) -> Callable[..., Any] | None:
    """The use of a loss of torch with a `reduction` computes, which is its own function of every row."""
    return USES["loss"](func) if getattr(func, "__module__", "") == "torch.nn.functional" else None


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Selected, *args: Any) -> Any:
        return asked(getattr(Tensor, name), self, *args)

    return operate


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul", "and", "or", "xor")
for _name in (
    *(f"__{side}{op}__" for op in _ARITHMETIC for side in ("", "r", "i")),
    *(f"__{op}__" for op in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "invert")),
    *(f"__{op}__" for op in ("len", "bool", "int", "float", "index", "getitem", "setitem", "contains")),
):
    if hasattr(Tensor, _name):
        setattr(Selected, _name, _operator(_name))
Selected.__hash__ = object.__hash__  # type: ignore[method-assign]
