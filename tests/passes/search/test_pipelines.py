"""Plans that the search over pipelines finds by itself, stated as claims."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec, Options, ParallelProgram
from autopar.capture.build import capture_program
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.layout import Layout
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.stages import pipelines, plan_of_draft
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.laid_out import search_laid_out
from autopar.passes.search.stages.pipelines import PipelineSearch, _promising, estimate_to_beat_s
from autopar.passes.search.stages.plan_of_draft import DraftInMemory
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import Task
from tests.passes.schedule.pipelines import IN_A_LOOP, IN_A_V

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Tower(nn.Module):
    """Wide layers: parameters outweigh activations by far."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


def tower(
    cluster: ClusterSpec, batch: int = 4096, width: int = 2048, layers: int = 8, **options: object
) -> ParallelProgram:
    with torch.device("meta"):
        model = Tower(width, layers)
        x = torch.empty(batch, width)
    return autopar.compile(model, cluster, (x, x), optimizer=ADAMW, options=Options(**options))  # type: ignore[arg-type]


def nodes(rate_Bps: float, devices: int = 4) -> ClusterSpec:
    """Nodes of two devices, joined by links of this rate."""
    return ClusterSpec.homogeneous(
        devices=devices, device="a100", devices_per_node=2, inter_bandwidth_Bps=rate_Bps, intra_bandwidth_Bps=3e11
    )


@functools.cache
def over_slow_links() -> ParallelProgram:
    return tower(nodes(5e9))


def test_stages_lie_on_either_side_of_slow_links() -> None:
    program = over_slow_links()
    assert program.pp >= 2, program.report()
    owner = [program.group_of(rank) for rank in range(4)]
    assert owner[1] != owner[2], "the slow link lies between ranks 1 and 2"


def test_no_alternative_is_predicted_faster() -> None:
    program = over_slow_links()
    assert all(program.predicted.step_time_s <= a.predicted.step_time_s for a in program.alternatives)
    assert any(len(a.plan.stages) == 1 for a in program.alternatives)


def test_given_stages_get_the_microbatches_that_are_best_for_them() -> None:
    """The stages of a plan as the layout of the same request, in any memory, and below the seconds of that plan."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), torch.zeros(1 << 18, 2048)
    captured, rules = capture_program(model, (x, x), F.mse_loss, 1), RuleBook()
    task = Task(captured.program, nodes(5e9), rules, Setting(1), Options(pp=2), Microbatches(captured, rules))
    *_, ranking = PipelineSearch(SubmeshPlans(TasksByCount(task, 1 << 18))).plans(math.inf)
    best = ranking[0][1]
    layout = Layout.of(best.plan, ranking[0][0].program)
    again = functools.partial(search_laid_out, SubmeshPlans(TasksByCount(task.changed(layout=layout), 1 << 18)), layout)
    *_, laid_out = again(math.inf)
    assert laid_out[0][1].step_s == pytest.approx(best.step_s, rel=1e-9)
    assert laid_out[0][1].plan.microbatches == best.plan.microbatches > 8
    assert not list(again(0.9 * best.step_s))


def test_a_timed_table_fits_the_devices_where_a_limit_allows_more_than_they_have() -> None:
    device = replace(nodes(5e9).device(0), memory_bytes=14e9)
    cluster = ClusterSpec.homogeneous(devices=2, device=device, devices_per_node=2, intra_bandwidth_Bps=3e11)
    program = tower(cluster, batch=1 << 19, pp=2, microbatches=16, schedule="zb-auto", memory_bytes=1e15)
    assert program.predicted.peak_bytes < 14e9


@pytest.mark.slow
def test_fast_links_need_no_pipeline() -> None:
    assert tower(nodes(3e11)).pp == 1


def test_slow_links_ask_for_several_microbatches() -> None:
    assert over_slow_links().plan.microbatches > 1


@pytest.mark.slow
def test_equal_layers_are_cut_into_equal_stages() -> None:
    program = tower(nodes(3e11), layers=7, pp=4, chunks=1, microbatches=8)
    held = [sum(n.endswith("weight") for n in stage.parameters) for stage in program.stages]
    assert sum(held) == 7
    assert max(held) <= 2


def test_what_is_forced_is_done() -> None:
    program = tower(nodes(3e11), stage_boundaries=["layers.2", "layers.6"], microbatches=4, schedule="gpipe", pp=None)
    starts = [program.ir.calls[s.calls[0]].start for s in program.plan.stages]
    assert starts[1:] == ["layers.2", "layers.6"]
    assert (program.plan.microbatches, program.plan.schedule) == (4, "gpipe")


def test_the_mesh_of_a_stage_can_be_forced() -> None:
    program = tower(nodes(3e11), pp=2, mesh={"tp": 2}, microbatches=4)
    assert [dict(s.mesh.axes) for s in program.plan.stages] == [{"tp": 2}] * len(program.plan.stages)
    assert program.pp == 2


def test_stages_whose_mesh_is_forced_may_lie_across_nodes() -> None:
    """Four stages of three ranks have one place on nodes of four."""
    cluster = ClusterSpec.homogeneous(devices=12, device="a100", devices_per_node=4, inter_bandwidth_Bps=3e9)
    program = tower(cluster, batch=3072, width=1024, pp=4, mesh={"dp": 3})
    assert [(stage.mesh.offset, stage.mesh.size) for stage in program.plan.stages] == [(0, 3), (3, 3), (6, 3), (9, 3)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 2},
        {"schedule": "interleaved"},
        {"chunks": 2, "schedule": "interleaved-zb", "pp": 2},
        {"schedule": "zb-v"},
    ],
    ids=str,
)
def test_stages_of_groups_that_run_several_start_where_they_are_named(options: dict[str, Any]) -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(8, 8)
    named = Options(stage_boundaries=["1", "4", "5"], microbatches=4, **options)
    program = autopar.compile(model, ClusterSpec.local(2), (x, x), loss_fn=F.mse_loss, options=named)
    stages = program.plan.stages
    assert [program.ir.calls[stage.calls[0]].start for stage in stages[1:]] == ["1", "4", "5"]
    groups = [0, 1, 1, 0] if options.get("schedule") == "zb-v" else [0, 1, 0, 1]
    assert [stage.mesh.offset for stage in stages] == groups
    assert autopar.verify(program, model, (x, x)).max_error <= 1e-9


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", *IN_A_LOOP, *IN_A_V])
def test_every_schedule_can_be_asked_for(schedule: str) -> None:
    program = tower(nodes(3e11), pp=2, microbatches=4, schedule=schedule, batch=256, width=256)
    assert program.plan.schedule == schedule
    assert len(program.plan.stages) == (4 if schedule in (*IN_A_LOOP, *IN_A_V) else 2)


def test_where_memory_is_short_the_schedule_holds_fewer_microbatches() -> None:
    greedy = tower(nodes(3e11), pp=2, microbatches=16, batch=65536, schedule="gpipe")
    limit = 0.5 * greedy.predicted.peak_bytes
    lean = tower(nodes(3e11), pp=2, microbatches=16, batch=65536, memory_bytes=limit)
    assert lean.predicted.peak_bytes <= limit < greedy.predicted.peak_bytes
    assert lean.plan.schedule != "gpipe"


@pytest.mark.slow
def test_what_no_cut_can_meet_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        autopar.InfeasibleError, match=r"alone take 134 MB however they are sharded; use 6 ranks or more"
    ):
        tower(nodes(3e11), pp=2, microbatches=16, memory_bytes=1e8)


def test_devices_of_two_speeds_share_the_work_by_speed() -> None:
    fast, slow = ClusterSpec.homogeneous(devices=2, device="h100"), ClusterSpec.homogeneous(devices=2, device="a100")
    mixed = ClusterSpec("mixed", ((2, fast.device(0)), (2, slow.device(0))), nodes(1e10).levels)
    program = tower(mixed, batch=8192, pp=2, microbatches=16, schedule="1f1b")
    calls = [b - a for a, b in (s.calls for s in program.plan.stages)]
    assert len(calls) == 2
    assert calls[0] > calls[1], program.report()


def test_a_program_is_captured_once_also_when_its_best_plan_has_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.request import request as module

    captured: list[int] = []
    real = module.capture_program

    def counting(model: nn.Module, inputs: object, *rest: object) -> object:
        captured.append(1)
        return real(model, inputs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "capture_program", counting)
    program = tower(nodes(5e9))
    assert program.plan.microbatches > 1
    assert len(captured) == 1


def made_to_fit(
    plan_s: float, estimates_s: tuple[float, ...] = (1.0, 1.01, 1.02), within_s: tuple[float, ...] = (1.005, 1.03, 1.02)
) -> tuple[list[int], list[float]]:
    """The rough cuts that are made to fit in memory, and the estimates that are given, in order, where the first that is given
    becomes a plan of so many seconds."""

    def draft(step_s: float) -> Any:
        """Another cut for every number of seconds."""
        solution = SimpleNamespace(stages=())
        return SimpleNamespace(
            step_s=step_s, microbatches=step_s, chunks=1, shape="loop", solution=solution, submesh_plans=()
        )

    roughs, within_memory = [*map(draft, estimates_s)], [*map(draft, within_s)]
    search: Any = SimpleNamespace(best_s=2.0, note=lambda shortage: None)
    made: list[int] = []
    given: list[float] = []

    class Drafts:
        def __getitem__(self, k: int) -> tuple[list[DraftInMemory], None]:
            made.append(k)
            return [DraftInMemory(roughs[k], "none", within_memory[k])], None

    drafts: Any = Drafts()
    for in_memory in _promising(search, roughs, drafts, lambda: plan_s if given else 2.0):
        given.append(in_memory.draft.step_s)
    return made, given


def test_a_rough_cut_is_made_to_fit_when_no_better_estimate_is_left() -> None:
    assert made_to_fit(plan_s=1.5) == ([0, 1, 2], [1.005, 1.02, 1.03])
    assert made_to_fit(plan_s=1.008) == ([0], [1.005]), "a plan beats the estimates that are left"


def test_a_plan_that_takes_longer_than_its_estimate_spares_no_other_cut() -> None:
    assert made_to_fit(1.5, (1.0, 1.2), (1.0, 1.2)) == ([0, 1], [1.0, 1.2])
    assert made_to_fit(1.5, (1.0, 1.2), (1.25, 1.2)) == ([0, 1], [1.2, 1.25]), "a cut that is none yet spares others"


def test_estimates_are_taken_to_lack_half_of_what_others_lacked() -> None:
    assert estimate_to_beat_s(1.5, []) == 1.5
    assert estimate_to_beat_s(1.5, [(1.0, 1.5)]) == pytest.approx(1.2)
    assert estimate_to_beat_s(1.5, [(1.0, 1.5), (1.25, 1.5)]) == pytest.approx(1.5 / 1.1)
    assert estimate_to_beat_s(0.9, [(1.0, 0.9)]) == 0.9
    assert estimate_to_beat_s(1.04, [(1.0, 1.04)]) == pytest.approx(1.03), "any plan may take a little more"


def test_the_meshes_of_a_cut_on_several_have_cuts_of_their_own() -> None:
    program = tower(nodes(5e9), batch=512, pp=2, microbatches=4, schedule="1f1b")
    batches = Microbatches(program.captured, program.rules)
    task = Task(program.ir, program.cluster, program.rules, program.setting, Options(), batches)
    drafts = CutSearch(SubmeshPlans(TasksByCount(task, 512)), math.inf).rough()
    cuts = {(draft.microbatches, draft.chunks, frozenset(draft.used_meshes())) for draft in drafts}
    several = [(M, mesh) for M, _, meshes in cuts if len(meshes) > 1 for mesh in meshes if mesh.size < 4]
    assert several
    assert all((M, 1, frozenset({mesh})) in cuts for M, mesh in several)


def test_finer_meshes_are_held_against_the_estimate_of_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    program = tower(nodes(5e9), batch=512, pp=2, microbatches=4, schedule="1f1b")
    batches = Microbatches(program.captured, program.rules)
    options = Options(pp=2, microbatches=4, schedule="1f1b")
    task = Task(program.ir, program.cluster, program.rules, program.setting, options, batches)
    cuts, asked = list[Draft](), list[float]()
    rough = CutSearch.rough
    monkeypatch.setattr(CutSearch, "rough", lambda self: cuts.extend(rough(self)) or cuts)
    monkeypatch.setattr(CutSearch, "finer", lambda self, cuts, estimate_s: asked.append(estimate_s) or [])
    monkeypatch.setattr(pipelines, "finer_meshes_of", lambda *_: [Mesh((("dp", 2), ("cp", 2)))])
    search = PipelineSearch(SubmeshPlans(TasksByCount(task, 512)))
    *_, [(_, best), *_] = search.plans(math.inf)
    search._search.limits = replace(search._search.limits, mixed=False)
    looked_at = len(cuts)
    assert list(search.finer(best)) == []
    used = {stage.mesh.axes for stage in best.plan.stages}
    assert asked == [min(cut.step_s for cut in cuts if {mesh.axes for mesh in cut.used_meshes()} == used)]
    assert len(cuts) == looked_at, "the first cuts are not made again"


def test_a_smaller_share_of_the_memory_that_leaves_the_plan_as_it_is_is_not_lowered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are here the plans that they are; the plan "b" fits."""
    lowered: list[Any] = []
    drafts = iter(("a", "b"))

    def scheduled(draft: Any, plan: Any, _: float) -> Any:
        lowered.append(plan)
        return 1.1 if plan == "a" else math.inf

    monkeypatch.setattr(plan_of_draft, "_plan_of", lambda draft: draft.plan)
    monkeypatch.setattr(plan_of_draft, "_scheduled", scheduled)
    shares: list[float] = []

    def exact(rough: Any, share: float, policy: str | None) -> Any:
        shares.append(share)
        return SimpleNamespace(plan=next(drafts), step_s=1.0)

    first: Any = DraftInMemory(SimpleNamespace(), "none", SimpleNamespace(plan="a", step_s=1.0))
    assert plan_of_draft.plan_that_fits(exact, first, 2.0) is None
    assert lowered == ["a", "b"]
    assert shares == pytest.approx([0.95 * 0.97 / 1.1, 0.95 * (0.97 / 1.1) ** 2]), "the memory shrinks all the same"


def test_stages_that_win_less_than_predictions_tell_apart_are_not_worth_them() -> None:
    h100 = ClusterSpec.homogeneous(devices=4, device="h100")
    one_mesh = tower(h100, batch=32, width=64, layers=2)
    staged = tower(h100, batch=32, width=64, layers=2, pp=2)
    assert len(one_mesh.plan.stages) == 1
    assert 0.998 < staged.predicted.step_time_s / one_mesh.predicted.step_time_s < 1
