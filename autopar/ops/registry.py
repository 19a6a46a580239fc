"""The table of ops: one definition per op holds everything the compiler knows of it.

Keys are op names without overload (`aten.sum`, `autopar.linear`). The families beside this module fill the table, each
op in one place, in any order: a fact is stated once, and stating it differently a second time is an error. Whoever
needs to know something of an op asks its definition (`find`). An op that has no rule here is pointwise if torch tags it
so; else its rule is found by experiment (`autopar.ops.discover`), or it runs whole with a warning that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch

from autopar.errors import ShardingError
from autopar.ir.call import OpCall, Operand
from autopar.ir.mesh import Extent, Mesh
from autopar.ir.ranges import Index, Range
from autopar.ir.rule import Labels, Rule, Strategy, carried_choices, factors_of
from autopar.ir.sent import Sent
from autopar.runtime.comm.devices import CPU, Device

RuleFunction = Callable[[OpCall], Rule]
Gemm = tuple[float, str, tuple[tuple[str, ...], ...]]
"""FLOPs of the whole op, kind of work, and for products the factors of m, n and k."""
Precision = Literal["low", "follow", "round", "norm", "pass", "keep"]
"""The dtype rule of an op under mixed precision (`autopar.capture.graph.precision` defines each word)."""
Workspace = Callable[[Sequence[torch.Tensor], Mapping[str, Any], Device], int]
"""Bytes that a kernel needs for a moment, of its operands and results, its arguments and its device (`OpDef.workspace`)."""


@dataclass(frozen=True)
class Offset:
    """First index of this rank's block: (index along `axes`) · `chunk`, added to what an argument is on the whole (`start`).
    size: of a dim whose blocks are of unequal length (0: they are equal)."""

    axes: tuple[str, ...]
    chunk: int
    start: int = 0
    size: int = 0


@dataclass(frozen=True)
class AlongAxis:
    """The mesh axis along which an op sends messages itself; of several the one along which they go first, then the others."""

    axes: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One op on one rank: what `localize` functions look at to rewrite arguments."""

    call: OpCall
    rule: Rule
    strategy: Strategy
    mesh: Mesh

    def axes_of(self, factor: str) -> tuple[str, ...]:
        """Mesh axes that shard a factor."""
        return tuple(a for a, c in zip(self.mesh.names, self.strategy, strict=True) if factor in factors_of(c))

    @property
    def carried(self) -> tuple[tuple[str, str], ...]:
        """The axes that take a choice with messages, and which."""
        return carried_choices(self.strategy, self.mesh)

    def told(self) -> dict[str, AlongAxis]:
        """The keywords of an implementation that sends messages: the axes, if any take a choice with messages."""
        return {"along": AlongAxis(tuple(axis for axis, _ in self.carried))} if self.carried else {}

    def parts(self, factor: str) -> int:
        """Into how many equal blocks a factor is cut. Raises ShardingError where they are not equal."""
        axes = self.axes_of(factor)
        if axes and self.mesh.is_uneven(self.rule.factors[factor].size, axes):
            raise ShardingError(f"{self.call.op} takes no blocks of unequal size of {factor} over {', '.join(axes)}")
        return self.mesh.product(axes)

    def offset(self, factor: str) -> Offset | int:
        """Where this rank's block of `factor` starts (0 when it is not sharded)."""
        axes = self.axes_of(factor)
        return self._start(self.rule.factors[factor].size, axes) if axes else 0

    def _start(self, size: int, axes: tuple[str, ...]) -> Offset | int:
        if not axes or self.mesh.product(axes) == 1:
            return 0
        return Offset(axes, size // self.mesh.product(axes), size=size if self.mesh.is_uneven(size, axes) else 0)

    def offsets(self, labels: Labels) -> tuple[Offset | int, ...]:
        """Start of the block in every dim of a tensor with these labels."""
        return tuple(
            self._start(
                math.prod(self.rule.factors[f].size for f in dim), tuple(a for f in dim for a in self.axes_of(f))
            )
            for dim in labels
        )

    def result_shape(self, index: int = 0) -> list[int]:
        """Shape of a result on this rank."""
        spec = self.rule.result_spec(index, self.strategy, self.mesh)
        type_ = self.call.results[index]
        assert spec is not None
        assert type_ is not None
        return list(spec.local_shape(type_.shape, self.mesh))


def told(block: Block) -> dict[str, Any]:
    """The arguments of an op that are others on a block than on the whole. Raises ShardingError where blocks are of unequal size,
    and the op is to be told more than a length or a place in a dim."""
    definition = find(block.call.op)
    if definition is None or definition.localize is None:
        return {}
    changes = definition.localize(block)
    if block.mesh.uneven and not _alike(changes, definition.localize(replace(block, mesh=block.mesh.seen_by_least))):
        raise ShardingError(
            f"{block.call.op} cannot be told of blocks of unequal size; take ranks that divide its dims"
        )
    return changes


def _alike(longest: Any, shortest: Any) -> bool:
    """Whether arguments are the same on ranks with the longest and the shortest blocks, or lengths of blocks of the same dims."""
    if isinstance(longest, dict):
        return all(_alike(value, shortest[name]) for name, value in longest.items())
    if isinstance(longest, (list, tuple)):
        return all(_alike(*both) for both in zip(longest, shortest, strict=True))
    if isinstance(longest, Extent):
        return isinstance(shortest, Extent) and longest.told == shortest.told
    return not isinstance(shortest, Extent) and bool(longest == shortest)


def takes_blocks(block: Block) -> bool:
    """Whether an op can be told of its blocks (`told`)."""
    try:
        told(block)
    except ShardingError:
        return False
    return True


@dataclass(frozen=True)
class Sending:
    """An op that takes a carried choice along an axis of so many ranks. nbytes: of operands and results on this rank. inner: the
    axes along which messages go on, with their ranks, where several axes take the choice. device: that it runs on. most: what the
    rank with the longest block of the choice's last factor has of it, over the mean."""

    call: OpCall
    choice: str
    axis: str
    ranks: int
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[float, ...]
    inner: tuple[tuple[str, int], ...] = ()
    device: Device = CPU
    most: float = 1.0

    def bytes_of(self, name: str) -> float:
        """Bytes of the operand that an argument names, on this rank."""
        operand = self.call[name]
        assert isinstance(operand, Operand)
        return self.operand_bytes[operand.index]


@dataclass(frozen=True)
class Grouped:
    """Rows that an op sorts by group, computes group by group and puts back, on one rank.

    operand: the number of the one that they are copied from, choices: how often each of its rows is. groups: how many there are.
    row_bytes: of rows that are moved; passes: over them, in emitted programs. inner_bytes: read and written between products, at
    least; apart_bytes: op by op. again: share of the op's work that makes again what could have been kept. padding: rows over
    those that there are, where the host does not know how many. cast: elements that software in 8 or 4 bits casts before them.
    """

    operand: int
    choices: int
    groups: int
    row_bytes: float
    passes: float
    inner_bytes: float
    apart_bytes: float
    again: float = 0.0
    padding: float = 1.0
    cast: float = 0.0


@dataclass(frozen=True)
class Merged:
    """Pieces in which an op does its work, and passes over memory that put together what they give, on one rank. kernels: one for
    every piece; moved_bytes: read and written by the passes."""

    kernels: int
    passes: int
    moved_bytes: float


@dataclass(frozen=True)
class Drawn:
    """The draws of an op in its own kernel, on the whole. products: those that the kernel makes over those of its work;
    instructions: of 32 bits, by which it draws."""

    products: float
    instructions: float


@dataclass(frozen=True)
class Scales:
    """An op whose memory is products of sizes (`autopar.ops.scaling`). sizes: arguments that are such sizes too; unread: numbers
    among its arguments that change nothing of it, as places in a tensor do (`Offset`)."""

    sizes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpDef:
    """The facts that the compiler knows of an op. Every field but `rule` has a default that is right for most ops.

    The op:
        rule(call): which dims may be sharded. None: facts of an op that is replaced before rules are asked for.
        work(call, rule): its arithmetic, where that is more than reading and writing (products, convolutions).
        dims(call, parts, share): of one of its products on a block, (m, n, k), where factors alone do not tell them; share: over
            how many ranks the block's work is one part. None: as `work` says.
        imbalance(call, parts, tile): work of the busiest rank over the mean, factors being cut into so many parts, by kernels
            that skip so many masked keys at once (0: every single one). None: all do alike.
        grouped(call, parts, share): the rows that it computes in groups, where it does. parts, share: as above.
        merged(call, parts, device): the pieces in which it does its work there, where it is not one. parts: as above.
        drawn(call, device): the draws that it makes there in the kernel of its products. None: it makes none.
        localize(block): arguments that are others on a block than on the whole (shapes, offsets).
        globalize(call): the same arguments on the whole again, out of a call whose types are global already.
        pieces: where its rule has a factor behind others in a dim, `localize` also tells it of the same part of every piece, as
            microbatches have it.
    Messages of its own (the carried choices of its rule):
        sends(sending): what it sends along the axis.
        carrier: the function of the runtime that does it, told the axis by the keyword `along`. "": that of the op itself.
        always_carried: that function also does it where nothing is sent, as it knows of better kernels than torch takes.
    The order of a sequence (`autopar.passes.order`), where factors are in order that the op may not be sharded along:
        joined(call): groups of factors of which all are in order if one is.
        ordered(call, order, held): its arguments where the factors `held` of these groups are in this order. None: it cannot.
    Facts:
        free: a view that moves no bytes.
        random: it draws random numbers, numbered by its argument `site`.
        fresh: its results are tensors that nobody else holds, so the gradient store may keep them as they are.
        dear: too dear to run a second time under selective recompute. None: if it has `work`.
        kept: no recompute policy runs it again, as it makes beside its result what backward would compute.
        linear(call): groups of operands in which it is linear, beside those of its rule (which ranks are offered).
        picks(call): how many elements of its first operand it reads, and of no others, for each that it makes (a look-up: one).
        fills(call): how often it adds each element of its first operand to a result that is zeros elsewhere (the gradient of a
            look-up: once).
        alone: no compiler joins its kernel with its neighbours', though it is no product.
        inside: factors of the rows of the matrices that its products make and it does not give.
        adds: name of the scalar argument that it adds to its only tensor.
        carries: its results are its operands moved, cast or added, so what becomes of a gradient is a gradient.
        hidden_workspace: its kernels need memory that no meta function knows; it must be run to be measured.
        workspace(tensors, arguments, device): bytes that its kernel needs on a device for a moment beside its results, of which
            no meta function knows. tensors: its operands and then its results, on the meta device.
        scales: its memory grows with the sizes of its operands alone. None: it is not known to.
        unordered: on a GPU its kernel adds in an order of its own, by default or always (`autopar.ops.unordered`).
        result_names: names of several results in emitted text.
    Mixed precision:
        precision: what it computes in. None: "follow" if torch tags it pointwise, else "keep".
        low_operands: how many of its leading floating operands the class "low" casts (None: all; -1: all but the last).
        of_weights: it is among a layer's products with weights, which software in 8 or 4 bits computes in these: it casts "rows",
            its first operand, where no other op did before; or what it reads is "cast" already, or counted as `Grouped.cast`.
        view: a cast of its result may as well be a cast of its operand.
    The canonical form of a captured graph:
        canonical: it is a "copy", a "regroup" (of dims, so `reshape`) or a "cast", whatever its name.
        reorder(arguments, rank): the permutation of dims that it is.
    Integers (`autopar.ops.integers`):
        indexes(call): which operands are an index, and what they may hold.
        values(call, ranges, result): the range of an integer result, by its number, from those of the operands (numbers
            that are no integers have the range `ANY`). None: not known.
        rearranges: its result has the elements of its operands, all of them and no others.
    Numbers:
        finite(call): whether of finite operands its results and gradients are finite too, short of an overflow. None: it is not
            known to.
    Printing:
        home: the module of the runtime, or of the emitted program, that has its function.
        factory: it makes a tensor out of none and must be told the device.
        key_argument: place of the random key among the printed arguments (None: by keyword).
        told_source: it is told the source line that it comes from.
    Options:
        options: the last of its arguments, where they are fields of `Options`, which capture fills in.
    """

    rule: RuleFunction | None = None
    work: Callable[[OpCall, Rule], Gemm] | None = None
    dims: Callable[[OpCall, Mapping[str, int], int], tuple[int, ...]] | None = None
    imbalance: Callable[[OpCall, Mapping[str, int], float], float] | None = None
    grouped: Callable[[OpCall, Mapping[str, int], int], Grouped] | None = None
    merged: Callable[[OpCall, Mapping[str, int], Device], Merged | None] | None = None
    drawn: Callable[[OpCall, Device], Drawn | None] | None = None
    localize: Callable[[Block], dict[str, Any]] | None = None
    globalize: Callable[[OpCall], dict[str, Any]] | None = None
    pieces: bool = False
    sends: Callable[[Sending], list[Sent]] | None = field(default=None, compare=False)
    carrier: str = ""
    always_carried: bool = False
    joined: Callable[[OpCall], tuple[tuple[str, ...], ...]] | None = field(default=None, compare=False)
    ordered: Callable[[OpCall, int, frozenset[str]], dict[str, Any] | None] | None = field(default=None, compare=False)
    free: bool = False
    random: bool = False
    fresh: bool = False
    dear: bool | None = None
    kept: bool = False
    linear: Callable[[OpCall], list[set[int]]] | None = None
    picks: Callable[[OpCall], float] | None = field(default=None, compare=False)
    fills: Callable[[OpCall], float] | None = field(default=None, compare=False)
    alone: bool = False
    inside: tuple[str, ...] = ()
    adds: str = ""
    carries: bool = False
    hidden_workspace: bool = False
    workspace: Workspace | None = field(default=None, compare=False)
    scales: Scales | None = None
    unordered: Literal["", "by default", "always"] = ""
    result_names: tuple[str, ...] = ()
    precision: Precision | None = None
    low_operands: int | None = None
    of_weights: Literal["", "rows", "cast"] = ""
    view: bool = False
    canonical: Literal["copy", "regroup", "cast"] | None = None
    reorder: Callable[[tuple[Any, ...], int], list[int]] | None = field(default=None, compare=False)
    indexes: Callable[[OpCall], tuple[Index, ...]] | None = field(default=None, compare=False)
    values: Callable[[OpCall, tuple[Range, ...], int], Range | None] | None = field(default=None, compare=False)
    rearranges: bool = False
    finite: Callable[[OpCall], bool] | None = field(default=None, compare=False)
    home: str = "ops"
    factory: bool = False
    key_argument: int | None = None
    told_source: bool = False
    options: tuple[str, ...] = ()

    @property
    def recompute_is_dear(self) -> bool:
        """Whether selective recompute keeps the results of this op."""
        return self.work is not None if self.dear is None else self.dear


OPS: dict[str, OpDef] = {}
_DEFAULT = OpDef()


def define(*names: str, **facts: Any) -> None:
    """State fields of the definitions of these ops. Raises ValueError where one says otherwise already."""
    for name in names:
        definition = OPS.get(name, _DEFAULT)
        for fact, value in facts.items():
            if getattr(definition, fact) not in (getattr(_DEFAULT, fact), value):
                raise ValueError(f"{name}: {fact} is defined twice")
        OPS[name] = replace(definition, **facts)
    find.cache_clear()


def register(*names: str, **facts: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Decorate the rule of these ops; `facts` are other fields of their definitions."""

    def add(rule: RuleFunction) -> RuleFunction:
        define(*names, rule=rule, **facts)
        return rule

    return add


def once(call: OpCall) -> float:
    """`OpDef.picks` of a look-up, and `OpDef.fills` of its gradient."""
    return 1.0


def named(names: str) -> tuple[str, ...]:
    """`"view t"` -> `("aten.view", "aten.t")`."""
    return tuple(f"aten.{name}" for name in names.split())


@cache
def find(op: str) -> OpDef | None:
    """The definition of `aten.sum.dim_IntList`: its own, its packet's, with the pointwise rule if torch's tag says so."""
    definition = OPS.get(op) or OPS.get(".".join(op.split(".")[:2]))
    if (definition is None or definition.rule is None) and is_pointwise(op):
        return replace(definition or _DEFAULT, rule=OPS["pointwise"].rule)
    return definition


def precision_of(op: str) -> Precision:
    """The class of an op under mixed precision."""
    definition = find(op)
    if definition is not None and definition.precision is not None:
        return definition.precision
    return "follow" if is_pointwise(op) else "keep"


def is_pointwise(op: str) -> bool:
    """Whether torch tags an op as pointwise."""
    parts = op.split(".")
    if len(parts) < 2 or not hasattr(torch.ops, parts[0]):
        return False
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overload = getattr(packet, parts[2] if len(parts) > 2 else "default", None)
    tags = overload.tags if overload is not None else []
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def resized(name: str) -> dict[str, Callable[..., dict[str, Any]]]:
    """`localize` and `globalize` of an op whose argument `name` is the shape of its result."""

    def globalize(call: OpCall) -> dict[str, Any]:
        shape = call.out_shape
        return {name: list(shape)}

    return {"localize": lambda block: {name: block.result_shape()}, "globalize": globalize}
