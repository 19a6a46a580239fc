"""The gradients of a stage's microbatches in its gradient store, which the runtime's own code plays (played/gradients.py)."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.passes.memory.walk import HandedGradient
from autopar.passes.played.gradients import PlayedStore
from autopar.passes.played.tensors import PlayedTensor, Storage


class StepGradients:
    """The gradients of a step, from the first that is handed over until the optimizer has used them."""

    def __init__(
        self, parameters: Mapping[str, StoredParameter], mesh: Mesh, microbatches: int, compensated: bool = False
    ) -> None:
        self.store = PlayedStore(parameters, mesh, microbatches, compensated)
        self.ledger = self.store.ledger
        self._storages: WeakValueDictionary[tuple[int, int], Storage] = WeakValueDictionary()
        self._reduced: dict[str, PlayedTensor] = {}

    @property
    def held_bytes(self) -> int:
        """What the store has on the device."""
        return self.ledger.alive

    @property
    def unsent_bytes(self) -> int:
        """What rests from step to step of what compressing gradients has lost."""
        return self.store.unsent_bytes

    @property
    def parked(self) -> dict[str, int]:
        """What the store has in memory tiers, by tier."""
        return self.ledger.parked

    def hand_over(self, gradient: HandedGradient, microbatch: int) -> int:
        """A microbatch's gradient goes to the store; the most that is alive meanwhile beside what the microbatch holds."""
        storage = self._storage(gradient, microbatch)
        held_bytes = storage.nbytes if gradient.held else 0
        value = PlayedTensor(storage, gradient.layout)
        self.ledger.top = self.ledger.alive
        self.store.add(gradient.name, value, gradient.owned)
        return self.ledger.top - held_bytes

    def skip(self, microbatches: int) -> None:
        """So many microbatches more, none of them the last, which add to sums that are there: what is held stays the same."""
        self.store.microbatches -= microbatches

    def flush(self) -> int:
        """Nothing more will be added; the most that is alive while what is open is sent."""
        self.ledger.top = self.ledger.alive
        self.store.flush()
        return self.ledger.top

    def reduce(self) -> int:
        """Wait for all messages; the most that is alive until then."""
        self.ledger.top = self.ledger.alive
        self._reduced = self.store.finish()
        return self.ledger.top

    def give_away(self, name: str) -> None:
        """A reduced gradient goes to the stage that owns its parameter."""
        self._reduced.pop(name, None)

    def copy_borrowed(self) -> int:
        """Gradients that others may hold are copied, one at a time, before they are changed; the most that is alive."""
        self.ledger.top = self.ledger.alive
        for name in self.store.borrowed & self._reduced.keys():
            self._reduced[name] = self._reduced[name].clone()
        return self.ledger.top

    def _storage(self, gradient: HandedGradient, microbatch: int) -> Storage:
        """Where a gradient lies, maybe with others of the microbatch."""
        if gradient.storage is None:
            return Storage(self.ledger, gradient.layout.nbytes)
        block, nbytes = gradient.storage
        storage = self._storages.get((microbatch, block))
        if storage is None:
            storage = self._storages[microbatch, block] = Storage(self.ledger, nbytes)
        return storage
