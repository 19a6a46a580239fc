"""Calls that select rows: by a mask, by the places where a mask is true (`nonzero`), by indices that are rows themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.capture.while_traced.row_masks import RowMask, RowMasks, count_of
from autopar.capture.while_traced.selected import Selected, applied, put, refused, same_mask, use

_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn)
_FACTORIES += (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.expand)  # type: ignore[assignment]
_SAME = {Tensor.__eq__: True, Tensor.eq: True, Tensor.__ne__: False, Tensor.ne: False}
"""Comparisons of the number of rows with itself, as shapes are compared."""
_PLACES = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


def selection(func: Any, args: Any, kwargs: Any, masks: RowMasks) -> Any:
    """The rows that a call of torch selects of plain tensors; None for a call that selects nothing."""
    if func in (Tensor.masked_select, torch.masked_select):
        given = dict(zip(("input", "mask"), args, strict=False)) | kwargs
        return _elements(given.get("input"), given.get("mask"), masks)
    if func is Tensor.__getitem__ and len(args) == 2:
        return _indexed(args[0], args[1], masks)
    if func in _SAME and len(args) == 2 and args[0] is args[1] and count_of(args[0]) is not None:
        return _SAME[func]
    if func in _PLACES and args:
        return _places(args[0], kwargs.get("as_tuple", len(args) > 1 and args[1]), masks)
    if func in (torch.where, Tensor.where) and len(args) == 1 and not kwargs:
        return _places(args[0], True, masks)
    if func in _FACTORIES:
        sizes = (*args, kwargs.get("size"))
        if any(count_of(n) for size in sizes for n in (size if isinstance(size, (tuple, list)) else (size,))):
            return applied(func, args, kwargs)
    return None


def mask_among(index: Any) -> tuple[int, Tensor] | None:
    """(its dim, the mask) of an index that is one mask after whole dims; None for any other."""
    entries = index if isinstance(index, tuple) else (index,)
    at = next((i for i, one in enumerate(entries) if isinstance(one, Tensor)), None)
    if at is None or any(one != slice(None) for one in entries[:at]):
        return None
    rest = entries[at + 1 :]
    if not all(one is Ellipsis or (isinstance(one, slice) and one == slice(None)) for one in rest):
        return None
    mask = entries[at]
    return (at, mask) if mask.dtype == torch.bool and mask.ndim else None


def _indexed(x: Any, index: Any, masks: RowMasks) -> Selected | None:
    if not isinstance(x, Tensor):
        return None
    if isinstance(index, list) and len(index) == 1:
        index = index[0]
    entries = index if isinstance(index, tuple) else (index,)
    at = next((i for i, one in enumerate(entries) if isinstance(one, Tensor)), None)
    found = mask_among(entries if at is None else entries[: at + 1])
    if found is None:
        return None
    dim, mask = found
    if x.shape[dim : dim + mask.ndim] != mask.shape:
        return None
    rest = entries[dim + 1 :]
    if not all(one is Ellipsis or isinstance(one, slice) or type(one) is int for one in rest):
        return None
    rows = Selected.of(x, masks.of(mask), dim)
    whole = all(one is Ellipsis or one == slice(None) for one in rest)
    return rows if whole else rows[(*[slice(None)] * (dim + 1), *rest)]  # type: ignore[index]


def _elements(x: Any, mask: Any, masks: RowMasks) -> Selected | None:
    """Single elements: rows that a mask of single columns selects are flattened."""
    if not (isinstance(x, Tensor) and isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim):
        return None
    rows = mask_of_rows(mask, x)
    if rows is not None and rows.ndim < x.ndim:
        return Selected.of(x, masks.of(rows)).flatten()
    if x.shape != mask.shape:
        x, mask = torch.broadcast_tensors(x, mask)
    return Selected.of(x, masks.of(mask))


def mask_of_rows(mask: Tensor, x: Tensor) -> Tensor | None:
    """The mask of leading dims of x that this one repeats along all others; None where it has other dims than x."""
    if mask.ndim != x.ndim:
        return None
    while mask.ndim > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0):
        mask = mask.select(-1, 0)
    return mask if mask.shape == x.shape[: mask.ndim] else None


def _places(mask: Any, as_tuple: Any, masks: RowMasks) -> Any:
    """Where a mask is true: one column of indices for each of its dims."""
    if not isinstance(mask, Tensor) or not mask.ndim:
        return None
    by = masks.of(mask if mask.dtype == torch.bool else mask != 0)
    lines = [torch.arange(n, device=mask.device) for n in mask.shape]
    columns = [
        line.reshape(*[1] * d, -1, *[1] * (mask.ndim - 1 - d)).expand(mask.shape) for d, line in enumerate(lines)
    ]
    if as_tuple:
        return tuple(Selected.of(one, by, column=d) for d, one in enumerate(columns))
    return Selected.of(torch.stack(columns, -1), by, column=-1)


# --- of what is selected already


@use(Tensor.__getitem__)
def _index(x: Any, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if isinstance(x, Selected) and x.column == -1 and len(entries) == 2 and type(entries[1]) is int:
        if entries[0] in (slice(None), Ellipsis):
            return _column(x, entries[1])
    first = entries[0] if entries else None
    if isinstance(x, Tensor) and (dims := columns_of(entries)) is not None and x.shape[:dims] == first.mask.grid.shape:  # type: ignore[union-attr]
        rows = Selected.of(x, first.mask)  # type: ignore[union-attr]
        return rows if len(entries) == dims else rows[(slice(None), *entries[dims:])]  # type: ignore[index]
    if isinstance(x, Selected) and isinstance(first, Selected) and first.dtype == torch.bool and len(entries) == 1:
        return _part(x, first)
    return NotImplemented


def columns_of(entries: Any) -> int | None:
    """How many leading indices are the places of one mask, all columns of it in order; None where they are not."""
    columns = [one for one in entries if isinstance(one, Selected) and one.column is not None]
    if not columns or any(one is not other for one, other in zip(columns, entries, strict=False)):
        return None
    mask = columns[0].mask
    right = [one.column for one in columns] == list(range(mask.grid.ndim))
    return len(columns) if right and all(one.mask.key == mask.key for one in columns) else None


@use(torch.index_select, Tensor.index_select)
def _index_select(input: Any, dim: int, index: Any) -> Any:
    if isinstance(input, Tensor) and isinstance(index, Selected) and dim % max(input.ndim, 1) == 0:
        return _index(input, index)
    return NotImplemented


def _column(places: Selected, at: int) -> Selected:
    at %= places.mask.grid.ndim
    one = places.x.select(-1, at)
    return Selected(one, places.mask, places.rows, places.unselected, places.in_grid, at)


def _alone(func: Any) -> Callable[..., Any]:
    """A view of the places of a mask with one dim that leaves out the dim of columns."""

    def view(x: Any, *args: Any, **kwargs: Any) -> Any:
        one = isinstance(x, Selected) and x.column == -1 and x.mask.grid.ndim == 1
        if one and (func not in _TO_ONE_DIM or args == (-1,)) and args in ((), (1,), (-1,)) and not kwargs:
            return _column(x, 0)
        return NotImplemented

    return view


_TO_ONE_DIM = (Tensor.view, Tensor.reshape)
for _func in (torch.squeeze, Tensor.squeeze, torch.flatten, Tensor.flatten, Tensor.ravel, *_TO_ONE_DIM):
    use(_func)(_alone(_func))


@use(Tensor.unbind, torch.unbind)
def _unbind(x: Any, dim: int = 0) -> Any:
    if isinstance(x, Selected) and x.column == -1 and dim in (1, -1):
        return tuple(_column(x, d) for d in range(x.mask.grid.ndim))
    return NotImplemented


@use(*_PLACES)
def _places_among(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise refused("nonzero")


def _part(x: Selected, which: Selected) -> Selected:
    """The rows of x where `which` is true too."""
    whole = same_mask((x.mask, which.mask), "an index")
    if which.rows.inner != 1 or which.flat().ndim != 1 or x.rows != which.rows:
        raise refused("an index by a mask that is not one of its rows")
    return Selected.of(x.flat(), part_of(whole, which))


def part_of(mask: RowMask, which: Selected) -> RowMask:
    """The mask of the rows of another one where `which` is true too."""
    both = mask.flat & which.filled(0)
    return RowMask(both, ("of", mask.key, id(which), which.x._version), (mask.held, which), mask.masks)


@use(Tensor.__setitem__)
def _set(x: Any, index: Any, value: Any) -> Any:
    if not isinstance(x, Selected):
        return NotImplemented
    applied(put, (x, index, value), {})
    return None


@use(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: int = 0) -> Any:
    """Rows after rows of other masks: all rows after all rows."""
    given = list(tensors)
    selections = [one for one in given if isinstance(one, Selected)]
    rows = selections[0].rows
    if dim % selections[0].ndim != rows.dim or any(one.rows != rows or rows.inner > 1 for one in selections):
        return NotImplemented
    masks: list[Any] = []
    for one in given:
        everything = torch.ones(one.shape[rows.dim], dtype=torch.bool) if isinstance(one, Tensor) else None
        masks.append(one.mask if everything is None else selections[0].mask.masks.of(everything))
    joined = torch.cat([mask.flat for mask in masks])
    key = "cat", tuple(mask.key for mask in masks)
    mask = RowMask(joined, key, masks, selections[0].mask.masks)
    return Selected.of(
        torch.cat([one.flat() if isinstance(one, Selected) else one for one in given], dim), mask, rows.dim
    )
