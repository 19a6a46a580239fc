"""The model as a tree of blocks, repeated ones once, down to its parameters; and what blocks do, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.text import short_op, size_text
from autopar.plan import Plan
from autopar.report.page.shown import runs, span_text
from autopar.report.program_facts import FunctionFacts, ParameterFacts, ProgramFacts, TemplateFacts

MOST_CHILDREN = 200
"""A block with more children of different kinds shows the first ones."""


@dataclass(frozen=True)
class Node:
    """A block, or several that are alike. times: how many; about: rows of a name and a text; code: the number of its lines in
    `Blocks.codes` (None: it has none of its own); at_worst: bytes of one at the worst moment, by cause."""

    name: str
    times: int = 1
    about: tuple[tuple[str, str], ...] = ()
    code: int | None = None
    children: tuple[Node, ...] = ()
    at_worst: tuple[tuple[str, float], ...] = ()

    @property
    def alike(self) -> object:
        """All that blocks have in common which are shown as one."""
        return self.about, self.code, self.children, self.at_worst

    @property
    def brief(self) -> str:
        """The block's figures in a line."""
        return ", ".join(f"{what} {text}" for what, text in self.about if what in BRIEF)


KEPT = "kept for backward"
KINDS = ("parameters", "gradients", "optimizer", "averages", KEPT)
AT_WORST = "at the worst moment"
BRIEF = ("parameters", KEPT, "stored")


@dataclass(frozen=True)
class Blocks:
    """The tree, and the functions of every kind of block as plain data."""

    roots: tuple[Node, ...]
    codes: tuple[dict[str, Any], ...]


@dataclass
class _Block:
    """A block while the tree is put together. held: bytes by kind on a rank of every stage that has some of the block."""

    held: dict[int, dict[str, float]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    parameter: ParameterFacts | None = None
    children: dict[str, _Block] = field(default_factory=dict)
    at_worst: dict[str, float] = field(default_factory=dict)

    def hold(self, stage: int, kind: str, nbytes: float) -> None:
        """Add bytes that a rank of a stage holds for the block."""
        kinds = self.held.setdefault(stage, {})
        kinds[kind] = kinds.get(kind, 0.0) + nbytes

    def at(self, path: Sequence[str]) -> Iterator[_Block]:
        """The blocks on the way to a path."""
        here = self
        yield here
        for name in path:
            here = here.children.setdefault(name, _Block())
            yield here


def blocks(program: ProgramFacts, plan: Plan, at_worst: Iterable[tuple[str, str, float]] = ()) -> Blocks:
    """The tree of a program. at_worst: names of modules and parameters, causes, and bytes at the worst moment."""
    root, codes = _Block(), list[tuple[str, TemplateFacts]]()
    seen: set[str] = set()
    for number, (stage, planned) in enumerate(zip(program.stages, plan.stages, strict=True)):
        first, last = planned.calls
        numbers: dict[str, int] = {}
        for call in program.calls[first:last]:
            if call.template not in numbers and call.template in stage.templates:
                one = (call.template, stage.templates[call.template])
                if one not in codes:
                    codes.append(one)
                numbers[call.template] = codes.index(one)
            on_way = list(root.at((call.path or call.template).split(".")))
            for block in on_way:
                block.hold(number, KEPT, call.held_bytes)
            if call.template in numbers and numbers[call.template] not in on_way[-1].codes:
                on_way[-1].codes.append(numbers[call.template])
        for name, parameter in stage.parameters.items():
            if name in seen:
                continue
            seen.add(name)
            on_way = list(root.at(name.split(".")))
            on_way[-1].parameter = parameter
            for block in on_way:
                for kind, nbytes in parameter.resting.items():
                    block.hold(number, kind, nbytes)
    for name, cause, nbytes in at_worst:
        for block in root.at(name.split(".")):
            block.at_worst[cause] = block.at_worst.get(cause, 0.0) + nbytes
    return Blocks(_nodes(root), tuple(_code(name, template) for name, template in codes))


def _nodes(block: _Block) -> tuple[Node, ...]:
    """The children of a block, runs of those alike as one."""
    children = [_node(name, child) for name, child in block.children.items()]
    folded = []
    for first, last in runs(children, lambda node: (node.name.isdigit(), node.alike if node.name.isdigit() else node)):
        name = children[first].name
        name = name if first == last else span_text(name, children[last].name)
        folded.append(replace(children[first], name=name, times=last - first + 1))
    if len(folded) > MOST_CHILDREN:
        folded = [*folded[:MOST_CHILDREN], _more(folded[MOST_CHILDREN:])]
    return tuple(folded)


def _more(nodes: Sequence[Node]) -> Node:
    """Blocks that are not shown as one."""
    at_worst: dict[str, float] = {}
    for node in nodes:
        for cause, nbytes in node.at_worst:
            at_worst[cause] = at_worst.get(cause, 0.0) + node.times * nbytes
    return Node(f"{sum(node.times for node in nodes):,} more", at_worst=tuple(at_worst.items()))


def _node(name: str, block: _Block) -> Node:
    most = max(block.held.values(), key=lambda kinds: sum(kinds.values()), default={})
    about = [(kind, size_text(most[kind])) for kind in KINDS if most.get(kind)]
    if block.at_worst:
        about.append((AT_WORST, size_text(sum(block.at_worst.values()))))
    if block.parameter is not None:
        about.append(("stored", block.parameter.stored))
        if block.parameter.trained:
            about.append(("gradient and optimizer", block.parameter.gradient_and_optimizer))
    code = block.codes[0] if block.codes else None
    return Node(name, 1, tuple(about), code, _nodes(block), tuple(block.at_worst.items()))


def _code(name: str, template: TemplateFacts) -> dict[str, Any]:
    return {
        "name": name,
        "functions": [{"name": kind, **_function(function)} for kind, function in template.functions.items()],
    }


def _function(function: FunctionFacts) -> dict[str, Any]:
    """A function as the page's script shows it: arguments with specs; per line source, result, call, specs and messages."""
    lines: list[list[str]] = []
    source = ""
    for line in function.lines:
        text = " ".join(line.source.split())
        messages = [f"over {line.axis}"] if line.axis else []
        messages += [f"{one.times} × {one.kind} of {size_text(one.nbytes)} over {one.axis}" for one in line.sent]
        lines.append(
            [
                text if text != source else "",
                ", ".join(line.out),
                f"{short_op(line.op)}({', '.join(line.reads)})",
                ", ".join(spec for spec in line.specs if spec),
                "; ".join(messages),
            ]
        )
        source = text or source
    return {"arguments": [list(pair) for pair in _pairs(function.arguments)], "lines": lines}


def _pairs(types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from types.items()
