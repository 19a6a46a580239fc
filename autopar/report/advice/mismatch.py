"""Where a run and its prediction lie apart, by cause, and the cluster as the run found it.

All devices may compute slower than they are described, the ranks of some stages slower than the others, or a level of links may
send slower. What explains a run is said before anything else, as plans for machines that are not there are no advice; and what is
planned then is planned for those that are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec, with_slower
from autopar.costmodel.by_node import gloo_time_s
from autopar.plan import Plan
from autopar.report.learned import FEWEST_SAMPLES, busy_seconds, link_samples
from autopar.report.predicted_vs_measured import Profile, group_of
from autopar.report.program_facts import ProgramFacts

APART = 1.25
"""A measured time over a predicted one, or the other way round, from which on they are said to lie apart."""
CALIBRATE = "measure them with autopar-calibrate, and compile for the file that it writes"
LOOK = "autopar-doctor --preflight measures them"


@dataclass(frozen=True)
class Mismatch:
    """A cause. what: takes another time; ratio: measured over predicted seconds; do: what to do about it; level: of links, where
    it is one; ranks: whose devices they are, where they are not all."""

    what: str
    ratio: float
    do: str
    level: str = ""
    ranks: range = range(0)

    def __str__(self) -> str:
        return f"{self.what} take {self.ratio:.2g} × as long as predicted: {self.do}"


def mismatches(facts: ProgramFacts, cluster: ClusterSpec, profile: Profile) -> tuple[Mismatch, ...]:
    """The causes by which a run and its prediction lie apart. cluster: in the order of the program's ranks."""
    return (*_devices(facts, profile), *_links(facts, cluster, profile))


def as_measured(cluster: ClusterSpec, plan: Plan, found: Sequence[Mismatch]) -> ClusterSpec:
    """The cluster with these causes in it. cluster: in the order of its description, on whose places the plan puts ranks."""
    rank_of = plan.placement or tuple(range(plan.ranks))
    for one in found:
        if one.level:
            levels = tuple(level.slower(one.ratio) if level.name == one.level else level for level in cluster.levels)
            cluster = replace(cluster, levels=levels)
        elif one.ranks:
            places = {place for place, rank in enumerate(rank_of) if rank in one.ranks}
            cluster = with_slower(cluster, places, one.ratio)
        else:
            cluster = replace(cluster, devices=tuple((n, device.slower(one.ratio)) for n, device in cluster.devices))
    return cluster


def _devices(facts: ProgramFacts, profile: Profile) -> Iterator[Mismatch]:
    """All devices, and then those of groups that take longer beside the others than was predicted."""
    groups = facts.schedule.graph.groups
    by_group: list[list[float]] = [[] for _ in groups]
    for rank in range(len(profile.ranks)):
        measured_s, predicted_s = busy_seconds(facts, profile, rank)
        if measured_s > 0 and predicted_s > 0:
            by_group[group_of(facts, rank)].append(measured_s / predicted_s)
    ratios = [statistics.median(own) if own else None for own in by_group]
    usual = statistics.median_low([ratio for ratio in ratios if ratio is not None] or [1.0])
    if _apart(usual):
        yield Mismatch("all devices", usual, CALIBRATE)
    for group, ratio in zip(groups, ratios, strict=True):
        if ratio is not None and ratio > APART * usual:
            mesh = facts.stages[group[0]].mesh
            ranks = range(mesh.offset, mesh.offset + mesh.size)
            stages = f"stage{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"
            what = f"the devices of {stages} (rank{'s' if mesh.size > 1 else ''} {_span(ranks)}), beside the others,"
            yield Mismatch(what, ratio / usual, LOOK, ranks=ranks)


def _links(facts: ProgramFacts, cluster: ClusterSpec, profile: Profile) -> Iterator[Mismatch]:
    """Levels of links over which messages take another time than was predicted. A rank that comes first waits for the others, so
    the lower quartile of the messages of a kind and size is taken, not their median."""
    seconds: dict[str, dict[tuple[str, tuple[int, ...]], list[float]]] = {}
    for name, sample in link_samples([(facts, profile)], cluster):
        seconds.setdefault(name, {}).setdefault((sample.kind, sample.shape), []).append(sample.seconds)
    inner_sizes = (1, *(level.group_size for level in cluster.levels))
    for level, stride in zip(cluster.levels, inner_sizes, strict=False):
        by_kind = seconds.get(level.name, {})
        if sum(map(len, by_kind.values())) < FEWEST_SAMPLES:
            continue
        measured_s = expected_s = 0.0
        for (kind, (nbytes, ranks)), taken in by_kind.items():
            measured_s += sorted(taken)[len(taken) // 4]
            expected_s += gloo_time_s(cluster, kind, float(nbytes), tuple(range(0, ranks * stride, stride)))
        if expected_s > 0 and _apart(measured_s / expected_s):
            yield Mismatch(
                f"messages over {level.name} links", measured_s / expected_s, f"{LOOK}; or {CALIBRATE}", level.name
            )


def _apart(ratio: float) -> bool:
    return ratio > APART or 0 < ratio < 1 / APART


def _span(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"
