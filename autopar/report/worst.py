"""The worst moment of the fullest rank as facts: which action runs, and what every stage of its group has then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.compiled import Compiled
from autopar.ir.actions import Action
from autopar.passes.memory.step_peaks import Worst, fullest
from autopar.report.program_facts import StageAtWorst, WorstFacts


def worst_facts(program: Compiled) -> WorstFacts:
    """The worst moment of a program."""
    g, worst, _ = fullest(program.lowered, [stage.memory for stage in program.account.stages])
    row, group = program.lowered.table[g], program.lowered.graph.groups[g]
    action = None if worst.place is None else row[worst.place]
    done = row if worst.place is None else row[: worst.place]
    last = row[-1].kind if row else "F"
    stages = tuple(_stage(s, program, worst, action, done, last) for s in group)
    return WorstFacts(g, "" if action is None else str(action), _call(program, worst, action), stages)


def _call(program: Compiled, worst: Worst, action: Action | None) -> int | None:
    """The number in the program of the call that ran last; stages that share their functions have the first one's numbers."""
    if action is None or worst.call is None:
        return None
    first = min((call.number for call in program.stages[action.stage].forward.calls), default=0)
    return program.plan.stages[action.stage].calls[0] + worst.call - first


def _stage(
    s: int, program: Compiled, worst: Worst, action: Action | None, done: Sequence[Action], last: str
) -> StageAtWorst:
    """A stage of the group. done: the actions before the one that runs; last: the kind that comes last of every microbatch."""
    count = {kind: sum(one.stage == s and one.kind == kind for one in done) for kind in "FBW"}
    waiting = float(count["F"] - count["B"]) if last != "F" else 0.0
    later = float(count["B"] - count["W"]) if last == "W" else 0.0
    if action is not None and action.stage == s and last != "F":
        memory = program.account.stages[s].memory
        before = "B" if action.kind == "W" else "F"
        kept = memory.actions[before].after
        share = worst.own / kept if kept else 0.0
        waiting += {"F": share, "B": share - 1}.get(action.kind, 0.0)
        later += share - 1 if action.kind == "W" else 0.0
    gradients: Mapping[int, float] = worst.gradients_of or {}
    return StageAtWorst(s, waiting, later, max(gradients.get(s, 0.0), 0.0))
