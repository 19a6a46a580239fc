"""The program in order: its templates rewritten, and its inputs, buffers and outputs put in order or back by calls of their own.

Such a call stands before the first that reads its value, so where a program is cut into stages, labels need not travel from
the first to the last.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.capture.exported import Captured
from autopar.ir.program import Call, Program, Template, ValueRef
from autopar.ir.types import TensorType
from autopar.passes.batch.dims import Dims, Part
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.order.dims import causal_attention, sequence_dims
from autopar.passes.order.refused import NotOrdered
from autopar.passes.order.rewritten import Reordered, reordered, rewritten
from autopar.passes.rules.book import RuleBook


def in_order(batches: Microbatches, order: int) -> Microbatches:
    """The program in this order by number of microbatches. Raises NotOrdered, which says why it cannot be."""
    if not order:
        return batches
    rules, whole, separate = batches.rules, batches.whole, batches.separate

    def captured(one: Captured) -> Captured:
        return Captured(ordered(one.program, rules, order), one.exported)

    apart = (lambda pieces: captured(separate(pieces))) if separate is not None else None
    return Microbatches(captured(whole), rules, apart)


def ordered(program: Program, rules: RuleBook, order: int) -> Program:
    """A program that computes the same, its sequence in zigzag order of 2·order chunks. Raises NotOrdered."""
    dims = sequence_dims(program, rules)
    templates: dict[str, Template] = {}
    moved: list[Reordered] = []
    for name, template in program.templates.items():
        templates[name], own = rewritten(template, dims[name], order, rules) if dims[name] else (template, [])
        moved += own * program.multiplicity.get(name, 0)
    _check_cost(program, moved)
    calls = _Calls(program, templates, order)
    for index, call in enumerate(program.calls):
        calls.add(index, call, dims[call.template])

    def back(ref: ValueRef) -> ValueRef:
        template = program.template_of(program.calls[ref.index]) if ref.kind == "call" else None
        places = dims[template.name].get(template.outputs[ref.output], {}) if template is not None else {}
        return calls.reorder(calls.at(ref), program.type_of(ref), places, Call("", (), (), prologue=False), back=True)

    return replace(
        program,
        outputs=tuple(map(back, program.outputs)),
        buffer_updates={name: back(ref) for name, ref in program.buffer_updates.items()},
        templates=calls.templates,
        calls=tuple(calls.calls),
    )


class _Calls:
    """Calls of the program in order, as they come. place: where each of the original ones stands."""

    def __init__(self, program: Program, templates: dict[str, Template], order: int) -> None:
        self.program, self.templates, self.order = program, templates, order
        self.calls: list[Call] = []
        self.place: dict[int, int] = {}
        self._made: dict[object, ValueRef] = {}
        self._names: dict[object, str] = {}

    def add(self, index: int, call: Call, dims: Dims) -> None:
        """A call of the program with what it reads."""
        inputs = []
        for slot, ref in zip(self.program.template_of(call).inputs, call.inputs, strict=True):
            if ref.kind == "call":
                inputs.append(self.at(ref))
            else:
                inputs.append(self.reorder(ref, self.program.type_of(ref), dims.get(slot, {}), call))
        self.place[index] = len(self.calls)
        self.calls.append(replace(call, inputs=tuple(inputs)))

    def at(self, ref: ValueRef) -> ValueRef:
        """A value of the original program."""
        return replace(ref, index=self.place[ref.index]) if ref.kind == "call" else ref

    def reorder(
        self, ref: ValueRef, type_: TensorType, places: dict[int, Part], reader: Call, back: bool = False
    ) -> ValueRef:
        """A value put in order, or back, before a call that reads it."""
        if not places:
            return ref
        parts = tuple(sorted(places.items()))
        if (ref, parts) not in self._made:
            name = self._template(type_, places, back)
            self._made[ref, parts] = ValueRef("call", len(self.calls))
            self.calls.append(Call(name, (), (ref,), reader.path, reader.prologue, reader.start))
        return self._made[ref, parts]

    def _template(self, type_: TensorType, places: dict[int, Part], back: bool) -> str:
        key = type_, tuple(sorted(places.items())), back
        if key not in self._names:
            stem = "back" if back else "in_order"
            name = next(n for n in (stem, *(f"{stem}_{k}" for k in range(2, 999))) if n not in self.templates)
            graph = fx.Graph()
            x = graph.placeholder("x")
            x.meta = {"type": type_, "phase": "F", "source": ""}
            y = reordered(graph, x, places, self.order, back)
            graph.output((y,))
            self.templates[name] = Template(name, graph, (), (x.name,), (y.name,), (None,), (None,), ())
            self._names[key] = name
        return self._names[key]


def _check_cost(program: Program, moved: list[Reordered]) -> None:
    """Raises NotOrdered where floating tensors are reordered that are more, in all, than queries of one attention are, forth and
    back: such a reorder costs like a gather."""
    calls = (call for template in program.templates.values() for call in causal_attention(template).values())
    queries = [call.operand("q").nbytes for call in calls]
    if sum(one.nbytes for one in moved) > 2 * min(queries):
        one = max(moved, key=lambda one: one.nbytes)
        where = f" at {one.source}" if one.source else ""
        raise NotOrdered(
            f"{one.value}{where}, of {one.nbytes / 1e6:.3g} MB, would be moved for an op that minds the order"
        )
