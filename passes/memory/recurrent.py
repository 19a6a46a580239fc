"""The bytes of a layer of a recurrent network, whose kernels no meta function knows, from real runs at small sizes.

Every storage that its kernels make has a product of sizes as its bytes, and runs at primes say of which (`any_size`). Time alone
is no such size: the kernels make some storages step by step. So runs have as many steps, or, of more than 64, two numbers of
steps: the most bytes in every part of a run grow with further ones.

    gru of (500 steps, 32 rows, 1024, 2048)       runs: (32 and 64 steps, 11 rows, 13, 17) and (…, 31 rows, 37, 41)

The workspace of oneDNN's LSTM has parts that are padded and rounded up to whole pages, so it is no product. That layer has no
storages by step, so it is run at a few sizes in each dim, padded as its own ones are, and its bytes are polynomials of sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import torch

from autopar.counter import ChangeCounter
from autopar.ir.lines import Compute, Ref
from autopar.passes.memory.any_size import Grown, in_products
from autopar.passes.played.tensors import Effect, Layout, Out, watch
from autopar.passes.rules.memo import Memo

SMALL = 64 << 10
"""Layers whose operands have so many bytes at most are run as they are."""
_PRIMES = {"b": (11, 31), "i": (13, 37), "h": (17, 41), "p": (19, 43)}
"""Two sizes each of rows, inputs, hidden values and outputs."""
_STEPS = (32, 64)
"""Steps of the runs that stand for more."""
_PARTS = 16
"""Parts of a run whose peaks grow each in its own way with time: where forward ends, where backward does."""
_DIMS = {"x": "tbi", "g_out": "tbp", "h0": "bp", "g_h": "bp", "c0": "bh", "g_c": "bh"}
_DIMS |= {"w_ih": "gi", "w_hh": "gp", "b_ih": "g", "b_hh": "g", "w_hr": "ph"}
"""The dims of operands: time, batch, input, output, hidden, and gates (a multiple of hidden)."""
Sizes = Mapping[str, int]
Run = Callable[[list[torch.Tensor]], Any]
Numbers = tuple[int, ...]


def recurrent(line: Compute, layouts: tuple[Layout, ...], run: Run, memo: Memo) -> Effect:
    """The effect of a layer, forward or backward. run: of its operands; memo: of what was found for other sizes of it."""
    if sum(layout.nbytes for layout in layouts) <= SMALL:
        return watch(run, layouts, "cpu")
    layer = _Layer.of(line, layouts)
    steps = layer.sizes["t"]
    counts = _STEPS if steps > max(_STEPS) else (steps,)
    key = recurrent, line.op, line.kwargs["mode"], layer.without_sizes, counts
    of_counts = memo.get(key, lambda: [_at_primes(layer, run, count) for count in counts])
    grown = [of_count for of_count in of_counts if of_count is not None]
    if len(grown) < len(counts):
        return _grown_polynomially(layer, run)
    sizes = [layer.sizes[dim] for dim in layer.primes]
    effects = [of_count.at(sizes) for of_count in grown]
    if len(effects) == 1:
        return effects[0]
    peaks = [_peaks(of_count.changes_at(sizes)) for of_count in grown]
    return _extended([_Watched(*one) for one in zip(effects, peaks, strict=True)], counts, steps).effect


@dataclass(frozen=True)
class _Layer:
    """Operands of a layer. dims: of each, as letters; sizes: by letter."""

    layouts: tuple[Layout, ...]
    dims: tuple[str, ...]
    sizes: Sizes
    gates: int

    @staticmethod
    def of(line: Compute, layouts: tuple[Layout, ...]) -> _Layer:
        names = {value.name: name for name, value in reversed([*line.kwargs.items()]) if isinstance(value, Ref)}
        given = [names[f"v{i}"] for i in range(len(layouts))]
        projected = "w_hr" in given
        dims = tuple(_DIMS[name] if projected else _DIMS[name].replace("p", "h") for name in given)
        sizes = {
            dim: n for letters, x in zip(dims, layouts, strict=True) for dim, n in zip(letters, x.shape, strict=True)
        }
        if "h" not in sizes:
            sizes["h"] = sizes["p"]
        return _Layer(layouts, dims, sizes, sizes["g"] // sizes["h"])

    @property
    def primes(self) -> tuple[str, ...]:
        """The dims that are primes in small runs: all but time, and those of one."""
        return tuple(dim for dim in _PRIMES if self.sizes.get(dim, 1) > 1)

    @property
    def without_sizes(self) -> Any:
        """The part of the layer that its bytes follow from beside sizes."""
        orders = tuple((_order(x), x.dtype, x.in_room) for x in self.layouts)
        return self.dims, self.gates, self.primes, orders

    def at(self, **others: int) -> tuple[Layout, ...]:
        """The operands with other sizes, which lie in memory in the same order of dims."""
        sizes = dict(self.sizes) | others
        sizes["g"] = self.gates * sizes["h"]
        return tuple(
            _lying(x, tuple(sizes[dim] for dim in letters)) for letters, x in zip(self.dims, self.layouts, strict=True)
        )


def _order(layout: Layout) -> Numbers:
    """Dims from the one with the largest stride on."""
    return tuple(sorted(range(len(layout.shape)), key=lambda d: (-layout.stride[d], d)))


def _lying(layout: Layout, shape: Numbers) -> Layout:
    """A dense layout of another shape, whose dims lie in the same order."""
    stride, length = [1] * len(shape), 1
    for d in reversed(_order(layout)):
        stride[d], length = length, length * shape[d]
    return replace(layout, shape=shape, stride=tuple(stride))


def _at_primes(layer: _Layer, run: Run, steps: int) -> Grown | None:
    """The effect of so many steps at any other sizes; None where its numbers are no products of them."""
    found = []
    for k in (0, 1):
        primes = {dim: _PRIMES[dim][k] for dim in layer.primes}
        effect, changes = _watched(run, layer.at(t=steps, **primes))
        found.append(in_products(effect, changes, list(primes.values())))
    return found[0] if found[0] == found[1] else None


def _watched(run: Run, layouts: tuple[Layout, ...]) -> tuple[Effect, list[int]]:
    """The effect of a run, and the changes of the bytes alive until nothing more is made: Python says when its last values go."""
    counter = ChangeCounter()
    effect = watch(run, layouts, "cpu", counter)
    changes = counter.changes
    while changes and changes[-1] < 0:
        changes.pop()
    return effect, changes


def _peaks(changes: Sequence[int]) -> Numbers:
    """The most bytes alive in every part of a run. changes: of these bytes, in order."""
    alive = [*accumulate(changes)]
    ends = [len(alive) * k // _PARTS for k in range(_PARTS + 1)]
    return tuple(max(alive[max(a - 1, 0) : b], default=0) for a, b in pairwise(ends))


@dataclass(frozen=True)
class _Watched:
    """An effect and the bytes that were alive one time after another."""

    effect: Effect
    alive: Numbers


def _grown_polynomially(layer: _Layer, run: Run) -> Effect:
    """The effect where some number is no product of sizes: every number is a polynomial of each size, of the degree that its
    points allow."""

    def ran(sizes: dict[str, int], open_dims: Sequence[tuple[str, Numbers]]) -> _Watched:
        if not open_dims:
            effect, changes = _watched(run, layer.at(**sizes))
            return _Watched(effect, tuple(accumulate(changes)))
        (dim, points), *others = open_dims
        return _extended([ran({**sizes, dim: n}, others) for n in points], points, layer.sizes[dim])

    return ran({}, [*_points(layer.sizes).items()]).effect


def _points(sizes: Sizes) -> dict[str, Numbers]:
    """The sizes that a layer is run at in place of its own ones. Where rows are multiples of 128 nothing is rounded up to whole
    pages, and widths that differ by 256 are padded alike."""
    widest = sizes["i"] > sizes["h"]
    hidden = tuple(n + sizes["h"] % 256 for n in (256, 512, 768))
    inputs = tuple(n + sizes["i"] % 256 for n in (1024, 1280)) if widest else (64, 128)
    points = {"t": (2, 3), "b": (128, 256), "i": inputs, "h": hidden, "p": (64, 128)}
    return {dim: at if (n := sizes[dim]) > at[-1] or dim == "b" else (n,) for dim, at in points.items() if dim in sizes}


def _extended(ran: Sequence[_Watched], points: Numbers, count: int) -> _Watched:
    """A run at a count, by those at some points."""
    if len(points) == 1:
        return ran[0]
    weights = [
        math.prod((Fraction(count - other, point - other) for other in points if other != point), start=Fraction(1))
        for point in points
    ]

    def at(*numbers: int) -> int:
        return math.ceil(sum(weight * n for weight, n in zip(weights, numbers, strict=True)))

    fresh = tuple(map(at, *(one.effect.fresh for one in ran)))
    alive = tuple(at(*numbers) for numbers in zip(*(one.alive for one in ran), strict=True))
    outs = tuple(_out(of_runs, at) for of_runs in zip(*(one.effect.outs for one in ran), strict=True))
    return _Watched(Effect(outs, fresh, max(sum(fresh), *alive)), alive)


def _out(of_runs: Sequence[Out], at: Callable[..., int]) -> Out:
    """A result of several runs as that of another. at: a number of it, by those of the runs."""
    layouts = [out.layout for out in of_runs if out.layout is not None]
    if len(layouts) < len(of_runs):
        return of_runs[-1]
    shape, stride = (tuple(map(at, *numbers)) for numbers in ([x.shape for x in layouts], [x.stride for x in layouts]))
    return replace(of_runs[-1], layout=replace(layouts[-1], shape=shape, stride=stride))
