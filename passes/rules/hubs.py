"""Where the values of a template are held: the decision points between a producer and its consumers.

A value may be wanted differently by its consumers. Converting it once for several consumers must be priced once, and
what backward reads must be held from forward till then; so a value gets up to three decision points ("hubs"):

    producer -> v@save -> v@use  -> forward consumers
                       -> v@late -> backward consumers

`@save` exists when both phases read the value, `@use` and `@late` when that phase has two readers or more. Parameters
have `@use` and `@late` for each phase that reads them (their gathers), and a value born in backward has `@use` only.
Planner and lowering both take the structure from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.ir.program import Template, resolve
from autopar.passes.rules.once import once


@dataclass(frozen=True)
class Hub:
    """A decision point `value@kind` fed from `source` (a hub name, or '' for the producer)."""

    name: str
    value: str
    kind: str
    source: str


@dataclass(frozen=True)
class Flow:
    """hubs by name, and for every (consumer node, operand index) the hub it reads from ('' : the producer)."""

    hubs: dict[str, Hub]
    reads: dict[tuple[str, int], str]
    late: frozenset[str]


def phase_is_late(node: fx.Node) -> bool:
    return node.meta["phase"] != "F"


@once
def flow(template: Template) -> Flow:
    """The decision points of a template. `late`: values that backward reads although forward makes them."""
    hubs: dict[str, Hub] = {}
    reads: dict[tuple[str, int], str] = {}
    held: set[str] = set()
    params = set(template.params)
    tangents = {t for t in template.tangents if t is not None}
    for value, consumers in template.consumers.items():
        early = [(n, i) for n, i in consumers if not phase_is_late(n)]
        late = [(n, i) for n, i in consumers if phase_is_late(n)]
        producer = resolve(template.nodes[value])[0]
        born_late = value in tangents or (producer.op == "call_function" and phase_is_late(producer))
        if born_late:
            root = _add(hubs, value, "use", "") if len(late) > 1 else ""
            reads.update({(n.name, i): root for n, i in late})
            continue
        if late:
            held.add(value)
        if value in params:
            first = _add(hubs, value, "use", "") if early else ""
            second = _add(hubs, value, "late", "") if late else ""
        else:
            root = _add(hubs, value, "save", "") if early and late else ""
            first = _add(hubs, value, "use", root) if len(early) > 1 else root
            second = _add(hubs, value, "late", root) if len(late) > 1 else root
        reads.update({(n.name, i): first for n, i in early})
        reads.update({(n.name, i): second for n, i in late})
    return Flow(hubs, reads, frozenset(held))


def _add(hubs: dict[str, Hub], value: str, kind: str, source: str) -> str:
    name = f"{value}@{kind}"
    hubs[name] = Hub(name, value, kind, source)
    return name
