"""A template whose sequence is in order: the same ops, with reorders around those that do not commute with it.

A value that holds the sequence has two forms, in order and natural. Ops that commute read and make the first, others the
second; each is made of the other once, where it is first needed. Inputs, outputs and gradients between calls are in order,
parameters and their gradients natural.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from autopar.ir.names import fresh_name
from autopar.ir.program import Template, is_getitem, operand_values, set_argument
from autopar.ir.rule import Labels, Rule
from autopar.ir.types import TensorType
from autopar.ops.order import reorder
from autopar.passes.batch.dims import Dims, Part, holding_factors, part_in
from autopar.passes.order.commutes import changes_in_order
from autopar.passes.order.refused import NotOrdered
from autopar.passes.rules.book import RuleBook

Form = Literal["in order", "natural"]
_PHASES = {"F": ("F",), "B": ("F", "B"), "W": ("F", "B", "W")}
"""The phases whose values an op may read, by the phase of the op."""


@dataclass(frozen=True)
class Reordered:
    """A floating tensor that is reordered, where, and its bytes."""

    value: str
    source: str
    nbytes: int


def rewritten(template: Template, dims: Dims, order: int, rules: RuleBook) -> tuple[Template, list[Reordered]]:
    """The template in order, and the floating tensors that it reorders. Raises NotOrdered where the sequence cannot be cut."""
    rewrite = _Rewrite(template, dims, order, rules)
    return rewrite.template(), rewrite.reordered


def reordered(graph: fx.Graph, node: fx.Node, places: dict[int, Part], order: int, back: bool) -> fx.Node:
    """A value with every dim that holds the sequence in order, or back. Raises NotOrdered where one cannot be cut so."""
    for dim, part in places.items():
        if part.size % (2 * order):
            raise NotOrdered(f"{part.size} steps of the sequence do not divide into {2 * order} chunks")
        made = graph.call_function(reorder, (node, dim, order, back, part.size, part.inner))
        made.meta = dict(node.meta)
        node = made
    return node


class _Rewrite:
    """forms: of every value in its phase, the nodes of the new graph that have it."""

    def __init__(self, template: Template, dims: Dims, order: int, rules: RuleBook) -> None:
        self.whole, self.dims, self.order, self.rules = template, dims, order, rules
        self.graph = fx.Graph()
        self.forms: dict[tuple[str, Form, str], fx.Node] = {}
        self.reordered: list[Reordered] = []
        self.taken = set(template.nodes)

    def template(self) -> Template:
        whole = self.whole
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                self._place(node, self._copy(node, []), "natural" if node.name in whole.params else "in order")
            elif is_getitem(node):
                self._getitem(node)
            elif node.op == "call_function":
                self._op(node)
        outputs = [self._form(value, "in order", "F") for value in whole.outputs]
        input_grads = [None if g is None else self._form(g, "in order", "B") for g in whole.input_grads]
        param_grads = [None if g is None else self._form(g, "natural", "W") for g in whole.param_grads]
        self.graph.output(tuple(n for n in (*outputs, *input_grads, *param_grads) if n is not None))
        return replace(
            whole,
            graph=self.graph,
            outputs=tuple(n.name for n in outputs),
            input_grads=tuple(None if n is None else n.name for n in input_grads),
            param_grads=tuple(None if n is None else n.name for n in param_grads),
        )

    def _op(self, node: fx.Node) -> None:
        call = self.whole.op_calls[node.name]
        rule = self.rules.rule(call)
        places, held = holding_factors(node, rule, self.dims)
        agrees = all(_ends(self.dims.get(v, {})) == _ends_by(labels, held, rule) for v, labels in places)
        changes = changes_in_order(call, rule, held, self.order) if agrees else None
        form: Form = "natural" if changes is None else "in order"
        copied = self._copy(node, [self._form(v, form, node.meta["phase"]) for v in operand_values(node)])
        for name, value in (changes or {}).items():
            set_argument(copied, name, value)
        self._place(node, copied, form)

    def _getitem(self, node: fx.Node) -> None:
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        form: Form = "in order" if (producer.name, "in order", producer.meta["phase"]) in self.forms else "natural"
        self._place(node, self._copy(node, [self.forms[producer.name, form, producer.meta["phase"]]]), form)

    def _copy(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        read = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(read))
        copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copied.name, copied.meta = node.name, dict(node.meta)
        return copied

    def _place(self, node: fx.Node, copied: fx.Node, form: Form) -> None:
        self.forms[node.name, form, node.meta.get("phase", "F")] = copied

    def _form(self, value: str, form: Form, phase: str) -> fx.Node:
        """A value as it is needed in a phase."""
        places = self.dims.get(value, {})
        other: Form = "natural" if form == "in order" else "in order"
        wanted = (form, other) if not places else (form,)
        for one in wanted:
            for made_in in _PHASES[phase]:
                if (value, one, made_in) in self.forms:
                    return self.forms[value, one, made_in]
        source = next(self.forms[value, other, p] for p in _PHASES[phase] if (value, other, p) in self.forms)
        made = reordered(self.graph, source, places, self.order, back=form == "natural")
        stem = f"{value}_{'natural' if form == 'natural' else 'ordered'}"
        made.name = fresh_name(stem if phase == "F" else f"{stem}_{phase.lower()}", self.taken)
        self.taken.add(made.name)
        for node in _between(source, made):
            node.meta |= {"phase": phase, "source": source.meta.get("source", "")}
        self.forms[value, form, phase] = made
        type_ = made.meta["type"]
        if isinstance(type_, TensorType) and not _is_cheap(type_):
            self.reordered.append(Reordered(value, source.meta.get("source", ""), type_.nbytes))
        return made


def _between(source: fx.Node, made: fx.Node) -> list[fx.Node]:
    """The reorders of one value, one for each dim."""
    nodes = [made]
    while (before := nodes[-1].args[0]) is not source:
        assert isinstance(before, fx.Node)
        nodes.append(before)
    return nodes


def _is_cheap(type_: TensorType) -> bool:
    return not (type_.dtype.is_floating_point or type_.dtype.is_complex)


def _ends(places: dict[int, Part]) -> dict[int, int]:
    """By dim the elements that the sequence spans: where these are equal so are its chunks."""
    return {d: part.inner * part.size for d, part in places.items()}


def _ends_by(labels: Labels | None, held: dict[str, Part], rule: Rule) -> dict[int, int]:
    """The same of a tensor with these labels, by the op's factors."""
    ends = {}
    for d, dim in enumerate(labels or ()):
        for f, part in held.items():
            if (here := part_in(dim, f, part, rule)) is not None:
                ends[d] = here.inner * here.size
    return ends
