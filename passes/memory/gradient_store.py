"""Bytes that a stage's gradient store holds over a step: the runtime's own code, played over tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.resting import busiest_rank, held_share
from autopar.ir.setting import Setting
from autopar.passes.memory.walk import ActionBytes
from autopar.passes.played.gradients import PlayedStore, numbered
from autopar.passes.played.tensors import Layout, PlayedTensor, Storage
from autopar.passes.rules.memo import Memo

REPLAYED = 3
"""Microbatches that are replayed: from the second to the last but one they are alike."""
MOST_REPLAYED = 8
"""The same where gradients are reduced after every microbatch: at first ever more messages are under way."""

_NOWHERE: Mapping[str, int] = {}


@dataclass(frozen=True)
class Given:
    """A gradient that an action gives to the store: the number of its parameter; storage: of the one that it lies in with others
    its number and bytes (None: it lies alone); held: whether somebody else, who counts it, holds that too."""

    parameter: int
    layout: Layout
    owned: bool
    storage: tuple[int, int] | None
    held: bool


class StoreBytes(NamedTuple):
    """top: the most that the store has held since it was looked at last, without what is counted elsewhere; held, and parked by
    memory tier: what it has now."""

    top: int
    held: int
    parked: Mapping[str, int]


Taken = tuple[tuple[StoreBytes, ...], ...]
"""Bytes of the store after every gradient of a microbatch, by action."""


@dataclass(frozen=True)
class StepBytes:
    """taken: by microbatches that are replayed, those but the first and the last stand for all between these. flushed: when
    what is open was sent; reduced: when all is; copied: when gradients may be changed. unsent: bytes that rest from step to step
    of what compression has lost."""

    taken: tuple[Taken, ...]
    flushed: StoreBytes
    reduced: StoreBytes
    copied: StoreBytes
    unsent: int


def step_bytes(stage: LoweredStage, actions: Iterable[ActionBytes], setting: Setting, memo: Memo) -> StepBytes:
    """Bytes that a stage's gradient store holds over a step. actions: of a microbatch, in order."""
    trained = numbered(stage)
    number = {name: i for i, name in enumerate(n for n, p in stage.parameters.items() if p.contributions)}
    storages: dict[int, int] = {}
    given = []
    for action in actions:
        row = []
        for g in action.gradients:
            place = None
            if g.storage is not None and (g.held or not g.owned):
                block, nbytes = g.storage
                place = storages.setdefault(block, len(storages)), nbytes
            row.append(Given(number[g.name], g.layout, g.owned, place, g.held))
        given.append(tuple(row))
    most = MOST_REPLAYED if any(p.by_microbatch for p in trained) else REPLAYED
    count = min(stage.microbatches, most + 1)
    changed = setting.changes_gradients
    played = (
        memo[_played](trained, stage.mesh, rank, count, tuple(given), setting.compensated, changed, memo)
        for rank in _played_ranks(trained, stage.mesh)
    )
    return reduce(_most, played)


def _played_ranks(trained: Sequence[StoredParameter], mesh: Mesh) -> list[int]:
    """The ranks whose stores may hold most: the one that owns most, and those whose sums come first and last. Where none own
    anything all are alike."""
    owned = [p.optimizer for p in trained if p.optimizer.owner is not None]
    ends = [rank for spec in (*owned[:1], *owned[-1:]) for rank in range(mesh.size) if held_share(spec, mesh, rank)]
    return list(dict.fromkeys([busiest_rank(trained, mesh), *ends[:1], *ends[-1:]]))


def _most(a: StepBytes, b: StepBytes) -> StepBytes:
    """The most of two ranks at every moment; of a moment that one of them is not asked for, the other's."""
    longer, shorter = (a, b) if len(a.taken) >= len(b.taken) else (b, a)
    both = [*shorter.taken, *longer.taken[len(shorter.taken) :]]
    taken = tuple(
        tuple(tuple(map(_more, *rows)) for rows in zip(*actions, strict=True))
        for actions in zip(longer.taken, both, strict=True)
    )
    flushed, reduced, copied = map(_more, (a.flushed, a.reduced, a.copied), (b.flushed, b.reduced, b.copied))
    return StepBytes(taken, flushed, reduced, copied, max(a.unsent, b.unsent))


def _more(a: StoreBytes, b: StoreBytes) -> StoreBytes:
    tiers = {*a.parked, *b.parked}
    return StoreBytes(
        max(a.top, b.top), max(a.held, b.held), {t: max(a.parked.get(t, 0), b.parked.get(t, 0)) for t in tiers}
    )


def _played(
    parameters: tuple[StoredParameter, ...],
    mesh: Mesh,
    rank: int,
    microbatches: int,
    given: tuple[tuple[Given, ...], ...],
    compensated: bool,
    changed: bool,
    memo: Memo,
) -> StepBytes:
    """The same of stages that are alike."""
    store = PlayedStore(parameters, mesh, microbatches, memo, compensated, rank)
    ledger, replayed = store.ledger, min(microbatches, REPLAYED)

    def seen(elsewhere: int = 0) -> StoreBytes:
        top, ledger.top = ledger.top, ledger.alive
        return StoreBytes(top - elsewhere, ledger.alive, dict(ledger.parked) if ledger.parked else _NOWHERE)

    def microbatch() -> Taken:
        storages: WeakValueDictionary[int, Storage] = WeakValueDictionary()
        return tuple(tuple(take(gradient, storages) for gradient in gradients) for gradients in given)

    def take(gradient: Given, storages: WeakValueDictionary[int, Storage]) -> StoreBytes:
        if gradient.storage is None:
            storage = Storage(ledger, gradient.layout.nbytes)
        else:
            number, nbytes = gradient.storage
            storage = storages.get(number) or storages.setdefault(number, Storage(ledger, nbytes))
        elsewhere = storage.nbytes if gradient.held else 0
        value: Any = PlayedTensor(storage, gradient.layout)
        store.add(parameters[gradient.parameter].name, value, gradient.owned)
        del storage, value
        return seen(elsewhere)

    taken = [microbatch() for _ in range(replayed - 1)]
    while 1 < len(taken) < microbatches - 1 and _grows(*taken[-2:]):
        taken.append(microbatch())
    store.microbatches = len(taken) + 1
    taken.append(microbatch())
    store.flush()
    flushed, gradients = seen(), store.finish()
    for p in parameters:
        if not p.owned:
            gradients.pop(p.name, None)  # it goes to the stage that owns the parameter
    reduced = seen()
    for name, gradient in gradients.items() if changed else ():
        if name in store.borrowed:
            gradients[name] = gradient.clone()
    return StepBytes(tuple(taken), flushed, reduced, seen(), store.unsent_bytes)


def _grows(first: Taken, second: Taken) -> bool:
    """Whether any action of the second microbatch leaves more in the store, or less."""
    ends = [rows[-1].held for taken in (first, second) for rows in taken if rows]
    return len(set(ends[len(ends) // 2 - 1 :])) > 1
