"""The memory of the fullest rank at its worst moment, by cause and by block of the model; it all adds up to the peak.

What rests belongs to parameters, what waits for backward to the calls that keep it, so many times as microbatches wait. Gradients
of a stage, with the buckets under way, are shared out among its parameters by their size before reduction. What the action that
runs needs for a moment is the running call's, and what is left of a cause is in no block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.text import size_text
from autopar.plan import Plan
from autopar.report.page.shown import Table
from autopar.report.page.tree import Blocks, Node
from autopar.report.program_facts import ProgramFacts, StageAtWorst, WorstFacts

MOST_MODULES = 64
WAITING, GRADIENTS, MOMENT = "held for backward", "gradients", "for a moment"
WHAT = {"F": "forward", "B": "backward", "W": "gradients of weights"}


@dataclass(frozen=True)
class WorstRow:
    """Blocks that are alike, or what is in none. each: bytes of one of them by cause."""

    name: str
    times: int = 1
    each: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        """Bytes of all of them."""
        return self.times * sum(self.each.values())


def worst_bytes(program: ProgramFacts, plan: Plan) -> Iterator[tuple[str, str, float]]:
    """The qualified name of a module or parameter, a cause, and bytes: all that belongs to a block."""
    worst = program.worst
    if worst is None:
        return
    rows = [row for stage in worst.stages for row in _of_stage(program, plan, stage)]
    share = _shares(rows, program.memory)
    yield from ((name, cause, nbytes * share[cause]) for name, cause, nbytes in rows)


def _shares(rows: list[tuple[str, str, float]], memory: Mapping[str, float]) -> dict[str, float]:
    """By cause how much of what blocks would have they do have, where an action has let go of some of it."""
    total: dict[str, float] = {}
    for _, cause, nbytes in rows:
        total[cause] = total.get(cause, 0.0) + nbytes
    return {cause: min(1.0, memory.get(cause, 0.0) / nbytes) if nbytes else 1.0 for cause, nbytes in total.items()}


def _of_stage(program: ProgramFacts, plan: Plan, at: StageAtWorst) -> Iterator[tuple[str, str, float]]:
    """The same of a stage."""
    first, last = plan.stages[at.stage].calls
    for call in program.calls[first:last]:
        nbytes = at.waiting * call.held_bytes + at.later * call.later_bytes
        if nbytes:
            yield call.path or call.template, WAITING, nbytes
    parameters = program.stages[at.stage].parameters
    all_of_them = sum(one.summed_bytes for one in parameters.values())
    share = at.gradients / all_of_them if all_of_them else 0.0
    for name, one in parameters.items():
        yield from ((name, kind, nbytes) for kind, nbytes in one.resting.items() if kind != GRADIENTS and nbytes)
        if one.summed_bytes and share:
            yield name, GRADIENTS, share * one.summed_bytes


def moment_text(program: ProgramFacts, worst: WorstFacts) -> str:
    """`layers.3, backward of microbatch 2`: what runs at the worst moment."""
    if not worst.action:
        return "the optimizer's step" if program.training else "when all is over"
    actions = (action for row in program.schedule.table for action in row if str(action) == worst.action)
    action = next(actions, None)
    path = "" if worst.call is None else program.calls[worst.call].path or program.calls[worst.call].template
    if action is None:
        return path or worst.action
    what = f"{WHAT[action.kind]} of microbatch {action.microbatch}"
    return f"{path}, {what}" if path else what


def worst_rows(program: ProgramFacts, tree: Blocks) -> tuple[WorstRow, ...]:
    """Everything at the worst moment: blocks by the tree, then what is in none. The bytes add up to the peak."""
    if program.worst is None:
        return ()
    rows = [row for node in tree.roots for row in _rows_of(node, node.name)]
    if len(rows) > MOST_MODULES:
        rows = [*rows[:MOST_MODULES], _together(f"{len(rows) - MOST_MODULES:,} more", rows[MOST_MODULES:])]
    left = dict(program.memory)
    for cause, nbytes in _together("", rows).each.items():
        left[cause] = left.get(cause, 0.0) - nbytes
    rows.append(WorstRow(f"running: {moment_text(program, program.worst)}", 1, {MOMENT: left.pop(MOMENT, 0.0)}))
    return (*rows, WorstRow("in no block", 1, left))


def _rows_of(node: Node, name: str) -> Iterator[WorstRow]:
    """Blocks that do something or are repeated, and what those around them have beside these. name: the node's qualified one."""
    if node.code is not None or node.times > 1 or not any(c.children or c.code is not None for c in node.children):
        if node.at_worst:
            yield WorstRow(name, node.times, dict(node.at_worst))
        return
    rows = [row for child in node.children for row in _rows_of(child, f"{name}.{child.name}")]
    yield from rows
    inside = _together("", rows).each
    own = {cause: nbytes - inside.get(cause, 0.0) for cause, nbytes in node.at_worst}
    if own := {cause: nbytes for cause, nbytes in own.items() if nbytes > 0.5}:
        yield WorstRow(name, 1, own)


def _together(name: str, rows: list[WorstRow]) -> WorstRow:
    total: dict[str, float] = {}
    for row in rows:
        for cause, nbytes in row.each.items():
            total[cause] = total.get(cause, 0.0) + row.times * nbytes
    return WorstRow(name, 1, total)


def worst_table(program: ProgramFacts, rows: tuple[WorstRow, ...]) -> Table:
    """The same as a table, with what it adds up to as its last row."""
    causes = [cause for cause, nbytes in program.memory.items() if nbytes >= 0.5]

    def cells(row: WorstRow) -> tuple[str, ...]:
        each = (row.each.get(cause, 0.0) for cause in causes)
        return (*(size_text(nbytes) if nbytes >= 0.5 else "–" for nbytes in each), size_text(row.nbytes))

    shown = [(row.name, f"{row.times:,}", *cells(row)) for row in rows if row.nbytes >= 0.5]
    whole = WorstRow("together", 1, dict(program.memory))
    head = ("Block", "Times", *(cause[:1].upper() + cause[1:] for cause in causes), "Together")
    return Table("The worst moment by block, each of those alike", head, (*shown, ("together", "", *cells(whole))))
