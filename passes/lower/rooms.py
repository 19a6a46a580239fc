"""Parameters that rest one after another in one memory, because calls read them stacked.

The experts of a mixture that are modules of their own have parameters of their own, and their products want one tensor of all:

    w = ops.stacked([experts_0_w1, experts_1_w1, experts_2_w1])         a view of their room, where they have one

They stay parameters by name, for optimizers, checkpoints and whoever else asks; only where they lie is decided here. One that is
read in two different stacks, or in one with values that are no parameters, has a memory of its own.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.ir.program import Program, operand_values
from autopar.ops.grouped import STACKED


def rooms(program: Program) -> dict[str, str]:
    """By parameter that lies in a room the first one there, in the order of the program's table."""
    stacks: dict[str, set[tuple[str, ...]]] = {}
    for call in program.calls:
        template = program.template_of(call)
        named = dict(zip(template.params, call.params, strict=True))
        for node, op in template.op_calls.items():
            if op.op.startswith(STACKED):
                parts = operand_values(template.nodes[node])
                names = tuple(named.get(part, "") for part in parts)
                for name in names:
                    stacks.setdefault(name, set()).add(names)
    place = {name: i for i, name in enumerate(program.parameters)}
    found = {}
    for names in {names for each in stacks.values() for names in each}:
        alone = all(name and len(stacks[name]) == 1 for name in names)
        if alone and len(names) > 1 and all(place[a] < place[b] for a, b in pairwise(names)):
            found.update(dict.fromkeys(names, names[0]))
    return found
