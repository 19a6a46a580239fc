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
from typing import NamedTuple

from autopar.errors import CheckError
from autopar.ir.actions import Action, StageGraph, Table, splits_backward
from autopar.passes.schedule.costs import MemoryRoom
from autopar.passes.schedule.held import held_after
from autopar.runtime.program.actions import Item, replay

Message = tuple[int, int, str, int]
"""(sending stage, receiving stage, F for values or B for gradients, microbatch)."""


class End(NamedTuple):
    """Kind of an item: one end ("send" or "receive") of the messages of a channel."""

    end: str
    sender: int
    receiver: int
    kind: str


def check_table(
    table: Table,
    graph: StageGraph,
    microbatches: int,
    *,
    training: bool = True,
    split: bool | None = None,
    rendezvous: bool = False,
    memory: MemoryRoom | None = None,
) -> None:
    """Raises CheckError unless the table is a complete step that cannot deadlock.

    split: whether B and W are apart (None: where any W is there). memory: what every group may hold, and what stages keep.
    """
    if len(table) != len(graph.groups):
        raise CheckError(f"the action table has {len(table)} rows for {len(graph.groups)} groups")
    if split is None:
        split = splits_backward(table)
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
    if memory is not None:
        _within_memory(table, memory)


def _complete(g: int, row: Sequence[Action], graph: StageGraph, microbatches: int, kinds: str) -> None:
    own_stages = set(graph.groups[g])
    seen: dict[tuple[int, int], str] = {}
    for n, action in enumerate(row):
        where = f"group {g}, action {n} ({action})"
        if action.stage not in own_stages:
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
    """The messages that must have arrived from other stages before an action starts."""
    s, mb = action.stage, action.microbatch
    if action.kind == "F":
        yield from ((u, s, "F", mb) for u in graph.feeds[s])
    elif action.kind == "B":
        yield from ((v, s, "B", mb) for v in graph.returns[s])


def _sends(action: Action, graph: StageGraph) -> Iterator[Message]:
    """The messages that an action hands to other stages."""
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
    stuck = replay(table, graph.reads[0]).stuck
    return _waits(table, graph, [(one.row, one.place, one.missing) for one in stuck])


def rendezvous_deadlock(table: Table, graph: StageGraph) -> str:
    """Who waits for what, for ever, when a send waits for its receiver; "" when the table runs to its end.

    Rows are played with items for messages: once a group has itself made what its next action reads, both kinds of ends of the
    batch are posted, then their other ends are waited for, then the action runs.
    """
    reads = dict(graph.reads[0])
    rows: list[list[Item]] = []
    places: list[list[int]] = []
    for row in table:
        items: list[Item] = []
        place: list[int] = []
        sent: list[tuple[str, Message]] = []
        for n, now in enumerate([*row, None]):
            batch = sent
            if now is not None:
                reads[("begin", now.kind), now.stage] = [r for r in graph.reads[0][now.kind, now.stage] if r[2] < 0]
                items.append((("begin", now.kind), now.microbatch, now.stage))
                batch = [("receive", m) for m in _reads(now, graph) if _between_groups(m, graph)] + sent
                sent = [("send", m) for m in _sends(now, graph) if _between_groups(m, graph)]
            posted = [_end(end, message) for end, message in batch]
            for (end, message), (kind, microbatch, stage) in zip(batch, posted, strict=True):
                other_kind, _, peer = _end("receive" if end == "send" else "send", message)
                reads[kind, stage], reads[("wait", kind), stage] = (), [(other_kind, peer, -1)]
                posted = [*posted, (("wait", kind), microbatch, stage)]
            items += [*posted, *([now] if now is not None else [])]
            place += [n] * (len(items) - len(place))
        rows.append(items)
        places.append(place)
    stuck = replay(rows, reads).stuck
    return _waits(table, graph, [(one.row, places[one.row][one.place], one.missing) for one in stuck])


def _end(end: str, message: Message) -> Item:
    """One end of a message ("send" or "receive") as an item of a row."""
    sender, receiver, kind, microbatch = message
    return End(end, sender, receiver, kind), microbatch, sender if end == "send" else receiver


def _waits(table: Table, graph: StageGraph, stuck: Sequence[tuple[int, int, Item]]) -> str:
    """The first few groups that never end, with action and what is missing."""
    said = []
    for g, n, (kind, microbatch, stage) in stuck[:4]:
        row = table[g]
        where = f"group {g} waits before {row[n]} (action {n})" if n < len(row) else f"group {g} waits at its end"
        if isinstance(kind, End):
            said.append(f"{where} for stage {stage} to {kind.end} {kind.kind}{microbatch} of stage {kind.sender}")
        elif graph.group_of[stage] == g:
            said.append(f"{where} for its own {kind}{microbatch}.{stage}")
        else:
            said.append(f"{where} for stage {stage} to send {kind}{microbatch} of stage {stage}")
    return "; ".join(said)


def _within_memory(table: Table, memory: MemoryRoom) -> None:
    for g, row in enumerate(table):
        bound = memory.bound[g]
        for n, now in enumerate(held_after(row, memory.after_F, memory.later)):
            if now > bound * (1 + 1e-9):
                raise CheckError(
                    f"group {g}, action {n} ({row[n]}): holds {now:,.0f} bytes after it, {now - bound:,.0f} over "
                    f"the bound of {bound:,.0f}"
                )


__all__ = ["check_table", "deadlock", "rendezvous_deadlock"]
