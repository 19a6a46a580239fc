"""The fewest bytes that one microbatch holds for backward, whatever the plan: a lower bound for all ranks of a mesh together.

Every call chooses by itself what it keeps, so a template's least is a minimum cut (`passes.recompute.choose`) in which making
values again costs nothing. Nothing is counted twice, and nothing that is there anyway: batch inputs, buffers and parameters cost
nothing, a view costs no more than what it shows, and a value that calls share is counted for the first call that reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.ir.program import Program, Template, ValueRef, operand_values, resolve
from autopar.ir.types import TensorType
from autopar.passes.recompute.choose import at_price
from autopar.passes.recompute.problem import Item, RecomputeProblem
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.recomputation import made_forward
from autopar.passes.rules.structure import Root, root_of, shown_values, view_of

_ROUNDING = 1e-6
"""Relative error of a minimum cut, whose bytes are integers."""


def least_held_bytes(program: Program, policy: str) -> float:
    """Global bytes that one microbatch holds at least between forward and backward. policy: a recompute policy, or "auto"."""
    claimed: set[Root] = set()
    kinds: Counter[tuple[str, frozenset[tuple[str, float]], frozenset[str]]] = Counter()
    for i, call in enumerate(program.calls):
        if i in program.backward_calls:
            roots = [root_of(program, ref) for ref in call.inputs]
            own = {
                (v, nbytes)
                for v, (root, nbytes) in zip(program.template_of(call).inputs, roots, strict=True)
                if root is not None and root not in claimed
            }
            claimed.update(root for root, _ in roots if root is not None)
            kinds[call.template, frozenset(own), frozenset(_read_by_others(program, i))] += 1
    least = sum(
        times * _least(program.templates[name], policy, dict(own), elsewhere)
        for (name, own, elsewhere), times in kinds.items()
    )
    return least * (1 - _ROUNDING)


def _read_by_others(program: Program, number: int) -> Iterator[str]:
    """Values of a call whose storage other calls that have a backward are counted for."""
    template = program.template_of(program.calls[number])
    for output, value in enumerate(template.outputs):
        readers = program.readers.get(ValueRef("call", number, output), ())
        if any(reader in program.backward_calls for reader, _ in readers):
            *_, root = shown_values(template, value)
            yield root


def _least(template: Template, policy: str, own: Mapping[str, float], elsewhere: frozenset[str]) -> float:
    """The least that one call keeps. own: bytes of the inputs that are counted for it; elsewhere: values that are counted for
    other calls."""
    remade = made_forward(template) if policy == "auto" else frozenset(policy_set(template, policy))
    index: dict[str, int] = {}
    items: list[Item] = []
    weights: dict[str, float] = {}
    for name, node in template.nodes.items():
        producer = resolve(node)[0]
        is_input, is_made = name in template.inputs, name in made_forward(template)
        if not isinstance(node.meta.get("type"), TensorType) or not (is_input or is_made or name in template.params):
            continue
        source = view_of(template, producer)
        free = name in template.params or name in elsewhere
        nbytes = own.get(name, 0.0) if is_input else template.type_of(name).nbytes
        weights[name] = 0.0 if free else min(nbytes, weights.get(source or "", math.inf))
        operands = tuple(index[v] for v in operand_values(producer)) if is_made else ()
        index[name] = len(items)
        keeps = policy == "auto" or source is not None or name not in remade
        again = is_made and (name in remade or source is not None)
        items.append(Item(name, name, weights[name] if keeps else math.inf, 0.0 if again else math.inf, operands))
    needed = frozenset(index[v] for v in flow(template).late if v in index)
    return at_price(RecomputeProblem(tuple(items), needed), 0, 1).bytes_kept if needed else 0.0
