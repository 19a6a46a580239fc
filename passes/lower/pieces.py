"""A template's function with blocks in pieces of the batch, so that messages of one piece travel while others are computed with.

In Megatron's blocks every message waits for the product before it and the next product for the message, so that nothing runs
beside. Of two halves of the batch one may travel while the other is computed with. What is given whole is cut along the dim
that the plan says (`TemplatePlan.cut`), each op with an operand in pieces runs once a piece, and the result is joined:

    x_all = rt.comm.all_gather(x, 1, 'tp')      x_1, x_2 = x.chunk(2, 0)
    y = ops.linear(x_all, w)                    x_all_1 = rt.comm.all_gather(x_1, 1, 'tp')
                                                x_all_2 = rt.comm.all_gather(x_2, 1, 'tp')
                                                y_1 = ops.linear(x_all_1, w)        # while x_all_2 is on its way
                                                y_2 = ops.linear(x_all_2, w)
                                                y = torch.cat([y_1, y_2], 0)

A piece is a shard in time, as a microbatch is, of the block that a rank has: the op's rule says what it makes of one (a
factor that is cut), whether results are then in pieces too or terms of a sum, as gradients of weights are, and `localize`
what its arguments are. Ops that must know where a piece is, that draw random numbers or that do not divide run on whole
blocks, joined before. Up to its next message a piece goes ahead of the pieces after it; which lines run beside which message
is decided after that (`overlap.py`). Forward saves what it has in pieces as these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.call import OpCall
from autopar.ir.lines import Compute, Convert, Cut, Function, Join, Line, Ref, Site
from autopar.ir.mesh import Extent
from autopar.ir.rule import Labels
from autopar.ir.types import TensorType
from autopar.ops.registry import AlongAxis, Block, Offset, find
from autopar.passes.lower.body import PlannedTemplate
from autopar.passes.lower.names import Names
from autopar.passes.lower.overlap import sends
from autopar.passes.price.pricer import PIECE
from autopar.passes.rules.sends import sent_by


@dataclass(frozen=True)
class Parts:
    """A value in pieces: their names, and the dim along which they lie one after another."""

    names: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class _Split:
    """A line that runs once a piece. dims: of its operands that are cut; results: along which its results are (None: they are
    terms of a sum); arguments: that are others for a piece; factor: of the op's rule that is cut."""

    dims: Mapping[str, int]
    results: tuple[int | None, ...]
    arguments: Mapping[str, Any]
    factor: str = ""


def in_pieces(
    function: Function,
    planned: PlannedTemplate,
    starts: Mapping[str, int],
    given: Mapping[str, Parts],
    keeps: frozenset[str] = frozenset(),
    taken: Collection[str] = (),
) -> tuple[Function, dict[str, Parts]]:
    """The function, and those of the values `keeps` that it has in pieces alone. starts: arguments that may be cut, each with
    its dim; given: values that it is given in pieces; taken: names that another function has, which is given its pieces."""
    made = _Pieces(function, planned, starts, given)
    for other in taken:
        made.names.take(other)
    for line in function.lines:
        made.take(line)
    for name in function.returns:
        if name is not None:
            made.need(name)
    made.flush()
    parts = {name: own for name, own in made.parts.items() if name in keeps and name not in made.whole}
    types = {piece: made.types[piece] for own in given.values() for piece in own.names}
    others = {name: typed for name, typed in function.arg_types.items() if name not in given}
    return replace(function, lines=tuple(made.lines), arg_types=others | types), parts


class _Pieces:
    """The lines so far. whole: names that there are; parts: values in pieces; segment: the lines of every piece since the last
    message, which go piece by piece."""

    def __init__(
        self, function: Function, planned: PlannedTemplate, starts: Mapping[str, int], given: Mapping[str, Parts]
    ) -> None:
        self.planned, self.mesh, self.count = planned, planned.pricer.mesh, planned.plan.pieces
        self.wider = planned.pricer.of_pieces(self.count).mesh
        self.lines: list[Line] = []
        self.segment: list[list[Line]] = [[] for _ in range(self.count)]
        self.pending: set[str] = set()
        self.types = dict(function.arg_types)
        self.names = Names()
        own = (*function.args, *function.arg_types, *(out for line in function.lines for out in line.outs))
        for name in (*own, *(piece for parts in given.values() for piece in parts.names)):
            self.names.take(name)
        self.parts: dict[str, Parts] = {}
        for name, parts in given.items():
            self._in_parts(name, parts)
        self.whole = {*function.args, *function.arg_types} - given.keys()
        self.starts = starts

    def take(self, line: Line) -> None:
        """The next line of the function."""
        self.types |= {name: (t, s) for name, t, s in line.made() if t is not None and s is not None}
        split = self._split(line)
        if split is None:
            for name in line.reads():
                self.need(name)
            self._append(line)
            self.whole.update(line.outs)
            return
        for name in line.reads():
            if name not in split.dims:
                self.need(name)
                self._settle(name)
            elif name not in self.parts:
                self._cut(name, split.dims[name])
        outs = [
            tuple(out if out == "_" else self.names.fresh(f"{out}_{i + 1}") for out in line.outs)
            for i in range(self.count)
        ]
        sums = [k for k, dim in enumerate(split.results) if dim is None and line.outs[k] != "_"]
        so_far = {k: outs[0][k] for k in sums}
        for i, names in enumerate(outs):
            self._add(i, self._piece(line, split, i, names))
            for k in sums if i else ():
                total = line.outs[k] if i == self.count - 1 else self.names.fresh(f"{names[k]}_sum")
                so_far[k] = self._sum(i, line, k, (so_far[k], names[k]), total)
        for k, (out, dim) in enumerate(zip(line.outs, split.results, strict=True)):
            if out != "_" and dim is not None:
                self._in_parts(out, Parts(tuple(names[k] for names in outs), dim))
            elif out != "_":
                self.whole.add(out)
        if sends(line, self.mesh.sizes):
            self.flush()

    def need(self, name: str) -> None:
        """A value is to be whole."""
        if name in self.whole or name not in self.parts:
            return
        parts, (type_, spec) = self.parts[name], self.types[name]
        self._append(Join(parts.names, parts.dim, outs=(name,), types=(type_,), specs=(spec,)))
        self.whole.add(name)

    def flush(self) -> None:
        """The lines of the pieces are taken, piece by piece."""
        for lines in self.segment:
            self.lines += lines
            lines.clear()
        self.pending.clear()

    def _settle(self, name: str) -> None:
        if name in self.pending:
            self.flush()

    def _append(self, line: Line) -> None:
        """A line that runs once."""
        for name in line.reads():
            self._settle(name)
        self.lines.append(line)

    def _add(self, i: int, line: Line) -> None:
        """Add a line to those of a piece."""
        self.segment[i].append(line)
        self.pending.update(line.outs)

    def _in_parts(self, name: str, parts: Parts) -> None:
        type_, spec = self.types[name]
        self.parts[name] = parts
        self.types |= dict.fromkeys(parts.names, (self._cut_type(type_, parts.dim), spec))

    def _cut(self, name: str, dim: int) -> None:
        """A value that is whole, in views of it."""
        self._in_parts(name, Parts(tuple(self.names.fresh(f"{name}_{i + 1}") for i in range(self.count)), dim))
        type_, spec = self.types[name]
        types = (self._cut_type(type_, dim),) * self.count
        self._append(Cut(name, dim, outs=self.parts[name].names, types=types, specs=(spec,) * self.count))

    def _cut_type(self, type_: TensorType, dim: int | None) -> TensorType:
        return TensorType(tuple(n // self.count if d == dim else n for d, n in enumerate(type_.shape)), type_.dtype)

    def _piece(self, line: Line, split: _Split, i: int, outs: tuple[str, ...]) -> Line:
        """The line for a piece."""
        types = tuple(
            t if t is None or d is None else self._cut_type(t, d)
            for t, d in zip(line.types, split.results, strict=True)
        )
        if isinstance(line, Convert):
            return replace(line, value=self.parts[line.value].names[i], outs=outs, types=types)
        assert isinstance(line, Compute)

        def place(value: Any) -> Any:
            if isinstance(value, Ref):
                return Ref(self.parts[value.name].names[i]) if value.name in split.dims else value
            return [place(v) for v in value] if isinstance(value, list) else value

        kwargs = {k: place(v) for k, v in (line.kwargs | dict(split.arguments)).items()}
        piece = replace(line, kwargs=kwargs, outs=outs, types=types)
        if not split.factor:
            return piece
        call, strategy = self.planned.template.op_calls[line.node], (*self.planned.strategy(line.node), split.factor)
        sent = sent_by(call, self.planned.rules.rule(call), strategy, self.wider, self.planned.pricer.device.runs_as)
        return replace(piece, sent=sent, piece=(split.factor, self.count))

    def _sum(self, i: int, line: Line, k: int, terms: tuple[str, str], total: str) -> str:
        """The sum of a line's result k over the pieces up to i."""
        types, specs = line.types[k : k + 1], line.specs[k : k + 1]
        self._add(i, Join(terms, None, outs=(total,), types=types, specs=specs, phase=line.phase, source=line.source))
        return total

    # --- which lines run once a piece

    def _dim(self, name: str) -> int | None:
        """Along which dim a value is cut, if it is."""
        return self.parts[name].dim if name in self.parts else self.starts.get(name)

    def _split(self, line: Line) -> _Split | None:
        """How a line runs once a piece; None: it runs on what is whole."""
        if all(self._dim(name) is None for name in line.reads()):
            return None
        match line:
            case Convert(value, step=step):
                dim = self._dim(value)
                assert dim is not None
                if dim in (step.dim, step.to_dim) or not self._divides(value, dim):
                    return None
                return _Split({value: dim}, (dim,), {})
            case Compute(node=node) if node in self.planned.template.op_calls:
                return next(self._splits(line, self.planned.template.op_calls[node]), None)
            case Compute(op="aten._to_copy.default"):
                (value,) = line.reads()
                dim = self._dim(value)
                assert dim is not None
                return _Split({value: dim}, (dim,), {}) if self._divides(value, dim) else None
        return None

    def _divides(self, name: str, dim: int) -> bool:
        """Whether every rank's block of a value has equal pieces."""
        type_, spec = self.types[name]
        length = spec.local_shape(type_.shape, self.mesh)[dim]
        return name in self.parts or (length % self.count == 0 and not isinstance(length, Extent))

    def _splits(self, line: Compute, call: OpCall) -> Iterator[_Split]:
        """Factors of an op that hold the pieces of its operands."""
        rule, strategy = self.planned.rules.rule(call), self.planned.strategy(line.node)
        reads = list(line.reads())
        for factor in rule.shardable:
            places = [_place(labels, factor) for labels in rule.operands]
            results = tuple(_place(labels, factor) for labels in rule.results)
            dims = {name: place for name, place in zip(reads, places, strict=True) if place is not None}
            named = zip(reads, places, strict=True)
            if any(self._dim(name) not in (None, place) for name, place in named) or not rule.allows(
                (*strategy, factor), self.wider
            ):
                continue
            if any(dims.get(name) != place for name, place in zip(reads, places, strict=True)):
                continue  # one value is wanted cut in two ways
            sums = any(
                labels is not None and place is None and out != "_"
                for labels, place, out in zip(rule.results, results, line.outs, strict=True)
            )
            if sums and (factor not in rule.contracted or rule.factors[factor].reduce != "sum" or rule.added):
                continue
            if all(place is None for place in results) and all(name in self.whole for name in dims):
                continue  # nothing is gained
            arguments = self._arguments(line, call, factor)
            if arguments is not None:
                yield _Split(dims, results, arguments, factor)

    def _arguments(self, line: Compute, call: OpCall, factor: str) -> dict[str, Any] | None:
        """Arguments that are others for a piece on a rank; None for an op that must know which piece it has."""
        definition = find(call.op)
        if any(isinstance(value, Site) for value in line.kwargs.values()):
            return None
        if definition is None or definition.localize is None:
            return {}
        strategy = (*self.planned.strategy(line.node), factor)
        arguments = definition.localize(Block(call, self.planned.rules.rule(call), strategy, self.wider))
        return None if any(map(_is_placed, arguments.values())) else arguments


def _place(labels: Labels | None, factor: str) -> int | None:
    """The dim that a factor is in."""
    return next((d for d, dim in enumerate(labels or ()) if factor in dim), None)


def _is_placed(value: Any) -> bool:
    """Whether an argument depends on which piece it is for."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_placed, value))
    return isinstance(value, (Offset, AlongAxis, Extent)) and PIECE in value.axes
