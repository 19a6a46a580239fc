"""Failures, checkpoints and recovery: what a long run loses, in the formulas of the texts (seconds, bytes, shares).

Young's interval sqrt(2 d M) for d seconds of writing and M seconds between failures, less the writing itself where the
interval is counted between the end of one checkpoint and the start of the next; Daly's refinement; expected goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, sqrt

from autopar.errors import InfeasibleError, InputError


def mtbf_s(devices: int, device_mtbf_s: float) -> float:
    """Mean time between failures of a run that any one device stops."""
    if devices < 1 or device_mtbf_s <= 0:
        raise InputError(f"mtbf_s needs at least one device and a positive time, got {devices} and {device_mtbf_s}")
    return device_mtbf_s / devices


def failure_probability(devices: int, rate: float) -> float:
    """Chance that at least one of `devices` fails in a period in which each fails with chance `rate`."""
    return 1 - (1 - rate) ** devices


def redundant_failure_probability(devices: int, rate: float, group: int = 3, tolerated: int = 1) -> float:
    """First-order chance that some group loses more than it tolerates: groups * C(group, k+1) * rate^(k+1).

    2+1 redundancy is group=3, tolerated=1.
    """
    return devices / group * comb(group, tolerated + 1) * rate ** (tolerated + 1)


def young_interval_s(write_s: float, mtbf: float) -> float:
    """sqrt(2 d M): seconds between checkpoints that lose least."""
    return sqrt(2 * write_s * mtbf)


def compute_interval_s(write_s: float, mtbf: float) -> float:
    """sqrt(2 d M) - d: seconds of work between two checkpoints."""
    return max(0.0, young_interval_s(write_s, mtbf) - write_s)


def daly_interval_s(write_s: float, mtbf: float) -> float:
    """Daly (2006): sqrt(2 d M) [1 + sqrt(d/2M)/3 + (d/2M)/9] - d for d < 2M, else M."""
    if write_s >= 2 * mtbf:
        return mtbf
    x = write_s / (2 * mtbf)
    return sqrt(2 * write_s * mtbf) * (1 + sqrt(x) / 3 + x / 9) - write_s


def daly_wall_s(work_s: float, interval_s: float, write_s: float, mtbf: float, restart_s: float = 0.0) -> float:
    """Expected wall time M e^{R/M} (e^{(t+d)/M} - 1) T/t for T seconds of work, checkpointed every t."""
    return mtbf * exp(restart_s / mtbf) * (exp((interval_s + write_s) / mtbf) - 1) * work_s / interval_s


def waste(interval_s: float, write_s: float, mtbf: float) -> float:
    """First-order share of time lost, d/t + t/2M."""
    return write_s / interval_s + interval_s / (2 * mtbf)


@dataclass(frozen=True)
class CheckpointPlan:
    """interval_s of work between checkpoints; overhead: writing over work; goodput: useful share of the wall time."""

    interval_s: float
    per_week: float
    overhead: float
    goodput: float


def checkpoint_plan(write_s: float, mtbf: float, restart_s: float = 0.0) -> CheckpointPlan:
    """The interval by Young's formula and what it costs."""
    t = max(compute_interval_s(write_s, mtbf), write_s * 1e-3, 1e-9)
    goodput = t / (daly_wall_s(t, t, write_s, mtbf, restart_s))
    return CheckpointPlan(t, 7 * 86400 / t, write_s / t, goodput)


def recovery_s(size_bytes: float, streams: int, stream_Bps: float, deserialize_s: float = 0.0) -> float:
    """Seconds to read a checkpoint: size / (streams * rate) + deserialising."""
    return size_bytes / (streams * stream_Bps) + deserialize_s


RECOVERY_TIERS_BPS: dict[str, float] = {"host memory": 100e9, "nvme": 7e9, "object store": 1e9}
"""Bytes/s of one stream from each tier (typical figures of the texts)."""


def recovery_by_tier_s(size_bytes: float, streams: int, deserialize_s: float = 0.0) -> dict[str, float]:
    """Seconds to recover from each tier."""
    return {tier: recovery_s(size_bytes, streams, rate, deserialize_s) for tier, rate in RECOVERY_TIERS_BPS.items()}


def elastic(
    lr: float, batch: float, new_batch: float, throughput: float, alive: int, total: int
) -> tuple[float, float]:
    """(learning rate, throughput) after devices left: lr sqrt(B'/B), P alive/total."""
    return lr * sqrt(new_batch / batch), throughput * alive / total


def should_rebalance(step_s: Sequence[float], steps_left: int, move_s: float, spread: float = 0.2) -> bool:
    """Whether moving work pays: step times spread over more than `spread`, and what is saved exceeds the move."""
    mean = sum(step_s) / len(step_s)
    if max(step_s) - min(step_s) <= spread * mean:
        return False
    speed = [1 / t for t in step_s]
    balanced = len(step_s) / sum(speed)
    return (max(step_s) - balanced) * steps_left > move_s


def shares_by_speed(step_s: Sequence[float]) -> list[float]:
    """Shares of the work proportional to measured speed."""
    speed = [1 / t for t in step_s]
    return [v / sum(speed) for v in speed]


def place_in_tiers(size_bytes: float, tiers: Mapping[str, float]) -> dict[str, float]:
    """Fills the tiers in the order given (fastest first). Raises InfeasibleError when all together are too small."""
    placed: dict[str, float] = {}
    left = size_bytes
    for tier, capacity in tiers.items():
        placed[tier] = min(left, capacity)
        left -= placed[tier]
    if left > 0:
        raise InfeasibleError(
            f"{size_bytes / 1e12:.1f} TB do not fit in {', '.join(tiers)}: {left / 1e12:.1f} TB short; "
            "add that much to one of them"
        )
    return placed
