"""The useful share of a long run: failures, the work that each takes back, and how often to save.

The state is saved every so many seconds of work. Training stands still while it is copied to the host (stall_s), and a copy
counts once it is written (write_s later). A failure takes back all work since the copy that counts, then the run is down
until the failure is found and the ranks have started again; where no spare node is left it also waits for one that is
repaired, or goes on smaller. `simulate` plays that with failures at random; `expected` is its first order, from which the
interval is chosen, and which is Young's where nothing is asynchronous:

    lost share = stall / t + (write + t / 2 + down) / M      least at t = sqrt(2 · stall · M)

with M the time between failures (Young 1974; Daly 2006 in `tests/oracles/reliability.py`, to which tests hold both).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, sqrt


@dataclass(frozen=True)
class Saving:
    """Seconds of a checkpoint: training stands still, and from then until it counts."""

    stall_s: float
    write_s: float = 0.0


@dataclass(frozen=True)
class Failures:
    """mtbf_s: between failures of the whole run; down_s: from a failure until it computes again; nodes of the run; spares beside
    them (None: there is always another), and seconds until a failed node is back. shrinks: without a spare the run goes on
    with the nodes that are left."""

    mtbf_s: float
    down_s: float = 0.0
    nodes: int = 1
    spares: int | None = None
    repair_s: float = 0.0
    shrinks: bool = False


@dataclass(frozen=True)
class Outcome:
    """A run that is over, in seconds: of wall time, of work done, of work that was taken back, down, and saving."""

    wall_s: float
    work_s: float
    lost_s: float
    down_s: float
    saving_s: float
    failures: int

    @property
    def goodput(self) -> float:
        """Share of the wall time in which work was done that stayed."""
        return self.work_s / self.wall_s if self.wall_s else 1.0


def best_interval_s(saving: Saving, failures: Failures, step_s: float) -> float:
    """Seconds of work between two copies, whole steps of them: Young's, but no shorter than a copy takes to be written."""
    interval_s = max(sqrt(2 * saving.stall_s * failures.mtbf_s), saving.write_s, step_s)
    return ceil(interval_s / step_s - 1e-9) * step_s


def expected(interval_s: float, saving: Saving, failures: Failures) -> float:
    """Goodput to first order."""
    lost = (saving.write_s + interval_s / 2 + failures.down_s) / failures.mtbf_s
    return max(1 - lost, 0.0) / (1 + saving.stall_s / interval_s)


def simulate(work_s: float, interval_s: float, saving: Saving, failures: Failures, seed: int = 0) -> Outcome:
    """Play so many seconds of work, of all nodes, until they are done."""
    draw, nodes = random.Random(seed), _Nodes(failures)
    now = done = kept = lost = down = stalled = 0.0
    count = 0
    fails_at = draw.expovariate(1 / failures.mtbf_s)
    while done < work_s:
        nodes.repaired(now)
        part_s = min(interval_s, work_s - done)
        computed_at = now + part_s / nodes.speed
        stall_s = saving.stall_s if done + part_s < work_s else 0.0
        if fails_at >= computed_at + stall_s:
            period_s = interval_s / nodes.speed + saving.stall_s
            until = min(fails_at, nodes.next_back if nodes.missing else fails_at)
            times = max(min(int((until - now) / period_s), ceil((work_s - done) / interval_s) - 1), 0)
            if times == 0:
                times, period_s = 1, computed_at + stall_s - now
                done, stalled = done + part_s, stalled + stall_s
            else:
                done, stalled = done + times * interval_s, stalled + times * saving.stall_s
            now += times * period_s
            late = max(
                0, ceil((now + saving.write_s - fails_at) / period_s)
            )  # copies that do not count before the failure
            kept = max(kept, done - late * interval_s)
            continue
        lost += done + (min(fails_at, computed_at) - now) * nodes.speed - kept
        stalled += max(fails_at - computed_at, 0.0)
        done, began, now = kept, fails_at, fails_at
        while fails_at <= now:  # machines fail while ranks start, too
            count += 1
            starts_at = nodes.replaced(fails_at)
            now = starts_at + failures.down_s
            fails_at = starts_at + draw.expovariate(1 / failures.mtbf_s)
        down += now - began
    return Outcome(now, work_s, lost, down, stalled, count)


class _Nodes:
    """Nodes that compute, spares, and those under repair."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.spares = failures.spares
        self.missing = 0
        self._back: list[float] = []

    @property
    def speed(self) -> float:
        """The run's speed as a share of its speed with all nodes."""
        return 1 - self.missing / self.failures.nodes

    @property
    def next_back(self) -> float:
        """The time at which the next node is repaired."""
        return self._back[0]

    def repaired(self, now: float) -> None:
        """Nodes that have come back by now compute again, or are spares."""
        while self._back and self._back[0] <= now:
            heappop(self._back)
            if self.missing:
                self.missing -= 1
            elif self.spares is not None:
                self.spares += 1

    def replaced(self, failed_at: float) -> float:
        """A node fails; when the run may start again."""
        if self.spares is None:
            return failed_at
        self.repaired(failed_at)
        heappush(self._back, failed_at + self.failures.repair_s)
        if self.spares:
            self.spares -= 1
        elif self.failures.shrinks and self.missing < self.failures.nodes - 1:
            self.missing += 1
        else:
            return max(failed_at, heappop(self._back))
        return failed_at
