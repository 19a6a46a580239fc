"""State that forward writes and never reads: counters, records of activations, the last output.

    self.calls += 1        recorded.append(out.detach())        stats["last"] = out

Nothing of it is part of a step. That no step reads it is shown by one that cannot: what such places hold after the first step is
replaced by stand-ins (`stand_ins.py`). Where nothing was asked of one, a step does the same whatever these places hold.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence

from autopar.capture.before.stand_ins import Counter, Log, Questions, StandIn
from autopar.capture.before.state import Change, State
from autopar.capture.before.state_slots import Place


def stand_ins(state: State, names: Collection[str]) -> tuple[Questions, dict[str, list[Callable[[], bool]]]] | None:
    """Put stand-ins where the state holds what has these names (of changes). Gives questions, and per name functions that tell
    whether there is a value of the same kind now; None where something of it cannot be replaced."""
    questions, kept = Questions(), dict[str, list[Callable[[], bool]]]()
    logs = [p for p in state.places if type(p.owner) in (list, collections.deque) and p.name in names]
    logged = {id(place.owner) for place in logs}
    if logged & state.fixed:
        return None
    for place in logs:
        log = Log(questions, type(place.owner))
        for slot in state.places:
            for key in [k for k, value in slot.before.items() if value is place.owner]:
                kept.setdefault(place.name, []).append(_put(slot, key, log))
    for place in state.places:
        for key in [k for k in place.before if place.named(k) in names]:
            value = place.before[key]
            if id(value) in logged or place in logs:
                continue
            if place.owner is None or id(place.owner) in state.fixed or isinstance(place.owner, set) or key == "":
                return None
            kind: type[StandIn] = Counter if type(value) in (int, float) else StandIn
            kept.setdefault(place.named(key), []).append(_put(place, key, kind(questions, type(value))))
    return (questions, kept) if kept.keys() == set(names) else None


def _put(place: Place, key: object, value: StandIn) -> Callable[[], bool]:
    place.write({**place.read(), key: value})
    numbers = (int, float, Counter)

    def kept() -> bool:
        now = place.read().get(key)
        if type(value) is Counter:
            return type(now) in numbers
        return now is value or (type(value) is StandIn and type(now) is value.__dict__["_kind"])

    return kept


def unread(changes: Sequence[Change], questions: Questions, kept: dict[str, list[Callable[[], bool]]]) -> bool:
    """Whether a step over stand-ins, which made these changes, asked none of them, changed nothing else, and left values of the
    same kinds."""
    if questions.asked or not {change.name for change in changes} <= kept.keys():
        return False
    return all(one() for several in kept.values() for one in several)
