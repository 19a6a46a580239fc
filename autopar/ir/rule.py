"""A Rule says what sharding an op allows, as one line over *factors* (the indices of the op).

    b s i, o i -> b s o        a linear layer: i is only in operands, so sharding it leaves the result partial (sum)
    b s (h d!) -> b s h d!     splitting a view: h can be sharded; where a major factor is cut up, so can the next
    n v!, v! -> n v!           `!` marks a factor that must stay whole
    b s h<max -> b s           a contracted factor that owes a max instead of a sum
    .                          an operand or result dim of size one (or an operand without dims: write `1`)

A *strategy* gives each mesh axis one choice: a factor to shard, `""` (every rank along the axis does the same work),
`~k` (linear group k: those operands may arrive as partial sums, and the results leave as partial sums), or `+s+t`: the axis
shards these factors together and the op's implementation sends along it what a block lacks, though its rule may want
them whole (a ring of attention has query rows and keys in blocks). From rule and strategy follow the specs of operands
and results, local shapes, and what is owed. Nothing else in the compiler needs to know the op.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from autopar.errors import ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec

Labels = tuple[tuple[str, ...], ...]
Strategy = tuple[str, ...]
Parts = Mapping[str, Any]
"""Into how many blocks factors are cut: whole numbers, and fractions where blocks are not equal."""


@dataclass(frozen=True)
class Factor:
    """An op index. `whole`: may not be sharded. `reduce`: what a contracted, sharded factor leaves owed."""

    size: int
    whole: bool = False
    reduce: str = "sum"


@dataclass(frozen=True)
class Carried:
    """A choice that comes with messages inside the op: one mesh axis shards these factors together.

    Of a strategy at most so many `axes` take it, messages going along one after the other, and no other axis shards any of the
    factors but the first. owed: results that leave as partial sums over these axes. uneven: where no more axes than so many take
    it, blocks may be of unequal size.
    """

    factors: tuple[str, ...]
    owed: tuple[int, ...] = ()
    axes: int = 1
    uneven: int = 0

    @property
    def choice(self) -> str:
        """`+s+t`."""
        return "".join(f"+{factor}" for factor in self.factors)


@cache
def factors_of(choice: str) -> tuple[str, ...]:
    """The factors that an axis shards which makes this choice."""
    if choice.startswith("+"):
        return tuple(choice[1:].split("+"))
    return () if not choice or choice[0] == "~" else (choice,)


def carried_choices(strategy: Strategy, mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """The axes of several ranks that take a choice with messages, and which."""
    taken = zip(mesh.axes, strategy, strict=True)
    return tuple((axis, choice) for (axis, size), choice in taken if size > 1 and choice.startswith("+"))


@dataclass(frozen=True)
class Rule:
    """`operands[i]`, `results[i]`: per dim the factors it is made of, major first (None: not a tensor). added: operands that are
    terms of the result's sum, so that they arrive as partial sums over an axis that shards what the op contracts."""

    operands: tuple[Labels | None, ...]
    results: tuple[Labels | None, ...]
    factors: dict[str, Factor] = field(hash=False)
    linear: tuple[frozenset[int], ...] = ()
    carried: tuple[Carried, ...] = ()
    added: frozenset[int] = frozenset()

    @cached_property
    def majors(self) -> dict[str, frozenset[str]]:
        """Per factor that is not whole and larger than one those that come before it in a dim that contains both."""
        majors: dict[str, set[str]] = {name: set() for name, f in self.factors.items() if not f.whole and f.size > 1}
        for labels in (*self.operands, *self.results):
            for dim in labels or ():
                real = [f for f in dim if self.factors[f].size > 1]
                for i, f in enumerate(real):
                    if f in majors:
                        majors[f].update(real[:i])
        return {name: frozenset(before) for name, before in majors.items()}

    @cached_property
    def shardable(self) -> tuple[str, ...]:
        """Factors that an axis may take: not whole, larger than one, and leading in every dim that contains them."""
        return tuple(name for name, before in self.majors.items() if not before)

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Factors that an axis may take where other axes cut all that come before them into single indices: then blocks of the
        composite dim are contiguous."""
        return tuple(name for name, before in self.majors.items() if before and before <= self.majors.keys())

    @cached_property
    def contracted(self) -> frozenset[str]:
        """Factors that occur in operands."""
        return frozenset(f for labels in self.operands for dim in labels or () for f in dim)

    @cached_property
    def summed(self) -> frozenset[str]:
        """Factors of operands that no result has, over which sums are owed."""
        held = {f for labels in self.results for dim in labels or () for f in dim}
        return frozenset(f for f in self.contracted - held if self.factors[f].reduce == "sum")

    @cached_property
    def carries(self) -> dict[str, Carried]:
        """The choices that come with messages, but those whose factors cannot be cut."""
        cut = (one for one in self.carried if all(f in self.factors and self.factors[f].size > 1 for f in one.factors))
        return {one.choice: one for one in cut}

    @cached_property
    def form(self) -> Rule:
        """The rule whatever the sizes of its factors, of which it is known whether they are one: the same object for all rules of
        one form."""
        of_any_size = {name: replace(factor, size=min(factor.size, 2)) for name, factor in self.factors.items()}
        return _one_of_each(Rule(self.operands, self.results, of_any_size, self.linear, self.carried, self.added))

    def choices(self) -> tuple[str, ...]:
        """The choices of one mesh axis."""
        return (*self.shardable, "", *(f"~{k}" for k in range(len(self.linear))), *self.inner, *self.carries)

    def allows(self, strategy: Strategy, mesh: Mesh) -> bool:
        """Whether every choice exists, they agree with each other, and every sharded factor divides."""
        possible = self.form._possible
        if strategy not in possible:
            choices = self.choices()
            possible[strategy] = all(choice in choices for choice in strategy) and self.agrees(strategy)
        return possible[strategy] and self._divides(strategy, mesh)

    @cached_property
    def _possible(self) -> dict[Strategy, bool]:
        """Whether the choices of a strategy exist and agree, of those that were asked for."""
        return {}

    def agrees(self, strategy: Strategy) -> bool:
        """Whether what the axes choose does not exclude each other, and minor factors follow those that come before them."""
        taken = [factors_of(choice) for choice in strategy]
        for place, factors in enumerate(taken):
            for major in self.needed(factors):
                if not any(major in others for others in taken[:place]) or any(major in f for f in taken[place:]):
                    return False
        for choice in strategy:
            if choice.startswith("+"):
                own, times = self.carries[choice].factors, strategy.count(choice)
                others = [f for c in strategy for f in factors_of(c)]
                if times > self.carries[choice].axes or any(others.count(f) > times for f in own[1:]):
                    return False
                if any(c.startswith("+") and c != choice and own[0] in factors_of(c) for c in strategy):
                    return False
        return True

    def needed(self, factors: Iterable[str]) -> frozenset[str]:
        """The factors that must be cut into single indices where these are cut."""
        return frozenset().union(*(self.majors.get(f, frozenset()) for f in factors))

    def _divides(self, strategy: Strategy, mesh: Mesh) -> bool:
        if mesh.uneven:
            return self._divides_unevenly(strategy, mesh)
        parts = self.parts(strategy, mesh)
        single = all(parts[f] == self.factors[f].size for f in self.needed(f for f, n in parts.items() if n > 1))
        return single and all(self.factors[f].size % n == 0 for f, n in parts.items())

    def _divides_unevenly(self, strategy: Strategy, mesh: Mesh) -> bool:
        """Whether axes cut every factor, and every dim that contains it, in the same shares. Most choices with messages, and
        single indices, take equal blocks."""
        taken = self.taken(strategy, mesh)
        equal = (c for c in strategy if c.startswith("+") and strategy.count(c) > self.carries[c].uneven)
        carried = {f for choice in equal for f in factors_of(choice)}
        blocks = {f: mesh.blocks(self.factors[f].size, axes) for f, axes in taken.items()}
        if any(one is None or (isinstance(one, tuple) and f in carried) for f, one in blocks.items()):
            return False
        if any(blocks.get(f) != 1 for f in self.needed(taken) if self.factors[f].size > 1):
            return False
        for dim in {dim for labels in (*self.operands, *self.results) for dim in labels or ()}:
            cut = [f for f in dim if f in taken]
            size = math.prod(self.factors[f].size for f in dim)
            whole = mesh.blocks(size, tuple(axis for f in cut for axis in taken[f]))
            inner = size // math.prod(self.factors[f].size for f in cut)
            if len(cut) == 1 and whole != _times(blocks[cut[0]], inner):
                return False
            if len(cut) > 1 and not all(isinstance(one, int) for one in (whole, *(blocks[f] for f in cut))):
                return False
        return True

    def taken(self, strategy: Strategy, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """The axes of several ranks that shard each factor."""
        taken: dict[str, tuple[str, ...]] = {}
        for (axis, size), choice in zip(mesh.axes, strategy, strict=True):
            for factor in factors_of(choice) if size > 1 else ():
                taken[factor] = (*taken.get(factor, ()), axis)
        return taken

    def strategies(self, mesh: Mesh) -> list[Strategy]:
        """Every valid strategy on `mesh` (axes of size one take no choice)."""
        choices = self.choices()
        per_axis = [choices if size > 1 else ("",) for _, size in mesh.axes]
        return [s for s in itertools.product(*per_axis) if self.agrees(s) and self._divides(s, mesh)]

    def operand_spec(self, index: int, strategy: Strategy, mesh: Mesh) -> Spec | None:
        """The spec in which operand `index` must arrive."""
        return self._specs(strategy, mesh)[0][index]

    def result_spec(self, index: int, strategy: Strategy, mesh: Mesh) -> Spec | None:
        """The spec in which result `index` leaves."""
        return self._specs(strategy, mesh)[1][index]

    def _specs(self, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Spec | None, ...], tuple[Spec | None, ...]]:
        """The specs of all operands and results, found once for all rules of this form."""
        form, key = self.form, (strategy, mesh.names)
        if key not in form._known_specs:
            operands = (form._operand_spec(i, strategy, mesh) for i in range(len(form.operands)))
            results = (form._result_spec(i, strategy, mesh) for i in range(len(form.results)))
            form._known_specs[key] = tuple(operands), tuple(results)
        return form._known_specs[key]

    @cached_property
    def _known_specs(self) -> dict[Any, tuple[tuple[Spec | None, ...], tuple[Spec | None, ...]]]:
        return {}

    def _operand_spec(self, index: int, strategy: Strategy, mesh: Mesh) -> Spec | None:
        labels = self.operands[index]
        if labels is None:
            return None
        owed = tuple(
            (axis, "sum")
            for axis, choice in zip(mesh.names, strategy, strict=True)
            if (choice.startswith("~") and index in self.linear[int(choice[1:])])
            or (index in self.added and choice in self.summed)
        )
        return Spec(self._dims(labels, strategy, mesh), tuple(sorted(owed)))

    def _result_spec(self, index: int, strategy: Strategy, mesh: Mesh) -> Spec | None:
        labels = self.results[index]
        if labels is None:
            return None
        held = {f for dim in labels for f in dim}
        owed = []
        for axis, choice in zip(mesh.names, strategy, strict=True):
            if choice.startswith("~") or (choice in self.carries and index in self.carries[choice].owed):
                owed.append((axis, "sum"))
            elif choice and choice not in held and choice in self.contracted:
                owed.append((axis, self.factors[choice].reduce))
        return Spec(self._dims(labels, strategy, mesh), tuple(sorted(owed)))

    def parts(self, strategy: Strategy, mesh: Mesh) -> Parts:
        """Into how many blocks every factor is cut; of unequal ones as many as the longest would be."""
        if mesh.uneven:
            taken = self.taken(strategy, mesh)
            return {name: mesh.parts(f.size, taken.get(name, ())) for name, f in self.factors.items()}
        parts = dict.fromkeys(self.factors, 1)
        for (_, size), choice in zip(mesh.axes, strategy, strict=True):
            for factor in factors_of(choice):
                parts[factor] *= size
        return parts

    def work_parts(self, strategy: Strategy, mesh: Mesh) -> Any:
        """Over how many ranks the op's work is divided; where not equally, over as many as the one with the most would be. Of a
        choice with messages the last factor decides."""
        if mesh.uneven:
            taken = self.taken(tuple(_last(choice) for choice in strategy), mesh)
            return math.prod((mesh.parts(self.factors[f].size, axes) for f, axes in taken.items()), start=1)
        return mesh.product(a for a, c in zip(mesh.names, strategy, strict=True) if factors_of(c))

    def _dims(self, labels: Labels, strategy: Strategy, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
        taken: dict[str, tuple[str, ...]] = {}
        for axis, choice in zip(mesh.names, strategy, strict=True):
            for factor in factors_of(choice):
                taken[factor] = (*taken.get(factor, ()), axis)
        if not taken:
            return ((),) * len(labels)
        return tuple(tuple(axis for f in dim for axis in taken.get(f, ())) for dim in labels)

    def whole(self) -> Rule:
        """The same op with nothing sharded."""
        factors = {k: replace(f, whole=True) for k, f in self.factors.items()}
        return Rule(self.operands, self.results, factors, ())

    def __str__(self) -> str:
        return f"{', '.join(map(self._side, self.operands))} -> {', '.join(map(self._side, self.results))}"

    def _side(self, labels: Labels | None) -> str:
        if labels is None:
            return "1"
        return " ".join(self._dim(d) for d in labels) or "1"

    def _dim(self, dim: tuple[str, ...]) -> str:
        marked = [f + ("!" if f not in self.shardable else "") for f in dim]
        return "." if not dim else marked[0] if len(dim) == 1 else f"({' '.join(marked)})"


@cache
def _one_of_each(form: Rule) -> Rule:
    return form


def _times(blocks: tuple[int, ...] | int | None, inner: int) -> tuple[int, ...] | int | None:
    """Blocks of a factor as those of a dim whose other factors have so many indices."""
    return tuple(n * inner for n in blocks) if isinstance(blocks, tuple) else blocks and blocks * inner


def _last(choice: str) -> str:
    """A choice without the factors beside its last."""
    return next(iter(factors_of(choice)[-1:]), "")


_TOKEN = re.compile(r"\(|\)|\.|[A-Za-z_]\w*!?(?:<\w+)?")


def parse_rule(
    text: str,
    operands: Iterable[tuple[int, ...] | None],
    results: Iterable[tuple[int, ...] | None],
    sizes: dict[str, int] | None = None,
    linear: Iterable[Iterable[int]] = (),
) -> Rule:
    """Read a rule line for operands and results of these shapes; `sizes` gives factors of composite dims.

    Raises ShardingError when the line does not fit the shapes.
    """
    factor_sizes = dict(sizes or {})
    whole: set[str] = set()
    reduce: dict[str, str] = {}
    left, _, right = text.partition("->")

    def side(part: str, shapes: list[tuple[int, ...] | None]) -> tuple[Labels | None, ...]:
        terms = [t.strip() for t in part.split(",")] if part.strip() else []
        if len(terms) != len(shapes):
            raise ShardingError(f"rule {text!r} names {len(terms)} tensors on one side, the op has {len(shapes)}")
        return tuple(_term(t, s, text, factor_sizes, whole, reduce) for t, s in zip(terms, shapes, strict=True))

    in_labels = side(left, list(operands))
    out_labels = side(right, list(results))
    factors = {name: Factor(size, name in whole, reduce.get(name, "sum")) for name, size in factor_sizes.items()}
    used = {f for labels in (*in_labels, *out_labels) for dim in labels or () for f in dim}
    return Rule(
        in_labels, out_labels, {k: f for k, f in factors.items() if k in used}, tuple(frozenset(g) for g in linear)
    )


def _term(
    term: str,
    shape: tuple[int, ...] | None,
    text: str,
    factor_sizes: dict[str, int],
    whole: set[str],
    reduce: dict[str, str],
) -> Labels | None:
    if shape is None or term == "1":
        return None if shape is None else ((),) * len(shape)
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(term):
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif token == ".":
            dims.append(())
        else:
            name, _, reduction = token.partition("<")
            if reduction:
                reduce[name.rstrip("!")] = reduction
            if name.endswith("!"):
                name = name[:-1]
                whole.add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    if len(dims) != len(shape):
        raise ShardingError(f"rule {text!r}: {term!r} has {len(dims)} dims, the tensor has shape {shape}")
    for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if len(dim) == 1 and factor_sizes.setdefault(dim[0], size) != size:
            if size == 1:
                dims[i] = ()
                continue
            raise ShardingError(f"rule {text!r}: factor {dim[0]} is {factor_sizes[dim[0]]} and {size} at once")
        product = 1
        for f in dim:
            if f not in factor_sizes:
                raise ShardingError(f"rule {text!r}: size of factor {f} in {term!r} is not given")
            product *= factor_sizes[f]
        if dim and product != size:
            raise ShardingError(f"rule {text!r}: {term!r} does not multiply to shape {shape}")
    return tuple(dims)
