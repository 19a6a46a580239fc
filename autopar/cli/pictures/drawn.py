"""The sharded graph of a saved program as nodes and edges, a cluster per function, for whoever draws it.

The first cluster of a stage is its order of calls, in which a layer that is repeated stands once. A cluster per function of each
template follows. A function of many lines is drawn in blocks of consecutive lines: those between two messages first, and if these
are still too many, parts of nearly equal length. Consecutive lines never make a circle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.cli.saved import Saved
from autopar.ir.steps import STEP_KINDS
from autopar.ir.text import short_op, size_text
from autopar.report.program_facts import CallFacts, FunctionFacts, LineFacts, TemplateFacts

MESSAGES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""Kinds of messages that are told apart; any other is a "message"."""
HINT_LINES = 30
MOST_PERIOD = 24
"""Calls and messages of the longest part whose repetitions are found."""


@dataclass(frozen=True)
class Node:
    """A box. kind: "op", "block" of ops, "call", "argument", "saved" by forward, or one of `MESSAGES` or "message"; hint: more of
    it."""

    name: str
    label: str
    kind: str
    hint: str = ""

    @property
    def sends(self) -> bool:
        """Whether messages travel in it."""
        return self.kind in (*MESSAGES, "message")


@dataclass(frozen=True)
class Edge:
    """A value on its way. spec: of the value; of several values those of the first."""

    source: str
    target: str
    spec: str


@dataclass(frozen=True)
class Cluster:
    """A function, or the calls of a stage."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def clusters(saved: Saved, most: int | None = None) -> Iterator[Cluster]:
    """All clusters of a program; a template that several stages have alike is in it once. most: nodes of a function that are
    drawn one by one."""
    seen: list[tuple[str, TemplateFacts]] = []
    for number, stage in enumerate(saved.stages):
        prefix = f"stage_{number}_" if len(saved.stages) > 1 else ""
        if forward := stage.functions.get("forward"):
            yield _cluster(f"{prefix}calls", forward, _runs_of_calls(forward, saved.program.calls), most)
        for name, template in stage.templates.items():
            if (name, template) in seen:
                continue
            seen.append((name, template))
            for kind, function in template.functions.items():
                yield _cluster(f"{prefix}{name}_{kind}", function, _runs_of_lines(function.lines, most), most)


@dataclass(frozen=True)
class _Run:
    """Consecutive lines that are one node, by their indices. label: empty where the lines say it."""

    lines: range
    label: str = ""


def _runs_of_calls(function: FunctionFacts, calls: Sequence[CallFacts]) -> list[_Run]:
    """The calls and the messages between them, those that are repeated as one. Fetches of parameters are no nodes. calls: of the
    program."""
    shown: list[tuple[int, str]] = []
    for i, line in enumerate(function.lines):
        if line.op.startswith("call."):
            named = [one.template for one in calls[line.call : line.call + 1]] if line.call is not None else []
            shown.append((i, next(iter(named), " ".join(line.source.split()) or "call")))
        elif line.axis is not None or line.sent:
            shown.append((i, _op_text(line)))
    labels = [label for _, label in shown]
    runs = []
    for start, period, times in repeats(labels):
        first, last = shown[start][0], shown[start + period * times - 1][0]
        label = "\n".join(labels[start : start + period])
        runs.append(_Run(range(first, last + 1), f"{label} ×{times}" if times > 1 else label))
    return runs


def repeats(labels: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Where parts of a sequence that follow each other alike start, how long one is, and how many there are: of the parts that
    start at a place those that cover most. What is not repeated is a part of one entry.

    `repeats("abcbcd")`: (0, 1, 1), (1, 2, 2), (5, 1, 1).
    """
    start = 0
    while start < len(labels):
        period, times = 1, 1
        for longer in range(1, min(MOST_PERIOD, (len(labels) - start) // 2) + 1):
            part, alike = labels[start : start + longer], 1
            while labels[start + alike * longer : start + (alike + 1) * longer] == part:
                alike += 1
            if alike > 1 and alike * longer > times * period:
                period, times = longer, alike
        yield start, period, times
        start += period * times


def _runs_of_lines(lines: Sequence[LineFacts], most: int | None) -> list[_Run]:
    """Every line by itself, or, of more than `most` lines, blocks."""
    one_by_one = [range(i, i + 1) for i in range(len(lines))]
    if most is None or len(lines) <= most:
        return [_Run(one) for one in one_by_one]
    between = groupby(range(len(lines)), key=lambda i: -1 if not _sent(lines[i]) else i)
    parts = [(members[0], members[-1] + 1) for members in ([*group] for _, group in between)]
    size = math.ceil(len(parts) / most)
    blocks = [parts[i : i + size] for i in range(0, len(parts), size)]
    return [_Run(range(block[0][0], block[-1][1])) for block in blocks]


def _sent(line: LineFacts) -> str:
    """The kind of the message that a line is, or that its op sends; empty where it sends none."""
    if line.axis is None and not line.sent:
        return ""
    kind = line.sent[0].kind if line.axis is None else line.op.removeprefix("comm.").removeprefix("start_")
    if kind in STEP_KINDS and not STEP_KINDS[kind].sends:
        return ""
    return kind if kind in MESSAGES else "message"


def _cluster(name: str, function: FunctionFacts, runs: Sequence[_Run], most: int | None) -> Cluster:
    """The function drawn as these runs of its lines."""
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], Edge] = {}
    origin: dict[str, tuple[str, str]] = {}
    few = most is None or len(function.arguments) <= most
    for argument, spec in function.arguments.items():
        own = f"{name}/{argument}" if few else f"{name}/arguments"
        origin[argument] = own, spec
        nodes[own] = Node(
            own, argument if few else f"{len(function.arguments)} arguments", "argument", f"{argument}: {spec}"
        )
    drawn_up_to = 0
    for run in runs:
        # a line that is no node: what it makes comes from where its operand does
        for line in function.lines[drawn_up_to : run.lines.start]:
            known = next((origin[read] for read in line.reads if read in origin), None)
            origin |= dict.fromkeys(line.out, known) if known else {}
        drawn_up_to = run.lines.stop
        lines = [function.lines[i] for i in run.lines]
        own = f"{name}/{run.lines.start}"
        inside = {out for line in lines for out in line.out}
        drawn = _node(own, lines, run.label)
        for read in dict.fromkeys(read for line in lines for read in line.reads):
            if read in inside:
                continue
            if read not in origin and run.label:
                continue  # a parameter that was fetched
            if read not in origin:
                saved = f"{name}/{read}" if few else f"{name}/saved"
                origin[read] = saved, "saved by forward"
                nodes[saved] = Node(saved, read if few else "saved by forward", "saved", "saved by forward")
            source, spec = origin[read]
            edges.setdefault((source, own), Edge(source, own, spec))
        nodes[own] = drawn
        for line in lines:
            for k, out in enumerate(line.out):
                origin[out] = own, line.specs[k] if k < len(line.specs) else ""
    ends = {end for pair in edges for end in pair}
    kept = (node for node in nodes.values() if node.name in ends or node.kind not in ("argument", "saved"))
    return Cluster(name, tuple(kept), tuple(edges.values()))


def _node(name: str, lines: Sequence[LineFacts], label: str) -> Node:
    """The node of consecutive lines."""
    kinds = [kind for line in lines if (kind := _sent(line))]
    hint = "\n".join(_line_text(line) for line in lines[:HINT_LINES]) + ("\n…" if len(lines) > HINT_LINES else "")
    if label:
        calls = any(line.op.startswith("call.") for line in lines)
        return Node(name, label, kinds[0] if kinds else "call" if calls else "op", hint)
    if len(lines) == 1:
        (line,) = lines
        return Node(name, _op_text(line), kinds[0] if kinds else "op", hint)
    messages = "" if not kinds else f", {len(kinds)} messages" if len(kinds) > 1 else f", {kinds[0]}"
    most = ", ".join(f"{op} ×{n}" if n > 1 else op for op, n in _ops(lines).items())
    return Node(name, f"{len(lines)} ops{messages}\n{most}", kinds[0] if kinds else "block", hint)


def _op_text(line: LineFacts) -> str:
    """`comm.all_reduce over tp`."""
    over = f" over {line.axis}" if line.axis else f" sends over {line.sent[0].axis}" if line.sent else ""
    return short_op(line.op) + over


def _ops(lines: Sequence[LineFacts], most: int = 3) -> Mapping[str, int]:
    """The commonest ops of lines that compute."""
    counts = Counter(short_op(line.op) for line in lines if not _sent(line))
    return dict(counts.most_common(most))


def _line_text(line: LineFacts) -> str:
    """`y = linear(x, w)  f32[8@dp, 16]`."""
    made = f"{', '.join(line.out)} = " if line.out else ""
    specs = ", ".join(spec for spec in line.specs if spec)
    sent = "".join(f"; sends {one.times} × {one.kind} of {size_text(one.nbytes)} over {one.axis}" for one in line.sent)
    return f"{made}{short_op(line.op)}({', '.join(line.reads)}){'  ' if specs else ''}{specs}{sent}"
