"""Pipeline schedules as the estimator knows them: one row each.

Rows that name an `order` are timed by the simulator on that schedule's table, and hold what it holds
(`autopar.ir.schedules`); the others have closed forms for as many microbatches as one likes. "zb-1p" and "zb-2p" are the
names under which the zero-bubble paper reports its searched schedules with the memory of 1F1B and with twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from autopar.errors import ConstraintError
from autopar.ir.schedules import schedule_row

Held = Callable[[int, int, int], float]
"""(group, groups p, microbatches m) -> microbatches of all its stages whose activations a group holds at its peak."""
ClosedForm = Callable[[int, int, float, Mapping[tuple[int, str], float], float], float]
"""(p, m, seconds of the slowest group, seconds of (stage, kind), seconds of a send) -> seconds of the pipeline."""


@dataclass(frozen=True)
class EstimatedSchedule:
    """How a schedule is timed and what it holds.

    order: the schedule whose table is simulated, else held and closed_s say what it holds and takes; rounds(p, m): for how
    many microbatches, after which every further one adds the same period. sends_wait: whether the period includes sends.
    W_saved: weight gradients per group that fill the pipeline where it is too large to be simulated. chunks: stages per
    group (None: two or more). least(p): fewest microbatches. fills: whether the groups wait for the first microbatch to
    reach the last one (a bound of the search rests on it).
    """

    order: str = ""
    held: Held | None = None
    closed_s: ClosedForm | None = None
    rounds: Callable[[int, int], int] = lambda p, m: min(m, p + 1)
    sends_wait: bool = False
    W_saved: int = 0
    chunks: int | None = 1
    least: Callable[[int], int] = lambda p: 1
    fills: bool = True


def _as_zb_v(p: int, m: int, slowest_s: float, seconds: Mapping[tuple[int, str], float], comm_s: float) -> float:
    return m * slowest_s + 0.2 * (p - 1) * slowest_s + 2 * (p - 1) * comm_s


def _as_zb_2p(p: int, m: int, slowest_s: float, seconds: Mapping[tuple[int, str], float], comm_s: float) -> float:
    in_flight = min(m, 2 * p - 1)
    lag_s = (p - 1) * (seconds[0, "B"] + 2 * comm_s) + (p - in_flight) * seconds[0, "F"]
    return m * slowest_s + max(0.0, lag_s) + (p - 1) * comm_s


def _one_p(group: int, p: int, m: int) -> float:
    return min(m, p)


def _two_p(group: int, p: int, m: int) -> float:
    return min(m, 2 * p - 1 - group)


ESTIMATED = {
    "gpipe": EstimatedSchedule("gpipe"),
    "1f1b": EstimatedSchedule("1f1b", sends_wait=True),
    "interleaved": EstimatedSchedule("interleaved", rounds=lambda p, m: min(ceil(m / p), 2) * p, chunks=None),
    "zb-h1": EstimatedSchedule("zb-h1", W_saved=2, least=lambda p: p),
    "zb-h2": EstimatedSchedule(
        "zb-h2", rounds=lambda p, m: min(m, 2 * p), W_saved=2, least=lambda p: 2 * p, fills=False
    ),
    "zb-1p": EstimatedSchedule("zb-h1", W_saved=2),
    "zb-2p": EstimatedSchedule(held=_two_p, closed_s=_as_zb_2p, fills=False),
    "zb-v": EstimatedSchedule(held=_one_p, closed_s=_as_zb_v, chunks=2, least=lambda p: 2 * p, fills=False),
}
_ALIASES = {
    "none": "1f1b",
    "1f1b (deepspeed)": "1f1b",
    "interleaved-1f1b": "interleaved",
    "interleaved 1f1b": "interleaved",
    "interleaved 1f1b (vpp not given)": "interleaved",
}


def schedule_name(name: str, vpp: int | None) -> str:
    """The canonical name; 1F1B with several chunks is interleaved. Raises ConstraintError for an unknown one."""
    key = (name or "1f1b").lower()
    key = _ALIASES.get(key, key)
    if key not in ESTIMATED:
        raise ConstraintError(f"unknown schedule {name!r}; known: {', '.join(ESTIMATED)}")
    if key == "1f1b" and (vpp or 1) > 1:
        return "interleaved"
    if key == "interleaved" and (vpp or 1) == 1:
        return "1f1b"
    return key


def same_form(name: str) -> str:
    """The schedule under which a space lists one that is timed the same: zb-h1 for zb-1p."""
    return ESTIMATED[name].order or name


def microbatches_held(name: str, group: int, p: int, m: int, V: int) -> float:
    """Microbatches (of all its stages) whose activations a group holds at its peak."""
    row = ESTIMATED[name]
    if p == 1:
        return 1.0
    return float(
        row.held(group, p, m) if row.held is not None else schedule_row(row.order).held_by_group(group, p, m, V)
    )
