"""Proves that an action table runs to its end and computes the step, whoever wrote it.

Checked in this order, each with the group and the action at fault:

  1. every action belongs to a stage of its group and to a microbatch of the step;
  2. every microbatch has F, B (and W, where the schedule splits backward) exactly once on every stage, F only in
     inference, and a stage runs them in this order;
  3. on every channel (sender stage, receiver stage, values or gradients) messages are received in the order they are
     sent. Messages carry their microbatch, but transports without tags, such as NCCL, match them by order alone;
  4. no wait is cyclic when sends are buffered: a group waits for what an action reads and for nothing else. With
     `rendezvous`, not even when a send waits for its receiver: after each action and before the next a group posts one
     batch, the sends of the finished action and the receives of the next one, and waits until all of it is done;
  5. no group ever holds more bytes than its bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.errors import CheckError
from autopar.ir.actions import Action, StageGraph, Table
from autopar.passes.schedule.held import held_after

Message = tuple[int, int, str, int]
"""(sending stage, receiving stage, F for values or B for gradients, microbatch)."""


def check_table(
    table: Table,
    graph: StageGraph,
    microbatches: int,
    *,
    training: bool = True,
    split: bool | None = None,
    rendezvous: bool = False,
    held_bytes: Sequence[float] | None = None,
    later_bytes: Sequence[float] | None = None,
    bound_bytes: float | Sequence[float] | None = None,
) -> None:
    """Raises CheckError unless the table is a complete step that cannot deadlock.

    split: whether B and W are apart (None: where any W is there). held_bytes[s]: what stage s keeps of a microbatch
    after F; later_bytes[s]: what it keeps of it between B and W; bound_bytes: of a group, or of each.
    """
    if len(table) != len(graph.groups):
        raise CheckError(f"the action table has {len(table)} rows for {len(graph.groups)} groups")
    if split is None:
        split = any(a.kind == "W" for row in table for a in row)
    kinds = ("FBW" if split else "FB") if training else "F"
    for g, row in enumerate(table):
        _complete(g, row, graph, microbatches, kinds)
    _channels(table, graph)
    stuck = deadlock(table, graph)
    if stuck:
        raise CheckError(f"the action table deadlocks: {stuck}")
    if rendezvous:
        stuck = rendezvous_deadlock(table, graph)
        if stuck:
            raise CheckError(f"the action table deadlocks when sends wait for their receivers: {stuck}")
    if bound_bytes is not None:
        held = held_bytes if held_bytes is not None else [1.0] * graph.stages
        _memory(table, graph, held, later_bytes, bound_bytes)


def _complete(g: int, row: Sequence[Action], graph: StageGraph, microbatches: int, kinds: str) -> None:
    mine = set(graph.groups[g])
    seen: dict[tuple[int, int], str] = {}
    for n, action in enumerate(row):
        where = f"group {g}, action {n} ({action})"
        if action.stage not in mine:
            owner = graph.group_of.get(action.stage)
            raise CheckError(
                f"{where}: stage {action.stage} "
                + (f"runs on group {owner}" if owner is not None else f"is none of the {graph.stages} stages")
            )
        if action.kind not in kinds:
            raise CheckError(f"{where}: a step of kinds {', '.join(kinds)} has no {action.kind}")
        if not 0 <= action.microbatch < microbatches:
            raise CheckError(f"{where}: there are {microbatches} microbatches, the first is 0")
        before = seen.get((action.stage, action.microbatch), "")
        if action.kind in before:
            raise CheckError(f"{where}: {action} was done already")
        if before + action.kind != kinds[: len(before) + 1]:
            missing = kinds[len(before)]
            raise CheckError(f"{where}: comes before {missing}{action.microbatch}.{action.stage}")
        seen[action.stage, action.microbatch] = before + action.kind
    for stage in graph.groups[g]:
        for mb in range(microbatches):
            done = seen.get((stage, mb), "")
            if done != kinds:
                raise CheckError(f"group {g}: {kinds[len(done)]}{mb}.{stage} is missing")


def _reads(action: Action, graph: StageGraph) -> Iterator[Message]:
    """What must have arrived from other stages before an action starts."""
    s, mb = action.stage, action.microbatch
    if action.kind == "F":
        yield from ((u, s, "F", mb) for u in graph.feeds[s])
    elif action.kind == "B":
        yield from ((v, s, "B", mb) for v in graph.returns[s])


def _sends(action: Action, graph: StageGraph) -> Iterator[Message]:
    """What an action hands to other stages."""
    s, mb = action.stage, action.microbatch
    if action.kind == "F":
        yield from ((s, v, "F", mb) for v in graph.readers[s])
    elif action.kind == "B":
        yield from ((s, u, "B", mb) for u in graph.credits[s])


def _between_groups(message: Message, graph: StageGraph) -> bool:
    return graph.group_of[message[0]] != graph.group_of[message[1]]


def _channels(table: Table, graph: StageGraph) -> None:
    """Every channel's messages are received in the order they are sent."""
    sent: dict[tuple[int, int, str], list[int]] = {}
    for row in table:
        for action in row:
            for u, v, kind, mb in _sends(action, graph):
                sent.setdefault((u, v, kind), []).append(mb)
    position = dict.fromkeys(sent, 0)
    for g, row in enumerate(table):
        for n, action in enumerate(row):
            for message in _reads(action, graph):
                u, v, kind, mb = message
                order = sent.get((u, v, kind), [])
                at = position.get((u, v, kind), 0)
                if at >= len(order):
                    raise CheckError(f"group {g}, action {n} ({action}): stage {u} never sends what it reads")
                if order[at] != mb and _between_groups(message, graph):
                    raise CheckError(
                        f"group {g}, action {n} ({action}): receives {kind}{mb} of stage {u}, which sends "
                        f"{kind}{order[at]} before it; both ends of a channel need the same order"
                    )
                position[u, v, kind] = at + 1


def deadlock(table: Table, graph: StageGraph) -> str:
    """Who waits for what, for ever, when sends are buffered; "" when the table runs to its end."""
    return _run(table, graph, rendezvous=False)


def rendezvous_deadlock(table: Table, graph: StageGraph) -> str:
    """Who waits for what, for ever, when a send waits for its receiver; "" when the table runs to its end."""
    return _run(table, graph, rendezvous=True)


def _run(table: Table, graph: StageGraph, rendezvous: bool) -> str:
    """Runs every row as far as it goes. A group is at step n when it waits to start action n (or, at the end, to send).

    posted: the ends of messages that are there; a wait is over when both ends are. Buffered sends wait for nothing.
    """
    p = len(table)
    step = [0] * p
    done: set[tuple[str, int, int]] = set()
    posted: set[tuple[str, Message]] = set()
    waiting: dict[tuple[str, Message] | tuple[str, int, int], list[int]] = {}

    def blocked(g: int) -> tuple[str, Message] | tuple[str, int, int] | None:
        n, row = step[g], table[g]
        batch = []
        if n < len(row):
            action = row[n]
            for message in _reads(action, graph):
                if _between_groups(message, graph):
                    batch.append((("receive", message), ("send", message)))
                elif (message[2], message[0], message[3]) not in done:
                    return message[2], message[0], message[3]
            before = {"B": "F", "W": "B"}.get(action.kind)
            if before and (before, action.stage, action.microbatch) not in done:
                return before, action.stage, action.microbatch
        if n:
            for message in _sends(row[n - 1], graph):
                if _between_groups(message, graph):
                    batch.append((("send", message), ("receive", message)))
        for mine, _ in batch:
            post(mine)
        for mine, other in batch:
            if other not in posted and (rendezvous or mine[0] == "receive"):
                return other
        return None

    def post(end: tuple[str, Message]) -> None:
        if end not in posted:
            posted.add(end)
            ready.extend(waiting.pop(end, ()))

    ready = list(range(p))
    while ready:
        g = ready.pop()
        while step[g] <= len(table[g]):
            need = blocked(g)
            if need is not None:
                waiting.setdefault(need, []).append(g)
                break
            if step[g] < len(table[g]):
                action = table[g][step[g]]
                done.add((action.kind, action.stage, action.microbatch))
            step[g] += 1
    stuck = [g for g in range(p) if step[g] <= len(table[g])]
    return "; ".join(_waits(g, step[g], table[g], blocked(g)) for g in stuck[:4])


def _waits(g: int, n: int, row: Sequence[Action], need: tuple[str, Message] | tuple[str, int, int] | None) -> str:
    where = f"group {g} waits before {row[n]} (action {n})" if n < len(row) else f"group {g} waits at its end"
    if need is None:
        return where
    if len(need) == 3:
        return f"{where} for its own {need[0]}{need[2]}.{need[1]}"
    u, v, kind, mb = need[1]
    return f"{where} for stage {u if need[0] == 'send' else v} to {need[0]} {kind}{mb} of stage {u}"


def _memory(
    table: Table,
    graph: StageGraph,
    held: Sequence[float],
    later: Sequence[float] | None,
    bound: float | Sequence[float],
) -> None:
    bounds = [float(bound)] * len(table) if isinstance(bound, (int, float)) else list(bound)
    for g, row in enumerate(table):
        for n, now in enumerate(held_after(row, held, later)):
            if now > bounds[g] * (1 + 1e-9):
                raise CheckError(
                    f"group {g}, action {n} ({row[n]}): holds {now:,.0f} bytes after it, {now - bounds[g]:,.0f} over "
                    f"the bound of {bounds[g]:,.0f}"
                )


__all__ = ["check_table", "deadlock", "rendezvous_deadlock"]
