"""Guards of indices: every integer that an op uses as an index is in range, as eager would see to by raising an error.

For each index of a program's forward the values are followed back to where they come from. What is always in range (an
argmax, an arange, a remainder) needs no guard. What a batch input holds unchanged is checked at the entry of the step:

    loss of `torch.where(y != -100, y, 0)` over 10 classes      input y holds 0 to 9, or -100

What is computed on the way is checked where the op takes it: an op `in_range` before it, which gives its operand back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Program, Template, is_getitem, op_name, operand_nodes, resolve
from autopar.ir.ranges import ANY, Index, InputRange, Range
from autopar.ir.types import TensorType
from autopar.ops.registry import OpDef, find

IN_RANGE = torch.ops.autopar.in_range.default
MOST_OPS = 64
"""How far values are followed back to see what they can be."""
_NO_FACTS = OpDef()

Place = tuple[int, fx.Node]
"""A value of a call, by the call's number and the template's node: an op's, or a placeholder that holds no other call's."""
Check = tuple[str, int]
"""An operand that is an index, by its op's name and its number."""


def guard_indices(program: Program, constants: Mapping[str, torch.Tensor]) -> Program:
    """The program with its guards. constants: values of buffers that never change."""
    sources = _Sources(program, constants)
    of_inputs: list[InputRange] = []
    indices = {name: _indices(template) for name, template in program.templates.items()}
    inside: dict[str, dict[Check, Index]] = {name: {} for name in program.templates}
    for number, call in enumerate(program.calls):
        for node, index in indices[call.template]:
            value = sources.origin(number, operand_nodes(node)[index.operand])
            needed = sources.needed(value, index.allowed, frozenset(), node.meta["source"])
            if needed is None:
                inside[call.template][node.name, index.operand] = index
            else:
                of_inputs += needed
    templates = {name: _checked(template, inside[name]) for name, template in program.templates.items()}
    return replace(program, templates=templates, guards=_strongest(of_inputs))


def without_guards(program: Program) -> Program:
    """The program without the checks that tracing put into it."""
    return replace(program, templates={name: _checked(t, {}) for name, t in program.templates.items()})


class _Sources:
    """Where the integers of a program come from, and what they can be."""

    def __init__(self, program: Program, constants: Mapping[str, torch.Tensor]) -> None:
        self.program, self.constants = program, constants
        self._ranges: dict[Place, Range] = {}

    def origin(self, number: int, node: fx.Node) -> Place:
        """The op that makes a value, in whichever call; a placeholder of an input, buffer or parameter."""
        call = self.program.calls[number]
        template = self.program.template_of(call)
        while node.op == "placeholder" and node.name in template.inputs:
            ref = call.inputs[template.inputs.index(node.name)]
            if ref.kind != "call":
                break
            number, call = ref.index, self.program.calls[ref.index]
            template = self.program.template_of(call)
            node = template.nodes[template.outputs[ref.output]]
        return number, node

    def operands(self, place: Place) -> list[Place]:
        """The operands of the op at a place."""
        return [self.origin(place[0], node) for node in operand_nodes(place[1])]

    def ref(self, place: Place) -> Any:
        """The input or buffer that a placeholder holds; None of parameters and of what is no placeholder."""
        number, node = place
        call = self.program.calls[number]
        inputs = self.program.template_of(call).inputs
        return call.inputs[inputs.index(node.name)] if node.op == "placeholder" and node.name in inputs else None

    def needed(self, place: Place, allowed: Range, also: frozenset[int], source: str) -> list[InputRange] | None:
        """The ranges that inputs must keep to for a value to be allowed; None where it takes more to tell than inputs."""
        if self.range(place) in allowed:
            return []
        ref, node = self.ref(place), place[1]
        if ref is not None:
            return [InputRange(ref.index, allowed, also, source)] if ref.kind == "input" else None
        masked = self.masked(place)
        if masked is not None:
            value, ignored, other = masked
            if isinstance(other, tuple):
                rest = self.needed(other, allowed, also, source)
            else:
                rest = [] if other in allowed or other in also else None
            first = self.needed(value, allowed, also | {ignored}, source)
            return None if first is None or rest is None else first + rest
        if not _facts(node).rearranges or not all(_fits(operand, node) for operand in operand_nodes(node)):
            return None
        parts = [self.needed(operand, allowed, also, source) for operand in self.operands(place)]
        known = [part for part in parts if part is not None]
        return [one for part in known for one in part] if len(known) == len(parts) else None

    def masked(self, place: Place) -> tuple[Place, int, Place | int] | None:
        """(t, ignored, other) where a value is t, with `other` where t is `ignored`."""
        node = place[1]
        operands = self.operands(place) if node.op == "call_function" else []
        which: dict[str, tuple[Place, Place | int]]
        match _name(node), operands:
            case "aten.where", [condition, a, b]:
                which = {"aten.ne": (a, b), "aten.eq": (b, a)}
            case "aten.masked_fill", [value, condition] if isinstance(node.args[2], int):
                which = {"aten.eq": (value, node.args[2])}
            case "aten.masked_fill", [value, condition, filled]:
                which = {"aten.eq": (value, filled)}
            case _:
                return None
        compared = condition[1]
        if _name(compared) not in which or len(self.operands(condition)) != 1 or not isinstance(compared.args[1], int):
            return None
        value, other = which[_name(compared)]
        return (value, compared.args[1], other) if self._same(self.operands(condition)[0], value) else None

    def _same(self, a: Place, b: Place) -> bool:
        """Whether two places hold one value."""
        return a == b or (self.ref(a) is not None and self.ref(a) == self.ref(b))

    def range(self, place: Place, steps: int = MOST_OPS) -> Range:
        """The range of an integer value, whatever the inputs are; a wider one where it comes from further than `steps`."""
        if place not in self._ranges:
            self._ranges[place] = self._range(place, steps)
        return self._ranges[place]

    def _range(self, place: Place, steps: int) -> Range:
        number, node = place
        full = _all_of(node)
        if full == ANY or steps == 0:
            return full
        if node.op != "call_function":
            ref = self.ref(place)
            constant = self.constants.get(ref.name) if ref is not None and ref.kind == "buffer" else None
            if constant is None or not constant.numel():
                return full
            return Range(int(constant.min()), int(constant.max()) + 1)
        producer, result = resolve(node)
        values = _facts(producer).values
        if values is None:
            return full
        operands = tuple(self.range(operand, steps - 1) for operand in self.operands((number, producer)))
        op_calls = self.program.template_of(self.program.calls[number]).op_calls
        found = values(op_calls[producer.name], operands, result)
        return found if found is not None and found in full else full


def _indices(template: Template) -> list[tuple[fx.Node, Index]]:
    """The indices of a template's forward."""
    found = []
    for node in template.ops:
        indexes = _facts(node).indexes
        if node.meta["phase"] == "F" and indexes is not None:
            found += [(node, index) for index in indexes(template.op_calls[node.name])]
    return found


def _checked(template: Template, checks: Mapping[Check, Index]) -> Template:
    """The template with `in_range` before these operands of these ops, and no other."""
    own = [node for node in template.ops if node.target is IN_RANGE]
    missing = {at: index for at, index in checks.items() if template.nodes[at[0]].target is not IN_RANGE}
    for (name, operand), index in missing.items():
        node = template.nodes[name]
        value = operand_nodes(node)[operand]
        with template.graph.inserting_before(node):
            arguments = value, index.allowed.low, index.allowed.high
            check = template.graph.create_node("call_function", IN_RANGE, arguments, {}, f"{value.name}_in_range")
        check.meta = {**value.meta, "phase": "F", "source": node.meta["source"]}
        _replace_operand(node, operand, check)
    surplus = [node for node in own if (node.name, 0) not in checks]
    for node in surplus:
        node.replace_all_uses_with(operand_nodes(node)[0])
        template.graph.erase_node(node)
    return replace(template) if missing or surplus else template


def _replace_operand(node: fx.Node, operand: int, new: fx.Node) -> None:
    """Another node as the operand of this number."""
    numbers = iter(range(len(operand_nodes(node))))

    def place(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return new if next(numbers) == operand else arg
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(place, arg))
        return arg

    args = tuple(map(place, node.args))
    node.kwargs = {key: place(value) for key, value in node.kwargs.items()}
    node.args = args


def _strongest(guards: Sequence[InputRange]) -> tuple[InputRange, ...]:
    """The guards that no other guard implies, by input."""
    kept: list[InputRange] = []
    for one in guards:
        if not any(other.implies(one) for other in kept):
            kept = [other for other in kept if not one.implies(other)] + [one]
    return tuple(sorted(kept, key=lambda guard: guard.input))


def _name(node: fx.Node) -> str:
    """`aten.where` of any overload."""
    return ".".join(op_name(node.target).split(".")[:2])


def _facts(node: fx.Node) -> OpDef:
    if node.op != "call_function" or is_getitem(node):
        return _NO_FACTS
    return find(op_name(node.target)) or _NO_FACTS


def _all_of(node: fx.Node) -> Range:
    """All that a value's dtype holds."""
    type_ = node.meta["type"]
    return Range.of_dtype(type_.dtype) if isinstance(type_, TensorType) else ANY


def _fits(operand: fx.Node, node: fx.Node) -> bool:
    """Whether a value's integers stay what they are in the dtype of another."""
    return ANY not in (_all_of(operand), _all_of(node)) and _all_of(operand) in _all_of(node)
