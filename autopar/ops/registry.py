"""The table of ops: for each its sharding rule, its work, and how its arguments change on a block.

Keys are op names without overload (`aten.sum`, `autopar.linear`). What is not in the table: torch tags tell pointwise
ops; anything else is tried by experiment (`autopar.ops.discover`) or runs whole with a warning that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Factor, Labels, Rule, Strategy

RuleFunction = Callable[[OpCall], Rule]
Gemm = tuple[float, str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class Offset:
    """First index of this rank's block: (index along `axes`) · `chunk`."""

    axes: tuple[str, ...]
    chunk: int


@dataclass(frozen=True)
class Block:
    """One op on one rank: what `localize` functions look at to rewrite arguments."""

    call: OpCall
    rule: Rule
    strategy: Strategy
    mesh: Mesh

    def axes_of(self, factor: str) -> tuple[str, ...]:
        return tuple(a for a, c in zip(self.mesh.names, self.strategy, strict=True) if c == factor)

    def parts(self, factor: str) -> int:
        return self.mesh.product(self.axes_of(factor))

    def offset(self, factor: str) -> Offset | int:
        """Where this rank's block of `factor` starts (0 when it is not sharded)."""
        axes = self.axes_of(factor)
        if not axes or self.mesh.product(axes) == 1:
            return 0
        return Offset(axes, self.rule.factors[factor].size // self.mesh.product(axes))

    def offsets(self, labels: Labels) -> tuple[Offset | int, ...]:
        """Start of the block in every dim of a tensor with these labels (leading factors are the sharded ones)."""
        starts: list[Offset | int] = []
        for dim in labels:
            lead = next((f for f in dim if self.axes_of(f)), None)
            start: Offset | int = 0
            if lead is not None:
                size = math.prod(self.rule.factors[f].size for f in dim)
                axes = self.axes_of(lead)
                start = Offset(axes, size // self.mesh.product(axes))
            starts.append(start)
        return tuple(starts)

    def result_shape(self, index: int = 0) -> list[int]:
        spec = self.rule.result_spec(index, self.strategy, self.mesh)
        type_ = self.call.results[index]
        assert spec is not None
        assert type_ is not None
        return list(spec.local_shape(type_.shape, self.mesh))


@dataclass(frozen=True)
class OpDef:
    """`work(call)` -> (FLOPs of the whole op, kind, factors of m, n, k). `localize(block)` -> changed arguments.

    `free`: a view that moves no bytes. `shape_argument`: name of an argument that is the result's shape.
    """

    rule: RuleFunction
    work: Callable[[OpCall, Rule], Gemm] | None = None
    localize: Callable[[Block], dict[str, Any]] | None = None
    free: bool = False
    shape_argument: str | None = None
    function: Callable[..., Any] | None = field(default=None, compare=False)


OPS: dict[str, OpDef] = {}


def register(*names: str, **options: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for op names; `options` are the other fields of OpDef."""

    def add(rule: RuleFunction) -> RuleFunction:
        for name in names:
            OPS[name] = OpDef(rule, **options)
        return rule

    return add


def find(op: str) -> OpDef | None:
    """The definition of `aten.sum.dim_IntList`: its own, its packet's, or pointwise by torch's tag."""
    packet = ".".join(op.split(".")[:2])
    known = OPS.get(op) or OPS.get(packet)
    if known is None and is_pointwise(op):
        known = OPS["pointwise"]
    return known


def is_pointwise(op: str) -> bool:
    parts = op.split(".")
    if len(parts) < 2 or not hasattr(torch.ops, parts[0]):
        return False
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overload = getattr(packet, parts[2] if len(parts) > 2 else "default", None)
    tags = overload.tags if overload is not None else []
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


# --- building rules -------------------------------------------------------------------------------------------------


class Maker:
    """Collects factors while a rule's labels are written down."""

    def __init__(self) -> None:
        self.factors: dict[str, Factor] = {}

    def add(self, name: str, size: int, whole: bool = False, reduce: str = "sum") -> tuple[str, ...]:
        """Labels of a dim that is one factor; dims of size one have none."""
        if size == 1:
            return ()
        known = self.factors.get(name)
        if known is None:
            self.factors[name] = Factor(size, whole, reduce)
        elif whole and not known.whole:
            self.factors[name] = Factor(known.size, True, known.reduce)
        return (name,)

    def dims(self, shape: tuple[int, ...], prefix: str = "d", whole: bool | set[int] = False) -> Labels:
        """One factor per dim, named `d0, d1, …`."""
        return tuple(
            self.add(f"{prefix}{i}", n, whole if isinstance(whole, bool) else i in whole) for i, n in enumerate(shape)
        )

    def rule(
        self, operands: list[Labels | None], results: list[Labels | None], linear: list[set[int]] | None = None
    ) -> Rule:
        used = {f for labels in (*operands, *results) for dim in labels or () for f in dim}
        return Rule(
            tuple(operands),
            tuple(results),
            {k: f for k, f in self.factors.items() if k in used},
            tuple(frozenset(g) for g in linear or ()),
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
