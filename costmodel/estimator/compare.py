"""A published run's plan against the best one the search finds: same model, cluster, batch and software, same cost model.

`compare` answers for one row. The search's space holds every plan that published runs use, so the plan it prefers is
predicted at least as fast, whenever the published one fits by the model's own memory. Where it does not, yet ran, the
model errs to the cautious side: then the search may take as many bytes as the published plan is predicted to (and what
it would choose within the device's memory is kept beside it). A plan that ran out of memory competes with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.schedules import same_form, schedule_name
from autopar.costmodel.estimator.search import EstimatedPlan, reason, search
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.space import PLAIN, Space
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.software import Software
from autopar.errors import AutoparError, ConstraintError, InfeasibleError


@dataclass(frozen=True)
class Comparison:
    """published: the row's plan; best: what the search prefers; strict: what it would within the device's memory, None
    when nothing fits there. fits: whether the published plan does. ran: whether it did, in truth. gain: share of the
    published plan's predicted time that the best one saves. why: where the time goes, in words."""

    id: str
    published: EstimatedPlan
    best: EstimatedPlan
    strict: EstimatedPlan | None
    fits: bool
    ran: bool
    gain: float
    why: str


Asked = dict[tuple[Space, float], EstimatedPlan | None]


@dataclass
class Answers:
    """Searches already made, by (model, cluster, batch, software): rows of one question share them."""

    by_question: dict[tuple[TransformerShape, ClusterSpec, int, Software], Asked] = field(default_factory=dict)

    def best(self, w: Workload, space: Space, room: float) -> EstimatedPlan | None:
        """The fastest plan within `room` bytes; None when there is none. The answer of a space with more schedules is
        that of this one too when its schedule is also here."""
        asked = self.by_question.setdefault((w.model, w.cluster, w.batch, w.software), {})
        for (other, other_room), answer in asked.items():
            if other_room == room and replace(other, schedules=space.schedules) == space:
                here = answer is None or answer.plan.parallel.pp == 1 or answer.plan.schedule in space.schedules
                if other == space or (here and set(space.schedules) <= set(other.schedules)):
                    return answer
        try:
            result = search(w.model, w.cluster, batch=w.batch, software=w.software, space=space, room_bytes=room, top=1)
            asked[space, room] = result.best[0]
        except InfeasibleError:
            asked[space, room] = None
        return asked[space, room]


def row_space(plan: ParallelConfig, schedule: str, plain: bool = False) -> Space:
    """The space for a row: ZeRO-2 only where the row uses it; `plain`: schedules of every framework, and the row's own."""
    space = Space(zeros=(1, 2, 0, 3) if plan.zero == 2 else (1, 0, 3))
    if plain:
        name = schedule_name(schedule, plan.vpp)
        own = same_form(name)
        space = replace(space, schedules=tuple(dict.fromkeys((*PLAIN, own))))
    return space


def compare(row: Mapping[str, Any], answers: Answers | None = None, *, plain: bool = False) -> Comparison:
    """One row. Raises ConstraintError for a plan that does not fit its model, cluster or batch, InputError for a row
    without the needed keys."""
    w = row_workload(row)
    plan = w.parallel
    plan.check(w.model, w.cluster.size, w.batch, w.plan.micro_batch)
    e = estimate_workload(w)
    name = "1f1b" if plan.pp == 1 else schedule_name(w.plan.schedule, plan.vpp)
    published = EstimatedPlan(replace(w.plan, schedule=name), e, reason(e, w.plan))
    space = row_space(plan, name, plain)
    answers = Answers() if answers is None else answers
    ran = "oom" not in row.get("score_on", [])
    room = w.device.memory_bytes
    strict = answers.best(w, space, room)
    best = strict
    if not e.fits and ran:
        best = answers.best(w, space, max(room, e.memory_bytes["reserved"]))
    if best is None:
        raise ConstraintError(f"row {row.get('id', '?')}: no plan fits by the cost model's memory")
    gain = 1 - best.estimate.step_time_s / e.step_time_s
    why = explain(published, best, w) if abs(gain) > 1e-9 else "the same time"
    return Comparison(str(row.get("id", "?")), published, best, strict, e.fits, ran, gain, why)


def compare_all(
    rows: Iterable[Mapping[str, Any]],
    *,
    plain: bool = False,
    refused: list[tuple[str, str]] | None = None,
    answers: Answers | None = None,
) -> Iterator[Comparison]:
    """Every row whose plan can be told and belongs to its cluster and batch; the others, with why, go to `refused`."""
    answers = Answers() if answers is None else answers
    for row in rows:
        try:
            yield compare(row, answers, plain=plain)
        except AutoparError as err:
            if refused is not None:
                refused.append((str(row.get("id", "?")), str(err)))


def parts_s(c: EstimatedPlan, w: Workload) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step. w: what the plan is for.

    What is recomputed is what the same plan would save without it.
    """
    bare = estimate_workload(w.at(replace(c.plan, recompute="none")), check=False)
    e, b = c.estimate, c.estimate.breakdown
    again = e.breakdown["compute"] - bare.breakdown["compute"] if c.plan.recompute != "none" else 0.0
    layers = {k: e.comm[k]["non_overlapped_s"] for k in ("tp", "cp", "ep") if k in e.comm}
    scale = b["exposed_layer_comm"] / sum(layers.values()) if sum(layers.values()) > 0 else 0.0
    parts = {"kernels and launches": b["compute"] - again, "recompute": again, "bubble": b["bubble"]}
    parts |= {f"{kind} communication": seconds * scale for kind, seconds in layers.items()}
    parts["dp communication"] = b["exposed_dp"]
    parts["optimizer"] = b["optimizer"]
    parts["overhead"] = e.step_time_s - sum(parts.values())
    return parts


def explain(published: EstimatedPlan, best: EstimatedPlan, w: Workload) -> str:
    """A text of the parts in which the preferred plan saves and pays most, largest first, as shares of the published step."""
    old, new = parts_s(published, w), parts_s(best, w)
    step = published.estimate.step_time_s
    change = {what: (new.get(what, 0.0) - old.get(what, 0.0)) / step for what in (*old, *new)}
    words = []
    for verb, sign in (("saves", -1), ("pays", 1)):
        largest = sorted(
            ((share, what) for what, share in change.items() if sign * share > 0.003), key=lambda x: -abs(x[0])
        )
        if largest:
            words.append(f"{verb} " + ", ".join(f"{abs(share):.1%} {what}" for share, what in largest[:3]))
    before, after = (c.estimate.memory_bytes["reserved"] / 1e9 for c in (published, best))
    return "; ".join([*words, f"memory {before:.0f} to {after:.0f} GB"])


def describe(c: EstimatedPlan) -> str:
    """A plan in one line, settings that are not used left out."""
    p = c.plan.parallel
    words = [
        f"{name}{size}"
        for name, size in (("dp", p.dp), ("tp", p.tp), ("pp", p.pp), ("cp", p.cp), ("ep", p.ep))
        if size > 1
    ]
    words += [f"vpp{p.V}"] if p.V > 1 else []
    words += ["sp"] if p.sequence_parallel and p.tp > 1 else []
    words += [f"zero{p.zero}" + (f"/{p.shard_group}" if p.shard_group else "")] if p.dp * p.cp > 1 else []
    words += [c.plan.schedule] if p.pp > 1 else []
    return " ".join(
        [*words, f"mb{c.plan.micro_batch}"] + ([f"recompute {c.plan.recompute}"] if c.plan.recompute != "none" else [])
    )
