"""Ranks that a plan has no place for: they wait, and take part when torchrun starts the workers anew.

Ranks that a plan leaves idle, as a step is faster without them, are spares too. A spare loads nothing and is in no process group.
It looks at the store of its round: the run says there that it ended, and its first rank beats there (flight.py). Where that stops
beating the spare fails, so that torchrun starts a new round, in which it may have a place.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from ..errors import RuntimeProgramError
from ..health.observed_time import GRACE_S, SeenTime
from ..program.manifest import Manifest

POLL_S = 0.5
START_AGAIN = 75
"""Exit status (that of `EX_TEMPFAIL`) of a rank that would go on in another round."""
HEARD_S = 5.0
"""Seconds that a run waits at its end for spares to hear of it, as its store may end with it."""
DONE, STOPPED, AGAIN, LOST, MOVED = "done", "stopped", "again", "lost", "moved"
"""How a run ends: after its last step, because ranks were asked to go, to start again without some of its machines, because
torchrun or the job's store is gone, or to go on under another plan."""
_ENDED, _HEARD = "ended", "heard"


def tell_spares(store: dist.Store, spares: int, why: str) -> None:
    """The run ends here. why: DONE, STOPPED or AGAIN."""
    store.set(_ENDED, why)
    end = time.monotonic() + HEARD_S
    while store.add(_HEARD, 0) < spares and time.monotonic() < end:
        time.sleep(POLL_S / 5)


def stand_by(store: dist.Store, manifest: Manifest, rank: int, hang_s: float, timeout_s: float) -> int:
    """Stand by as a spare; the exit status is not 0 where the run is to go on without those that were asked to go.

    hang_s: seconds without a beat after which the run is taken for dead (0: never), timeout_s: until the first one. Raises
    RuntimeProgramError then.
    """
    what = "idle" if rank < manifest.started else "a spare"
    print(f"rank {rank} is {what}: this run has a plan for {manifest.world_size} ranks", flush=True)
    last, heard_s, seen = b"", 0.0, SeenTime()
    while not store.check([_ENDED]):
        seen.tick(POLL_S)
        beat = store.get("beat/0") if store.check(["beat/0"]) else b""
        if beat != last:
            last, heard_s = beat, seen.seconds
        silent_s = seen.seconds - heard_s
        if hang_s and silent_s > (hang_s + GRACE_S if last else timeout_s):
            raise RuntimeProgramError(f"spare rank {rank}: the run has not been heard of for {silent_s:.0f} s")
        time.sleep(POLL_S)
    why = store.get(_ENDED).decode()
    store.add(_HEARD, 1)
    return START_AGAIN if why in (AGAIN, LOST, MOVED) or (manifest.worlds and why == STOPPED) else 0
