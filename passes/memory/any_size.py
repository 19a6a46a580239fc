"""The effect of a line at any sizes, from two runs at sizes that are primes.

The layers of a model of which none is like another differ in sizes alone. Where an op's memory grows with the sizes of its
operands (`autopar.ops.scaling`) it is run once for all of them: every distinct size is a prime then, in the order of the sizes,
so each number of the result has its factors, and these say from which sizes it comes:

    relu of (300, 77) float32         at (103, 101) it makes 103 · 101 · 4 bytes        at (a, b) it makes a · b · 4

A second run at other primes must have the same factors; where it has not, as where sizes are added up, the line is run at its
own sizes. Sizes of one and none stay as they are, since they broadcast, and sizes that are equal are one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from autopar.counter import ByteCounter, ChangeCounter
from autopar.ir.lines import Compute
from autopar.ir.mesh import Extent
from autopar.ops.registry import Offset
from autopar.ops.scaling import scales_of
from autopar.passes.played.tensors import Effect, Layout, Out

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137), (211, 223, 227, 229, 233, 239, 241, 251)
_PLACED = 2
"""Numbers from here on stand for sizes."""
_FLAT = 2
"""A tensor of so many dims may have any strides: they lie densely or they do not. Those of more dims are to be sizes of it."""
Product = tuple[int, tuple[int, ...]]
"""A number, and how often every size is a factor of it beside."""
Run = Callable[[Compute, tuple[Layout, ...], ByteCounter], Effect]
"""Runs a line on operands that lie so, under a counter."""


@dataclass(frozen=True)
class AnySize:
    """A line of which sizes are told by their places: n + 2 stands for `sizes[n]`, in ascending order. layouts: of its operands;
    a stride of () is that of a dense tensor."""

    line: Compute
    layouts: tuple[Layout, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Grown:
    """An effect at any sizes. outs: alias and fresh storage of every result, with shape, stride and dtype; changes: of the bytes
    alive, in order."""

    outs: tuple[tuple[int, int, tuple[tuple[Product, ...], tuple[Product, ...], torch.dtype] | None], ...]
    fresh: tuple[Product, ...]
    changes: tuple[Product, ...]

    def at(self, sizes: Sequence[int]) -> Effect:
        """The effect at these sizes."""
        outs = tuple(
            Out(alias, fresh, None if form is None else Layout(_at(form[0], sizes), _at(form[1], sizes), form[2]))
            for alias, fresh, form in self.outs
        )
        fresh = _at(self.fresh, sizes)
        return Effect(outs, fresh, max(sum(fresh), *accumulate(self.changes_at(sizes), initial=0)))

    def changes_at(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The changes at these sizes."""
        return _at(self.changes, sizes)


def _at(products: tuple[Product, ...], sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers that products are at these sizes."""
    return tuple(
        math.prod((n**power for n, power in zip(sizes, powers, strict=True)), start=factor)
        for factor, powers in products
    )


def any_size(line: Compute, layouts: Sequence[Layout]) -> AnySize | None:
    """The line at any sizes, if its op's memory grows with these. Places in tensors, and numbers that change nothing, are left
    out of it, so lines that differ in no more are equal but for `sizes`."""
    scales = scales_of(line.op)
    if scales is None or line.carried:
        return None
    kwargs = {name: _at_start(value) for name, value in line.kwargs.items()} | dict.fromkeys(scales.unread, 0)
    given = [kwargs[name] for name in scales.sizes]
    if any(isinstance(value, Extent) or (isinstance(value, Offset) and value.size) for value in kwargs.values()):
        return None  # blocks are of unequal length
    strides = (n for layout in layouts if len(layout.shape) <= _FLAT for n in layout.stride)
    sizes = sorted({n for n in (*given, *strides, *(n for layout in layouts for n in layout.shape)) if n >= _PLACED})
    if len(sizes) > len(_PRIMES[0]):
        return None
    place = {n: i + _PLACED for i, n in enumerate(sizes)}
    placed = [_placed(layout, place) for layout in layouts]
    if not all(placed):
        return None
    kwargs |= {name: place.get(n, n) for name, n in zip(scales.sizes, given, strict=True)}
    return AnySize(replace(line, kwargs=kwargs), tuple(filter(None, placed)), tuple(sizes))


def grown(line: AnySize, run: Run) -> Grown | None:
    """The effect of a line at any sizes; None: its numbers are no products of them."""
    first, second = (_grown(line, run, primes[: len(line.sizes)]) for primes in _PRIMES)
    return first if first == second else None


def _grown(one: AnySize, run: Run, primes: Sequence[int]) -> Grown:
    scales = scales_of(one.line.op)
    assert scales is not None
    prime_of = {i + _PLACED: prime for i, prime in enumerate(primes)}
    kwargs = one.line.kwargs
    kwargs = kwargs | {name: prime_of.get(kwargs[name], kwargs[name]) for name in scales.sizes}
    counter = ChangeCounter()
    effect = run(replace(one.line, kwargs=kwargs), tuple(_sized(x, prime_of) for x in one.layouts), counter)
    return in_products(effect, counter.changes, primes)


def in_products(effect: Effect, changes: Sequence[int], primes: Sequence[int]) -> Grown:
    """An effect at sizes that are primes as one at any sizes. changes: of the bytes alive, in order."""

    def products(numbers: Sequence[int]) -> tuple[Product, ...]:
        return tuple(_product(n, primes) for n in numbers)

    outs = (
        (out.alias, out.fresh, None if x is None else (products(x.shape), products(x.stride), x.dtype))
        for out in effect.outs
        for x in [out.layout]
    )
    return Grown(tuple(outs), products(effect.fresh), products(changes))


def _at_start(value: Any) -> Any:
    """A place in a tensor is as good as any other one."""
    return Offset(value.axes, 1) if isinstance(value, Offset) and not value.size else value


def _placed(layout: Layout, place: Mapping[int, int]) -> Layout | None:
    """The layout with places for its sizes; None where its strides are no sizes."""
    shape = tuple(place.get(n, n) for n in layout.shape)
    if layout.stride == Layout.dense(layout.shape, layout.dtype).stride:
        return replace(layout, shape=shape, stride=())
    strides = {1, *(layout.stride if len(layout.shape) <= _FLAT else layout.shape)}
    if min(layout.shape) < _PLACED or not strides.issuperset(layout.stride):
        return None
    return replace(layout, shape=shape, stride=tuple(place.get(n, n) for n in layout.stride))


def _sized(layout: Layout, size_of: Mapping[int, int]) -> Layout:
    """The layout with sizes for its places."""
    shape = tuple(size_of.get(n, n) for n in layout.shape)
    stride = tuple(size_of.get(n, n) for n in layout.stride) or Layout.dense(shape, layout.dtype).stride
    return replace(layout, shape=shape, stride=stride)


def _product(n: int, primes: Sequence[int]) -> Product:
    """A number by its factors."""
    powers = []
    for prime in primes:
        power = 0
        while n and n % prime == 0:
            n, power = n // prime, power + 1
        powers.append(power)
    return n, tuple(powers)
