"""`as_strided` as slices and windows of dims, which a rank can take of its block.

`x.as_strided(size, stride)` names elements by their places in memory. As forward runs, the strides of x say which index a place
is, so that the same view can be named by dims. Each dim of the result walks along the dim of x whose stride divides its own:

    x (batch, chunks, 2w, d), of strides (T·d, 2w·d, d, 1)
    x.as_strided((batch, 2·chunks - 1, 2w, d), (T·d, w·d, d, 1))      walks: batch | - | w rows, one row | one column

Two dims that walk along the same one are a window (`unfold`), one is a slice, none is an index. Where walks lead further than the
dim is long, it is taken together with the dim around it (chunks · 2w rows here), if memory goes on there. Every step is a view of
the same elements: writes to it, and views of it, are those of `as_strided`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autopar.capture.explain import refusal


@dataclass
class _Dim:
    """A dim of the tensor: size, elements of memory from one index to the next, where the view starts, and the dims of the view
    that walk along it, as (number among these, size, indices a step)."""

    size: int
    stride: int
    start: int = 0
    walks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The largest index that is read."""
        return self.start + sum((size - 1) * step for _, size, step in self.walks)


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """`x.as_strided(size, stride, storage_offset)` by slices and windows. Raises CaptureError where it reads elements that are
    not x's, or walks across its dims."""
    size, stride = tuple(map(int, size)), tuple(map(int, stride))
    own = int(x.storage_offset())
    offset = own if storage_offset is None else int(storage_offset)
    order = sorted(range(x.ndim), key=lambda d: x.stride(d), reverse=True)
    view = x.permute(order)
    dims = _walked(view, size, stride, offset - own) if x.numel() and 0 not in size else None
    if dims is None:
        raise refusal(
            f"reads a tensor of shape {tuple(x.shape)} and strides {x.stride()} as one of shape {size} and strides {stride} "
            "(as_strided), whose elements are no slices or windows of its dims",
            "write it with unfold, slices or reshape",
        )
    view = view.reshape([dim.size for dim in dims])
    return _viewed(view, dims, size, stride)


def _walked(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> list[_Dim] | None:
    """The dims of x, taken together where needed, with what walks along each. None where there are no such. x: strides fall."""
    dims = [_Dim(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    while True:
        if _assigned(dims, size, stride, offset):
            beyond = next((i for i in reversed(range(len(dims))) if dims[i].last >= dims[i].size), None)
            if beyond is None:
                return dims
        else:
            return None
        outer, inner = (dims[beyond - 1], dims[beyond]) if beyond else (None, dims[beyond])
        if outer is None or outer.stride != inner.stride * inner.size:
            return None
        dims[beyond - 1 : beyond + 1] = [_Dim(outer.size * inner.size, inner.stride)]


def _assigned(dims: list[_Dim], size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bool:
    """Give each dim of the view to the dim with the largest stride that divides its own, and each the index where the view
    starts. Whether that is possible."""
    rest = offset
    for dim in dims:
        dim.start, rest = divmod(rest, dim.stride) if dim.stride else (0, rest)
        dim.walks = []
    if rest or offset < 0:
        return False
    for i, (n, s) in enumerate(zip(size, stride, strict=True)):
        if n == 1 or s == 0:
            continue
        along = next((dim for dim in dims if dim.stride and dim.stride <= s and s % dim.stride == 0), None)
        if along is None:
            return False
        along.walks.append((i, n, s // along.stride))
    return True


def _viewed(x: Tensor, dims: list[_Dim], size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The view of x, whose dims are these."""
    places: dict[int, int] = {}
    axis = 0
    windows: list[int] = []
    for dim in dims:
        walks = sorted(dim.walks, key=lambda walk: walk[2], reverse=True)
        x = x.narrow(axis, dim.start, dim.last - dim.start + 1)
        if not walks:
            x = x.select(axis, 0)
            continue
        for place, (i, _, step) in enumerate(walks[:-1]):
            length = 1 + sum((n - 1) * s for _, n, s in walks[place + 1 :])
            x = x.unfold(axis if place == 0 else x.ndim - 1, length, step)
            if place == 0:
                places[i] = axis
            else:
                windows.append(i)
        last, _, step = walks[-1]
        at = axis if len(walks) == 1 else x.ndim - 1
        if step > 1:
            x = x[(slice(None),) * at + (slice(None, None, step),)]
        if len(walks) == 1:
            places[last] = axis
        else:
            windows.append(last)
        axis += 1
    places |= {i: axis + n for n, i in enumerate(windows)}
    shown = sorted(places)
    x = x.permute([places[i] for i in shown])
    for i, n in enumerate(size):
        if i not in places:
            x = x.unsqueeze(i)
            x = x.expand([n if d == i else -1 for d in range(x.ndim)])
    return x
