"""A rank that stops taking batches says so in the job's store, so that those who wait for it do not wait for ever.

Where its data ended earlier than that of the others, a rank goes on to whatever comes after the loop: it saves, or its script
ends. The others are then in a step, waiting for messages that nobody will send. So whoever compares what it was given before it
reads state writes down how many batches that is, while it waits; a thread of every rank looks for such a line once a second, and
ends its process by name where that rank waits in a later step. A script that ends leaves a note, which the errors of others quote
(notes.py). What was not compared by then (same_data.py) is compared through the store.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ..comm.environment import machine_name
from ..comm.process import TorchComm
from ..health.flight import end_process
from ..step.same_data import WHY_DATA, WHY_ROWS, Readers, SameData, odd_ranks, odd_readers

LOOK_S = 1.0
PATIENCE = 2
"""Looks in a row at the same wait, until it is in vain."""
END_S = 3.0
"""Seconds that a rank waits at its end for the others to come to theirs."""
_WAITS = "waits"


class Leaving:
    """The notice of one rank that its data end, and its look-out for the notices of others. store: for this program
    alone; same_data: what the rank was given."""

    def __init__(self, store: dist.Store, comm: TorchComm, same_data: SameData) -> None:
        self._store, self._comm, self._same_data = store, comm, same_data
        self._over = threading.Event()
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # of the thread alone: the rank's may be waiting
        self._thread = threading.Thread(target=self._look, args=(own,), name="autopar leaving", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for all others to do the same. Where the store is gone nobody can read that: a run whose
        torchrun was killed still saves."""
        said = json.dumps([self._comm.rank, machine_name(), what, self._same_data.taken])
        with suppress(RuntimeError):
            self._store.set(_WAITS, said)
        yield
        with suppress(RuntimeError):
            self._store.delete_key(_WAITS)

    def _look(self, store: dist.Store) -> None:
        """Look for the other ranks' notices, in a thread of its own."""
        before, times = None, 0
        while not self._over.wait(LOOK_S):
            try:
                said = store.get(_WAITS).decode() if store.check([_WAITS]) else ""
            except RuntimeError:  # the store is gone, and with it the job
                return
            entry, taken = self._comm.flight.waiting, self._same_data.taken
            rank, machine, what, batches = json.loads(said) if said else (0, "", "", taken)
            times = times + 1 if entry is not None and entry is before and batches < taken else 0
            before = entry
            if times >= PATIENCE:
                text = (
                    f"rank {rank} ({machine}) is {what} after {batches} batches, while this rank waits for it in step "
                    f"{self._comm.flight.step}, with batch {taken}. Did its data end earlier? Every rank is to be given the same "
                    "global batches, and as many of them"
                )
                self._comm.leave_note(f"ended, as {text}")
                end_process(self._comm.rank)(text)

    def _end(self) -> None:
        """The script of this rank ended, well or by an error."""
        self._over.set()
        self._thread.join(END_S)
        error = getattr(sys, "last_exc", None)
        taken, checksums, compared = self._same_data.uncompared()
        if error is not None:
            self._comm.leave_note(f"failed with {type(error).__name__}: {error}")
            return
        self._comm.leave_note(f"came to the end of its script after {taken} batches")
        if compared < taken and (problem := self._difference(taken, checksums)):
            print(f"error on rank {self._comm.rank}: {problem}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def _difference(self, taken: int, checksums: Mapping[Readers, int]) -> str:
        """A text of what is wrong with the batches that nobody compared; empty where nothing is, or others do not come
        to their end."""
        keys = [f"end/{rank}" for rank in range(self._comm.world_size)]
        try:
            self._store.set(keys[self._comm.rank], json.dumps([taken, [*checksums.values()], machine_name()]))
            end = time.monotonic() + END_S
            while not self._store.check(keys):
                if time.monotonic() > end:
                    return ""
                time.sleep(0.02)
            everyone = [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError:  # who holds the store has seen what all others wrote, and ended
            return ""
        odd, why = odd_ranks([(batches, len(sums)) for batches, sums, _ in everyone]), WHY_DATA
        for place, readers in enumerate(checksums):
            if not odd:
                odd = odd_readers([sums[place] for _, sums, _ in everyone], readers)
                why = WHY_DATA if readers is None else WHY_ROWS
        who = ", ".join(f"{rank} ({everyone[rank][2]}, {everyone[rank][0]} batches)" for rank in odd[:8])
        return f"at the end, after {taken} batches: rank{'s' if len(odd) > 1 else ''} {who} {why}" if odd else ""
