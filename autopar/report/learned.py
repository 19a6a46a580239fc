"""The lesson of measured runs about a cluster: its description with constants that would have predicted them.

Every kind of message along an axis that was waited for at once is a sample of its link; a level of links gets the line
through them that `autopar-calibrate` fits to its own. What actions took without the messages they waited for, over what
they were expected to take, is by how much devices are slower than described: one factor for all their rates, since runs of a
few plans cannot tell these apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.calibrate_links import Sample, fit_links
from autopar.costmodel.collective import shape_on_levels
from autopar.report.predicted_vs_measured import Profile, action_of, group_of, stages_of
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.comm.recorder import StepRecord

Run = tuple[ProgramFacts, Profile]
AT_ONCE = 0.1
"""A message was waited for at once if at most this share of its time went by before."""
SAMPLED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FEWEST_SAMPLES = 4


def slowness(runs: Sequence[Run]) -> float:
    """Measured over predicted seconds of what actions compute."""
    seconds = [busy_seconds(facts, profile, rank) for facts, profile in runs for rank in range(len(profile.ranks))]
    measured_s, predicted_s = sum(measured for measured, _ in seconds), sum(predicted for _, predicted in seconds)
    return measured_s / predicted_s if predicted_s > 0 else 1.0


def busy_seconds(facts: ProgramFacts, profile: Profile, rank: int) -> tuple[float, float]:
    """Measured and predicted seconds of what a rank's actions compute in a step."""
    stages, non_overlapped_s = stages_of(facts, rank), facts.schedule.exposed[group_of(facts, rank)]
    once_s = sum(facts.schedule.seconds.get((s, kind), 0.0) for s in stages for kind in "FBW") - non_overlapped_s
    return statistics.median(map(_computed_s, profile.ranks[rank])), facts.microbatches * once_s


def _computed_s(step: StepRecord) -> float:
    """Seconds of a step's actions in which the rank waited for nobody."""
    spans = [span for span in step.spans if action_of(span.name) is not None]
    busy_s = sum(span.end_s - span.start_s for span in spans)
    last_s = max((span.end_s for span in spans), default=0.0)
    return max(busy_s - sum(m.non_overlapped_s for m in step.messages if m.end_s <= last_s), 0.0)


def link_samples(runs: Sequence[Run], cluster: ClusterSpec) -> Iterator[tuple[str, Sample]]:
    """Messages as samples, with the level of links that they went over; none of those that went over several."""
    for facts, profile in runs:
        for rank, steps in enumerate(profile.ranks):
            mesh = facts.stages[stages_of(facts, rank)[0]].mesh
            for m in (m for step in steps for m in step.messages):
                axes, lasts_s = tuple(m.axes.split(",")), m.end_s - m.start_s
                if m.kind in SAMPLED and lasts_s > 0 and set(axes) <= set(mesh.names):
                    shape = shape_on_levels(cluster.levels, mesh.group(axes, rank))
                    if len(shape) == 1 and m.wait_s - m.start_s <= AT_ONCE * lasts_s:
                        yield shape[0][1].name, Sample(m.kind, (m.nbytes, shape[0][0]), "", lasts_s)


def learned(cluster: ClusterSpec, runs: Sequence[Run]) -> ClusterSpec:
    """The cluster with constants that the runs would have had."""
    factor = slowness(runs)
    devices = tuple((n, device.slower(factor)) for n, device in cluster.devices)
    by_level: dict[str, list[Sample]] = {}
    for level, sample in link_samples(runs, cluster):
        by_level.setdefault(level, []).append(sample)
    links: dict[str, Any] = {}
    for name, samples in by_level.items():
        usual = _medians(samples)
        if len({s.shape for s in usual}) >= FEWEST_SAMPLES:
            links |= fit_links(usual, name)[0]
    return replace(cluster, devices=devices).with_profile({"links": links})


def _medians(samples: Sequence[Sample]) -> list[Sample]:
    """One sample of each kind and size."""
    found: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for kind, shape, _, seconds in samples:
        found.setdefault((kind, shape), []).append(seconds)
    return [Sample(kind, shape, "", statistics.median(seconds)) for (kind, shape), seconds in found.items()]
