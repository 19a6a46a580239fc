"""The state of every value in a microbatch, by the rules that say what ranks may hold.

Over the axis in time a value is a *shard* (its batch dim is cut), *partial* (each microbatch holds a term; the sum, or
the maximum, is the value) or *whole* (the same in every microbatch). Inputs are shards, parameters whole. An op takes
the one strategy that needs no conversion, so the constants of the program (a mean's 1/n) stay those of the whole batch,
and what accumulates is a sum: of the loss, of gradients, of buffers that are updated by one. Two conversions are free:

- whole to partial, where a term that all microbatches have is added to a sum of theirs: each adds 1/M of it;
- partial to whole before the first forward, of a value that depends on inputs alone, such as a count of tokens that a
  loss divides by: a prologue call computes it for every microbatch (`autopar.passes.batch.prologue`). What is made of
  such a value and of inputs is known beforehand too, and its sums are those of the next round.

Where an op would need any other one the batch *couples* (statistics over it, softmax, sorting, a root of a mean): that op
must see all samples at once, and the program cannot run in microbatches.

The gradient of a shard is a shard, that of a whole value is partial, that of a partial one is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from torch import fx

from autopar.errors import CoupledError
from autopar.ir.call import OpCall
from autopar.ir.program import Program, Template, ValueRef, op_name, operand_nodes, operand_values
from autopar.ir.rule import Labels, Rule
from autopar.ops.registry import find
from autopar.passes.batch.dims import Dims, Part, batch_dims, factor_of, part_in, result_values
from autopar.passes.batch.prologue import Place
from autopar.passes.batch.terms import affine, is_zeros, more_linear, shows
from autopar.passes.rules.book import RuleBook

State = Literal["whole", "shard", "sum", "max", "min", "unknown"]
"""A value is *unknown* while what it is made of must be known beforehand, and is not yet: the next pass says what it is."""
OF_GRADIENT: dict[State, State] = {
    "shard": "shard",
    "whole": "sum",
    "sum": "whole",
    "max": "whole",
    "min": "whole",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class OperandShare:
    """A whole value of which each microbatch adds its part to a sum: operand `operand` of op `node`, or the op's scalar
    argument of that name."""

    node: str
    operand: int | str


@dataclass(frozen=True)
class ResultShare:
    """A whole value of which a call gives out each microbatch's part: entry `slot` of the template's `results`. Other entries
    that name the same value stay whole."""

    results: Literal["outputs", "input_grads", "param_grads"]
    slot: int


Share = OperandShare | ResultShare


class Early(NamedTuple):
    """How a value is known before the first forward: in a round after those of what it is made of, and by what the microbatches'
    terms are put together."""

    round: int
    terms: State


@dataclass(frozen=True)
class Batched:
    """How the batch goes through a program.

    dims: per template, value -> dim -> Part. factors: per template, op -> the factor that holds the batch. sizes: a number
    of microbatches must divide each of them. shares: per call. prologue: values to be known beforehand. outputs, buffers: what
    microbatches make of the program's outputs and updated buffers.
    """

    dims: dict[str, Dims]
    factors: dict[str, dict[str, str]]
    sizes: frozenset[int]
    shares: tuple[frozenset[Share], ...]
    prologue: dict[Place, Early]
    outputs: tuple[State, ...]
    buffers: dict[str, State]


def batched(program: Program, rules: RuleBook) -> Batched:
    """Raises CoupledError, which names the op that must see the whole batch."""
    dims = batch_dims(program, rules)
    prologue: dict[Place, Early] = {}
    while True:
        pass_ = _Pass(program, rules, dims, prologue)
        pass_.run()
        if not pass_.wanted:
            return pass_.result()
        prologue |= pass_.wanted


class _Pass:
    """One pass over the calls. prologue: values that are known beforehand; wanted: those that must be, found on the way."""

    def __init__(self, program: Program, rules: RuleBook, dims: dict[str, Dims], prologue: dict[Place, Early]) -> None:
        self.program, self.rules, self.dims, self.prologue = program, rules, dims, prologue
        self.wanted: dict[Place, Early] = {}
        self.states: dict[ValueRef, State] = {}
        self.rounds: dict[ValueRef, int | None] = {}
        self.factors: dict[str, dict[str, str]] = {name: {} for name in program.templates}
        self.sizes: set[int] = set()
        self.shares: list[frozenset[Share]] = []

    def run(self) -> None:
        """Calls of one template that read the same have the same states, unless something must be known beforehand."""
        known = {index for index, _ in self.prologue}
        first_alike: dict[tuple[object, ...], _CallPass] = {}
        for index, call in enumerate(self.program.calls):
            reads = tuple((self.of(ref), self.round_of(ref)) for ref in call.inputs)
            key = (call.template, reads, index == self._loss_call, index if index in known else None)
            alike = first_alike.get(key)
            if alike is None:
                alike = _CallPass(self, index)
                alike.run()
                if not alike.waits:
                    first_alike[key] = alike
            for o in range(len(self.program.template_of(call).outputs)):
                ref, same = ValueRef("call", index, o), ValueRef("call", alike.index, o)
                self.states[ref], self.rounds[ref] = self.states[same], self.rounds[same]
            self.shares.append(frozenset(alike.shares))

    @property
    def _loss_call(self) -> int | None:
        loss = self.program.loss
        return loss.index if loss is not None and loss.kind == "call" else None

    def result(self) -> Batched:
        program = self.program
        shares = tuple(self.shares)
        outputs = tuple(map(self.of, program.outputs))
        loss = program.loss
        if loss is not None and loss.kind == "call" and outputs[0] == "whole":
            if loss in program.outputs[1:] or any(loss in call.inputs for call in program.calls):
                raise CoupledError("the loss depends on parameters alone, and is read elsewhere in the step")
            own = shares[loss.index] | {ResultShare("outputs", loss.output)}
            shares = (*shares[: loss.index], own, *shares[loss.index + 1 :])
            outputs = ("sum", *outputs[1:])
        if program.training and outputs[0] != "sum":
            raise CoupledError(
                "the loss is not a sum over the samples of the batch"
                + (f": it is the {outputs[0]}imum of theirs" if outputs[0] in ("max", "min") else "")
            )
        buffers = {name: self.of(ref) for name, ref in program.buffer_updates.items()}
        for name, state in buffers.items():
            if state not in ("whole", "sum"):
                raise CoupledError(f"buffer {name} is updated with values of single samples of the batch")
        return Batched(self.dims, self.factors, frozenset(self.sizes), shares, dict(self.prologue), outputs, buffers)

    def of(self, ref: ValueRef) -> State:
        """State of a value at program level."""
        if ref.kind == "input":
            return "whole" if self.program.batch_dims[ref.index] is None else "shard"
        return "whole" if ref.kind == "buffer" else self.states[ref]

    def round_of(self, ref: ValueRef) -> int | None:
        """The round before the first forward in which a value, or each microbatch's part of it, can be computed; None where it
        depends on more than inputs."""
        if ref.kind == "call":
            return self.rounds[ref]
        return 0 if ref.kind == "input" or ref.name not in self.program.buffer_updates else None


class _CallPass:
    """The states of one call's values. waits: whether it needs a sum that must be known beforehand."""

    def __init__(self, whole: _Pass, index: int) -> None:
        self.whole, self.index = whole, index
        self.call = whole.program.calls[index]
        self.template: Template = whole.program.template_of(self.call)
        self.dims = whole.dims[self.template.name]
        self.states: dict[str, State] = dict.fromkeys(self.template.params, "whole")
        self.rounds: dict[str, int | None] = dict.fromkeys(self.template.params)
        self.shares: set[Share] = set()
        self.waits = False

    def run(self) -> None:
        template = self.template
        for value, ref in zip(template.inputs, self.call.inputs, strict=True):
            self.states[value] = self.whole.of(ref)
            self.rounds[value] = self.whole.round_of(ref)
            if self.states[value] != "unknown" and (self.states[value] == "shard") != (value in self.dims):
                self._couples(f"takes {_described(self.whole.program, ref)} along the batch, which has no batch dim")
        late = [n for n in template.ops if n.meta["phase"] != "F"]
        for node in template.ops:
            if node.meta["phase"] == "F":
                self._op(node)
        for o, value in enumerate(template.outputs):
            ref = ValueRef("call", self.index, o)
            self.whole.states[ref], self.whole.rounds[ref] = self.states[value], self.rounds[value]
            tangent = template.tangents[o]
            if tangent is not None:
                is_loss = ref == self.whole.program.loss
                self.states[tangent] = "whole" if is_loss else OF_GRADIENT[self.states[value]]
                self.rounds[tangent] = None
        for node in late:
            self._op(node)
        for slot, (value, grad) in enumerate(zip(template.inputs, template.input_grads, strict=True)):
            self._gradient(ResultShare("input_grads", slot), grad, OF_GRADIENT[self.states[value]])
        for slot, grad in enumerate(template.param_grads):
            self._gradient(ResultShare("param_grads", slot), grad, "sum")

    def _gradient(self, place: ResultShare, grad: str | None, wanted: State) -> None:
        """Make the gradient that the call returns at a place one of the wanted state, by shares of it where it is whole."""
        if grad is None or self.states[grad] == wanted or "unknown" in (self.states[grad], wanted):
            return
        if (self.states[grad], wanted) != ("whole", "sum"):
            self._couples(f"has a gradient {grad} that is {self.states[grad]} where it should be {wanted}")
        self.shares.add(place)

    def _op(self, node: fx.Node) -> None:
        call = self.template.op_calls[node.name]
        rule = self.whole.rules.rule(call)
        reads, results = operand_values(node), result_values(node)
        if any(self.states[v] == "unknown" for v in reads):
            self.states |= dict.fromkeys(results.values(), "unknown")
            self.rounds |= dict.fromkeys(results.values())
            return
        held = self._factor(node, rule, reads, results)
        known = [one for one in map(self.rounds.__getitem__, reads) if one is not None]
        is_early = node.meta["phase"] == "F" and not self.template.random and len(known) == len(reads)
        first = max(known, default=0) if is_early else None
        states = self._together(node, call, rule, reads) if held is None else self._sharded(node, rule, reads, *held)
        for i, value in results.items():
            state = states[i]
            expected: dict[int, Part] = {}
            if held is not None:
                expected = _places(rule.results[i], held[0], held[1], rule)
            if _ends(expected) != _ends(self.dims.get(value, {})):
                self._couples("makes all of its batch dim at once", node)
            self.whole.sizes.update(part.size for part in expected.values())
            early = self.whole.prologue.get((self.index, value))
            self.states[value] = state if early is None else "whole"
            self.rounds[value] = first if early is None else early.round + 1

    def _factor(self, node: fx.Node, rule: Rule, reads: list[str], results: dict[int, str]) -> tuple[str, Part] | None:
        """The op's factor that holds the batch, and where in it."""
        places = [(v, labels) for v, labels in zip(reads, rule.operands, strict=True) if self.states[v] == "shard"]
        places += [(results[i], labels) for i, labels in enumerate(rule.results)]
        factors: dict[str, Part] = {}
        for value, labels in places:
            for d, part in self.dims.get(value, {}).items():
                held = factor_of(labels, d, part, rule)
                if held is None:
                    self._couples("works along the batch", node)
                f, inside = held
                if f in factors and _end(factors[f]) != _end(inside):
                    self._couples("has the batch in one index in two ways", node)
                factors[f] = min(inside, factors.get(f, inside), key=lambda p: p.size)
        if len(factors) > 1:
            self._couples("brings every sample of the batch together with every other", node)
        for f, inside in factors.items():
            if rule.factors[f].whole:
                self._couples("works along the batch", node)
            self.whole.sizes.add(inside.size)
            self.whole.factors[self.template.name][node.name] = f
            return f, inside
        return None

    def _sharded(self, node: fx.Node, rule: Rule, reads: list[str], factor: str, part: Part) -> list[State]:
        """Results of an op on a shard: every operand that has the factor must be one along it."""
        takes_pieces = (definition := find(op_name(node.target))) is not None and definition.pieces
        added = rule.added if factor in rule.summed else frozenset()
        terms = [
            v for k, v in enumerate(reads) if self.states[v] not in ("shard", "whole", *(["sum"] if k in added else []))
        ]
        if terms:
            return self._known_first(node, rule, terms)
        for k in added:
            self._add_share(node, k)
        for k, (value, labels) in enumerate(zip(reads, rule.operands, strict=True)):
            state = self.states[value]
            expected = _ends(_places(labels, factor, part, rule))
            if expected != _ends(self.dims.get(value, {}) if state == "shard" else {}):
                self._couples(f"takes {value} along the batch, which has no batch dim (operand {k})", node)
        every_dim = (dim for labels in (*rule.operands, *rule.results) for dim in labels or ())
        if not takes_pieces and any(_is_minor(dim, factor, rule) for dim in every_dim):
            self._couples("has the batch as the minor part of a dim", node)
        states: list[State] = []
        for labels in rule.results:
            kept = labels is not None and any(factor in dim for dim in labels)
            reduce = rule.factors[factor].reduce if factor in rule.contracted else None
            states.append("shard" if kept else "whole" if reduce is None else reduce)  # type: ignore[arg-type]
        return states

    def _add_share(self, node: fx.Node, operand: int) -> None:
        """Make an operand a term of the sum that the op makes, of which every microbatch has a part; zeros are one as it is."""
        read = operand_nodes(node)[operand]
        if self.states[read.name] == "whole" and not is_zeros(read):
            if not self.template.op_calls[node.name].operands[operand].is_float:
                self._couples("adds integers of the batch to others", node)
            self.shares.add(OperandShare(node.name, operand))

    def _together(self, node: fx.Node, call: OpCall, rule: Rule, reads: list[str]) -> list[State]:
        """Results of an op on whole values and terms of sums."""
        if call.get("site", -1) != -1:
            self._couples("draws random numbers without a batch dim, which all samples share", node)
        terms = {k for k, v in enumerate(reads) if self.states[v] != "whole"}
        if not terms:
            return ["whole"] * len(call.results)
        if shows(node):
            return [self.states[reads[0]]]
        for k in terms:
            if self.states[reads[k]] != "sum":
                return self._known_first(node, rule, [reads[k]])
        for group in (*rule.linear, *more_linear(call)):
            rest = [reads[k] for k in terms - group]
            if all(self.rounds[v] is not None for v in rest) and terms & group:
                if rest:
                    return self._known_first(node, rule, rest)
                shared = group - terms
                if all(call.operands[k].is_float for k in shared):
                    self.shares |= {OperandShare(node.name, k) for k in shared}
                    return ["sum"] * len(call.results)
        scalar = affine(call)
        if scalar is not None:
            self.shares.add(OperandShare(node.name, scalar))
            return ["sum"] * len(call.results)
        return self._known_first(node, rule, [reads[k] for k in terms])

    def _known_first(self, node: fx.Node, rule: Rule, values: list[str]) -> list[State]:
        """Results of an op that needs the sums `values` beforehand, which is where these depend on inputs alone."""
        self.waits = True
        for value in values:
            first = self.rounds[value]
            if first is None or self.states[value] == "shard":
                self._couples("needs a sum over all samples of the batch first", node)
            self.whole.wanted[self._place(value)] = Early(first, self.states[value])
        return ["unknown"] * len(rule.results)

    def _place(self, value: str) -> Place:
        """The call, and the value of it, that a sum comes from."""
        if value not in self.template.inputs:
            return self.index, value
        ref = self.call.inputs[self.template.inputs.index(value)]
        return ref.index, self.whole.program.template_of(self.whole.program.calls[ref.index]).outputs[ref.output]

    def _couples(self, why: str, node: fx.Node | None = None) -> NoReturn:
        """Refuse the program, whose samples depend on each other here. Raises CoupledError."""
        where = (node.meta["source"] if node is not None else "") or self.call.path
        what = op_name(node.target) if node is not None else self.template.name
        raise CoupledError(f"{what}{f' at {where}' if where else ''} {why}")


def _places(labels: Labels | None, factor: str, part: Part, rule: Rule) -> dict[int, Part]:
    """Dims of a tensor with these labels that hold the batch."""
    places = ((d, part_in(dim, factor, part, rule)) for d, dim in enumerate(labels or ()))
    return {d: here for d, here in places if here is not None}


def _end(part: Part) -> int:
    """Elements from the start of the batch's stride to its end: parts with one end are cut alike."""
    return part.inner * part.size


def _ends(places: dict[int, Part]) -> dict[int, int]:
    return {d: _end(part) for d, part in places.items()}


def _is_minor(dim: tuple[str, ...], factor: str, rule: Rule) -> bool:
    """Whether a dim has other factors before this one."""
    return factor in dim and any(rule.factors[f].size > 1 for f in dim[: dim.index(factor)])


def _described(program: Program, ref: ValueRef) -> str:
    """A value at program level, for people."""
    if ref.kind == "input":
        return f"input {program.inputs[ref.index][0]}"
    return f"buffer {ref.name}" if ref.kind == "buffer" else f"a value of {program.calls[ref.index].path}"
