"""Selected rows that are written back: where the mask is true, all rows of theirs, elsewhere what was there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.capture.while_traced.row_masks import RowMask, RowMasks, key_of
from autopar.capture.while_traced.selected import USES, Selected, asked, refused, use
from autopar.capture.while_traced.selections import columns_of, mask_among, mask_of_rows

_set_selected = USES[Tensor.__setitem__]


@use(Tensor.__setitem__)
def _set(x: Any, index: Any, value: Any) -> None:
    if isinstance(x, Selected):
        return _set_selected(x, index, value)
    x.copy_(_put(x, index if isinstance(index, tuple) else (index,), value))
    return None


def set_rows(func: Any, args: Any, masks: RowMasks) -> bool:
    """Whether a call writes a tensor, or a number, to the rows that a mask selects; it is written. Its rows are those of the mask
    one after another, of which there must be as many, or one for all."""
    if func is not Tensor.__setitem__ or len(args) != 3 or not isinstance(args[0], Tensor):
        return False
    x, index, value = args
    if isinstance(value, (bool, int, float)):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    found = mask_among(index) if isinstance(value, Tensor) else None
    if found is None or x.shape[found[0] : found[0] + found[1].ndim] != found[1].shape:
        return False
    (dim, mask), features = found, x.ndim - found[0] - found[1].ndim
    value = value.to(x.dtype)
    if value.ndim > features and dim:
        return False
    if value.ndim == features + 1 and value.shape[0] == 1:
        value = value[0]
    if value.ndim == features + 1:
        masks.hold(mask.sum() == value.shape[0], True)
        order = (mask.flatten().cumsum(0) - 1).clamp(0, value.shape[0] - 1)
        value = value.index_select(0, order).unflatten(0, mask.shape)
    elif value.ndim > features:
        return False
    by = masks.of(mask)
    x.copy_(torch.where(by.like(by.grid, x.ndim, dim), value, x))
    return True


def _put(x: Tensor, index: tuple[Any, ...], value: Any) -> Tensor:
    """x with rows in the place of those that an index chooses."""
    if (dims := columns_of(index)) is not None and dims == len(index):
        mask = index[0].mask
        return _replaced(x, mask, 0, value)
    found = mask_among(index)
    if found is None or not isinstance(value, Selected) or value.mask.key != key_of(found[1]):
        raise refused("writing back by another index than the mask, or its nonzero(),")
    return _replaced(x, value.mask, found[0], value, found[1].shape)


def _replaced(x: Tensor, mask: RowMask, dim: int, value: Any, shape: Any = None) -> Tensor:
    """x with a value where the mask is true."""
    shape = mask.grid.shape if shape is None else shape
    if x.shape[dim : dim + len(shape)] != shape:
        raise refused("writing back to a tensor of other dims than the mask")
    where = mask.like(mask.flat.reshape(shape), x.ndim, dim)
    return torch.where(where, _as_all_rows(x, mask, dim, shape, value), x)


def _as_all_rows(x: Tensor, mask: RowMask, dim: int, shape: Any, value: Any) -> Any:
    if isinstance(value, Selected):
        if value.mask.key != mask.key or value.rows.dim != dim or value.rows.inner != 1:
            raise refused("writing back rows of another mask")
        rows = value.flat()
        if rows.ndim != x.ndim - len(shape) + 1:
            raise refused(
                f"writing back rows of {rows.ndim - 1} dims to a tensor whose rows have {x.ndim - len(shape)}"
            )
        return rows.unflatten(dim, shape).to(x.dtype)
    if isinstance(value, Tensor) and value.ndim > x.ndim - len(shape) - dim:
        raise refused("writing rows that no mask selects")
    return value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)


@use(torch.index_put, Tensor.index_put)
def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if not isinstance(input, Tensor):
        return NotImplemented
    index = tuple(indices)
    if not accumulate:
        return _put(input, index, values)
    if columns_of(index) != len(index) or not isinstance(values, Selected):
        raise refused("adding to rows by another index than its nonzero()")
    return input + _as_all_rows(input, index[0].mask, 0, index[0].mask.grid.shape, _zeroed(values))


def _zeroed(rows: Selected) -> Selected:
    rows.flat()
    return Selected(rows.filled(0), rows.mask, rows.rows, rows.unselected)


@use(torch.index_copy, Tensor.index_copy)
def _index_copy(input: Any, dim: int, index: Any, source: Any) -> Any:
    if not isinstance(input, Tensor) or dim % input.ndim:
        return NotImplemented
    return _put(input, (index,), source)


@use(torch.index_add, Tensor.index_add)
def _index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
    """Rows that are not selected add zeros, wherever their index says."""
    if not isinstance(input, Tensor) or not (isinstance(index, Selected) and isinstance(source, Selected)):
        return NotImplemented
    if index.mask.key != source.mask.key or index.rows != source.rows or dim % input.ndim != source.rows.dim:
        raise refused("index_add of rows and indices of different masks")
    if columns_of((index,)) == 1 and input.shape[0] == index.mask.flat.numel():
        return _index_put(input, (index,), source if alpha == 1 else asked(Tensor.mul, source, alpha), True)
    source.flat(), index.flat()
    return input.index_add(dim, index.filled(0), source.filled(0), alpha=alpha)


@use(torch.masked_scatter, Tensor.masked_scatter)
def _masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    """Rows that the same mask selected, back where they were."""
    rows = mask_of_rows(mask, input) if isinstance(input, Tensor) and isinstance(mask, Tensor) else None
    if rows is None or not isinstance(source, Selected) or source.mask.key != key_of(rows) or source.rows.dim:
        raise refused("masked_scatter of rows of another mask")
    at = source.rows.inner if source.ndim == 1 else 1
    values = (
        source.reshape(source.mask.count, *input.shape[rows.ndim :]) if source.flat().ndim != 1 or at > 1 else source
    )
    return _replaced(input, source.mask, 0, values, rows.shape)


def _in_place(own: Any) -> Any:
    def write(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(input, *args, **kwargs)
        if result is NotImplemented:
            return result
        return input.copy_(result)

    return write


for _name, _own in (
    ("index_put_", _index_put),
    ("index_copy_", _index_copy),
    ("index_add_", _index_add),
    ("masked_scatter_", _masked_scatter),
):
    use(getattr(Tensor, _name))(_in_place(_own))
use(torch.index_put_)(_in_place(_index_put))
