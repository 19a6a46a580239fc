"""Notes that failing ranks leave for each other in the job's store, so that each error says what the others did."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

REPORT_WAIT_S = 3.0


class Notes:
    """One rank's notes; store: None where there is none. `last` is the rank's last collective."""

    def __init__(self, store: dist.Store | None, rank: int, timeout_s: float) -> None:
        self.last: tuple[Any, ...] = ()
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s

    def leave(self, what: str) -> None:
        """Tell the other ranks what this one was doing when it failed. Only the first note of a rank counts."""
        if self._store is not None:
            try:
                self._store.compare_set(f"autopar/note/{self._rank}", "", what + self._last_call())
            except RuntimeError:
                self._store = None

    def of_others(self, ranks: Iterable[int]) -> list[str]:
        """The notes that the other ranks left; waits a little for them."""
        if self._store is None:
            return []
        notes, waiting = [], [rank for rank in ranks if rank != self._rank]
        end = time.monotonic() + min(REPORT_WAIT_S, self._timeout_s)
        while waiting and time.monotonic() < end:
            try:
                ready = [rank for rank in waiting if self._store.check([f"autopar/note/{rank}"])]
                for rank in ready:
                    notes.append(f"rank {rank} {self._store.get(f'autopar/note/{rank}').decode()}")
                    waiting.remove(rank)
            except RuntimeError:
                break
            if waiting:
                time.sleep(0.05)
        return notes + [f"rank {rank} said nothing" for rank in waiting]

    def _last_call(self) -> str:
        if not self.last:
            return ""
        number, group, kind, site = self.last
        return f" (last collective: #{number} over {group}, {kind}" + (f" at {site})" if site else ")")
