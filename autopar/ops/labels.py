"""Parts that rules are written with: a maker that collects factors, and the labels of broadcast, leading and reduced dims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.errors import ShardingError
from autopar.ir.call import OpCall
from autopar.ir.rule import Carried, Factor, Labels, Rule


class Maker:
    """Collects factors while a rule's labels are written down."""

    def __init__(self) -> None:
        self.factors: dict[str, Factor] = {}

    def add(self, name: str, size: int, whole: bool = False, reduce: str = "sum") -> tuple[str, ...]:
        """Labels of a dim that is one factor; dims of size one have none. Raises ShardingError where sizes differ."""
        if size == 1:
            return ()
        factor = self.factors.get(name)
        if factor is not None and factor.size != size:
            raise ShardingError(f"factor {name} of a rule is {factor.size} and {size} at once")
        if factor is None:
            self.factors[name] = Factor(size, whole, reduce)
        elif whole and not factor.whole:
            self.factors[name] = Factor(factor.size, True, factor.reduce)
        return (name,)

    def dims(self, shape: tuple[int, ...], prefix: str = "d", whole: bool | set[int] = False) -> Labels:
        """One factor per dim, named `d0, d1, …`."""
        return tuple(
            self.add(f"{prefix}{i}", n, whole if isinstance(whole, bool) else i in whole) for i, n in enumerate(shape)
        )

    def rule(
        self,
        operands: list[Labels | None],
        results: list[Labels | None],
        linear: list[set[int]] | None = None,
        carried: Iterable[Carried] = (),
        added: Iterable[int] = (),
    ) -> Rule:
        used = {f for labels in (*operands, *results) for dim in labels or () for f in dim}
        return Rule(
            tuple(operands),
            tuple(results),
            {k: f for k, f in self.factors.items() if k in used},
            tuple(frozenset(g) for g in linear or ()),
            tuple(carried),
            frozenset(added),
        )


def broadcast_labels(shape: tuple[int, ...], out: tuple[int, ...], labels: Labels) -> Labels:
    """Labels of an operand that broadcasts to `out`: dims of size one are unlabelled."""
    own = labels[len(out) - len(shape) :]
    return tuple(() if n == 1 else dim for n, dim in zip(shape, own, strict=True))


def leading(call: OpCall, keep: int) -> Rule:
    """The first `keep` dims pass in every operand and result; the others stay whole."""
    make = Maker()

    def labels(shape: tuple[int, ...]) -> Labels:
        return tuple(make.add(f"d{i}", n) if i < keep else () for i, n in enumerate(shape))

    return make.rule([labels(s) for s in call.shapes], [labels(t.shape) if t else None for t in call.results])


def all_float(call: OpCall) -> bool:
    """Whether sums may be owed on every operand and result (no booleans or indices among them)."""
    return all(t.is_float for t in call.operands) and all(t is None or t.is_float for t in call.results)


def reduced_dims(call: OpCall, name: str = "dim") -> list[int]:
    """Dims that a reduction removes, counted from the front."""
    return dims_told(call.get(name), len(call.shapes[0]))


def dims_told(dim: Any, rank: int) -> list[int]:
    """The dims of a tensor of a rank that a number, several or none (all) mean, counted from the front."""
    if not rank or dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return sorted({int(d) % rank for d in (dim if isinstance(dim, (list, tuple)) else [dim])})
