"""Tensors that are a layout and a storage of so many bytes, over which the runtime's own code runs.

A function of torch is asked once in a search per layouts of its operands, on meta tensors under a counter: which results are
views, which are new, and what it needs for a moment. From then on it takes a look-up, ten times less than on meta tensors. What
changes a tensor in place makes nothing. A storage lives as long as Python holds a tensor that lies in it, as it does when the
code runs on a device, and the ledger that it is written in says what is alive:

    ledger = Ledger()
    x = ledger.tensor(Layout.dense((1024,), torch.float32))     ledger.alive == 4096
    y = x.view(32, 32).t().contiguous()                         ledger.alive == 8192
    del x                                                       ledger.alive == 4096
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from autopar.counter import ByteCounter
from autopar.passes.rules.memo import Memo

_ROWS = 3
"""How many of a tensor's rows are walked over: what is done with the others is the same."""


@dataclass(frozen=True)
class Layout:
    """How a local tensor lies in memory. in_room: behind the one before it among operands, if that is of the same layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    in_room: bool = False

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Contiguous."""
        stride, step = [], 1
        for n in reversed(shape):
            stride.append(step)
            step *= max(n, 1)
        return Layout(tuple(shape), tuple(reversed(stride)), dtype)

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, device: str = "meta") -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Out:
    """A result: a view of operand `alias`, or (alias -1) in the fresh storage number `fresh`. None: no tensor."""

    alias: int
    fresh: int
    layout: Layout | None


@dataclass(frozen=True)
class Effect:
    """fresh: bytes of the storages that the results bring. peak: the most new bytes at once, those included."""

    outs: tuple[Out, ...]
    fresh: tuple[int, ...]
    peak: int


def watch(
    run: Callable[[list[torch.Tensor]], Any],
    layouts: Sequence[Layout],
    device: str = "meta",
    counter: ByteCounter | None = None,
) -> Effect:
    """The effect of a function of tensors. counter: that counts what it makes."""
    tensors = _tensors(layouts, device)
    given = {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}
    counter = counter or ByteCounter()
    with torch.no_grad(), counter:
        result = run(tensors)
    outs, sizes = results_of(result, given)
    return Effect(outs, sizes, max(counter.peak, sum(sizes)))


def _tensors(layouts: Sequence[Layout], device: str) -> list[torch.Tensor]:
    """A tensor of each layout; those that are in rooms lie one after another."""
    tensors: list[torch.Tensor] = []
    for layout, same in groupby(layouts):
        count = len(list(same))
        if layout.in_room and count > 1:
            tensors += Layout.dense((count, *layout.shape), layout.dtype).tensor(device)
        else:
            tensors += [layout.tensor(device) for _ in range(count)]
    return tensors


def results_of(result: Any, given: Mapping[int, int]) -> tuple[tuple[Out, ...], tuple[int, ...]]:
    """A function's results, and the bytes of the storages that it brings. given: the operands by their storages."""
    outs: list[Out] = []
    fresh: dict[int, int] = {}
    sizes: list[int] = []
    for value in result if isinstance(result, (tuple, list)) else [result]:
        if not isinstance(value, torch.Tensor):
            outs.append(Out(-1, -1, None))
            continue
        storage = value.untyped_storage()
        alias = given.get(storage._cdata, -1)
        if alias < 0 and storage._cdata not in fresh:
            fresh[storage._cdata] = len(sizes)
            sizes.append(storage.nbytes())
        outs.append(Out(alias, fresh.get(storage._cdata, -1), Layout.of(value)))
    return tuple(outs), tuple(sizes)


class Ledger:
    """The storages that are alive. alive: their bytes on the device; top: the most since it was set; parked: bytes in memory
    tiers, by tier. memo: of what functions of torch were found to do."""

    def __init__(self, memo: Memo | None = None) -> None:
        memo = memo or Memo()
        self.effect, self.viewed, self.contiguous = memo[_effect], memo[_viewed], memo[_contiguous]
        self.alive = self.top = 0
        self.parked: dict[str, int] = {}

    def tensor(self, layout: Layout, tier: str = "") -> PlayedTensor:
        """A tensor in a storage of its own, on the device or in a tier."""
        return PlayedTensor(Storage(self, layout.nbytes, tier), layout)

    def peak(self, nbytes: int) -> None:
        """So much beside what is alive, for a moment."""
        self.top = max(self.top, self.alive + nbytes)


class Storage:
    """Bytes that count from now on until nobody holds them."""

    __slots__ = ("__weakref__", "ledger", "nbytes", "tier")

    def __init__(self, ledger: Ledger, nbytes: int, tier: str = "") -> None:
        self.ledger, self.nbytes, self.tier = ledger, nbytes, tier
        self._count(nbytes)

    def __del__(self) -> None:
        self._count(-self.nbytes)

    def _count(self, nbytes: int) -> None:
        ledger = self.ledger
        if self.tier:
            ledger.parked[self.tier] = ledger.parked.get(self.tier, 0) + nbytes
        else:
            ledger.alive += nbytes
            ledger.top = max(ledger.top, ledger.alive)


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: _asked(function, operands, {})


class PlayedTensor:
    """Stands for a tensor wherever code uses its methods and functions of torch."""

    __slots__ = ("layout", "storage")

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self.storage, self.layout = storage, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def stride(self) -> tuple[int, ...]:
        return self.layout.stride

    def dim(self) -> int:
        return len(self.layout.shape)

    def numel(self) -> int:
        return math.prod(self.layout.shape)

    def element_size(self) -> int:
        return self.layout.dtype.itemsize

    def is_contiguous(self) -> bool:
        return self.storage.ledger.contiguous(self.layout)

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> PlayedTensor:
        sizes = shape if len(shape) != 1 or isinstance(shape[0], int) else shape[0]
        return self.storage.ledger.tensor(Layout.dense(sizes, dtype or self.dtype))

    def __getitem__(self, index: Any) -> Any:
        """Parts by slices without a step are asked of nobody, as buckets are cut in many."""
        slices, layout = index if isinstance(index, tuple) else (index,), self.layout
        if all(isinstance(one, slice) and one.step is None for one in slices):
            sizes = [
                stop - start
                for n, one in zip(layout.shape, slices, strict=False)
                for start, stop, _ in [one.indices(n)]
            ]
            return PlayedTensor(
                self.storage, Layout((*sizes, *layout.shape[len(sizes) :]), layout.stride, layout.dtype)
            )
        return _asked(torch.Tensor.__getitem__, (self, index), {})

    def __iter__(self) -> Iterator[Any]:
        return iter([self[0]] * min(self.layout.shape[0], _ROWS))

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") and not name.startswith("_"):
            return lambda *_, **__: self
        return partial(_method, getattr(torch.Tensor, name), self)

    __add__, __sub__, __truediv__ = _operator(torch.add), _operator(torch.sub), _operator(torch.div)
    __lt__, __lshift__ = _operator(torch.lt), _operator(torch.bitwise_left_shift)
    __invert__ = _operator(torch.bitwise_not)

    @classmethod
    def __torch_function__(cls, function: Any, _: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        return _asked(function, args, kwargs or {})


def _method(function: Callable[..., Any], tensor: PlayedTensor, *args: Any, **kwargs: Any) -> Any:
    """The result of a tensor's method; most methods give a view."""
    if not kwargs and PlayedTensor not in map(type, args):
        ledger = tensor.storage.ledger
        layout = ledger.viewed(ledger.effect, function, tensor.layout, args)
        if layout is not None:
            return PlayedTensor(tensor.storage, layout)
    return _asked(function, (tensor, *args), kwargs)


def _viewed(
    effect_of: Callable[..., tuple[Effect, type | None]],
    function: Callable[..., Any],
    layout: Layout,
    args: tuple[Any, ...],
) -> Layout | None:
    """The layout of the view that a tensor's method gives, if it gives one and needs nothing."""
    effect, kind = effect_of(function, 1 + len(args), (), (layout, *args))
    return None if effect.peak or kind is not None or effect.outs[0].alias else effect.outs[0].layout


def _asked(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a function of torch for these arguments."""
    values = (*args, *kwargs.values())
    tensors = [value for value in values if type(value) is PlayedTensor]
    known = tuple(value.layout if type(value) is PlayedTensor else value for value in values)
    ledger = tensors[0].storage.ledger
    effect, kind = ledger.effect(function, len(args), tuple(kwargs), known)
    if effect.peak:
        ledger.peak(effect.peak)
    fresh = [Storage(ledger, nbytes) for nbytes in effect.fresh]
    outs = [
        PlayedTensor(tensors[out.alias].storage if out.alias >= 0 else fresh[out.fresh], out.layout)
        for out in effect.outs
        if out.layout is not None
    ]
    return outs[0] if kind is None else kind(outs)


def _effect(
    function: Callable[..., Any], positional: int, names: tuple[str, ...], values: tuple[Any, ...]
) -> tuple[Effect, type | None]:
    """A function's results for values, layouts instead of tensors among them, and in what it gives more than one result."""
    kinds: list[type] = []

    def run(tensors: list[torch.Tensor]) -> Any:
        left = iter(tensors)
        given = [next(left) if isinstance(v, Layout) else v for v in values]
        result = function(*given[:positional], **dict(zip(names, given[positional:], strict=True)))
        kinds.append(type(result))
        return result

    effect = watch(run, [value for value in values if isinstance(value, Layout)])
    return effect, None if issubclass(kinds[0], torch.Tensor) else kinds[0]


def _contiguous(layout: Layout) -> bool:
    return layout.tensor().is_contiguous()
