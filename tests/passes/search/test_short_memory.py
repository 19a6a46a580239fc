"""Plans on one mesh where memory is short: what is found before pipelines are made bounds them, and changes no choice."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options
from autopar.ir.mesh import Mesh
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.search import best_plans
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.by_microbatch import reduced_by_microbatch, reducing, smallest
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh import short_memory
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.short_memory import Question, ShortMemorySearch
from autopar.passes.search.one_mesh.within_memory import candidate_at, joint_on
from autopar.passes.search.stages.pipelines import PipelineSearch
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from tests.zoo.models import BY_NAME


@functools.cache
def compiled(name: str) -> autopar.ParallelProgram:
    zoo = BY_NAME[name]
    torch.manual_seed(0)
    return autopar.compile(zoo.make(), ClusterSpec.local(2), zoo.batch(), loss_fn=zoo.loss_fn, optimizer=zoo.optimizer)


def task(name: str, share: float = 2.0) -> Task:
    """A zoo model to be planned in a share of the memory that its plan takes, on prices of its own."""
    program = compiled(name)
    options = Options(memory_bytes=share * program.predicted.peak_bytes, explain_s=0.0)
    batches = Microbatches(program.captured, program.rules)
    return Task(program.ir, program.cluster, program.rules, program.setting, options, batches)


def batch_of(name: str) -> int:
    return len(BY_NAME[name].batch()[0])


def search_of(one: Task, name: str) -> ShortMemorySearch:
    return ShortMemorySearch(TasksByCount(one, batch_of(name)))


def told(ranking: RankedPlans) -> list[tuple[float, object]]:
    return [(plan.step_s, plan.plan) for _, plan in ranking]


@pytest.mark.parametrize("share", [0.9, 2.0])
def test_what_was_found_before_is_found_once_and_changes_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mesh] = []
    within_limit = short_memory.fastest_within_limit

    def noted(owner: Task, joint: JointSearch, useless_from_s: float) -> PricedPlan | Shortage:
        asked.append(joint.fastest.problem.mesh)
        return within_limit(owner, joint, useless_from_s)

    monkeypatch.setattr(short_memory, "fastest_within_limit", noted)
    one = task("mlp", share)
    *_, alone = [[], *search_of(one, "mlp").plans(math.inf)]
    asked_alone = [asked.pop() for _ in list(asked)]
    search = search_of(one, "mlp")
    first_s = search.first_s(math.inf, math.inf)
    assert len(asked) == 1
    *_, later = [[], *search.plans(math.inf)]
    assert told(later) == told(alone)
    assert asked[::-1] == asked_alone
    assert all(first_s >= step_s for step_s, _ in told(later)[:1])


def test_nothing_is_looked_for_that_a_rival_beats_even_by_the_bound() -> None:
    search = search_of(task("mlp"), "mlp")
    assert search.first_s(0.0, math.inf) == math.inf
    assert not search.faster
    assert search.first_s(math.inf, math.inf) < math.inf
    assert search.first_s(math.inf, math.inf) == math.inf, "what was looked at is not looked at again"


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "moe"))])
def test_the_chosen_plan_is_the_same_where_nothing_bounds_pipelines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_mesh = best_plans.search_strategies
    monkeypatch.setattr(best_plans, "MANY_RANKS", 1)
    monkeypatch.setattr(best_plans, "search_strategies", lambda task: (on_one_mesh(task)[0], True))
    monkeypatch.setattr(best_plans, "least_bytes", lambda _: (1.0, 2.0))
    bounded = search_plans(task(name), batch_of(name))
    monkeypatch.setattr(ShortMemorySearch, "first_s", lambda *_: math.inf)
    free = search_plans(task(name), batch_of(name))
    assert told(bounded)[0] == told(free)[0]


@pytest.mark.parametrize(
    ("estimate_s", "order"), [(math.inf, ["one mesh", "pipelines"]), (0.0, ["pipelines", "one mesh"])]
)
def test_one_mesh_goes_first_where_its_bound_beats_what_cuts_within_memory_may_give(
    estimate_s: float, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, looked_for = task("mlp"), list[str]()
    monkeypatch.setattr(best_plans, "MANY_RANKS", 1)
    monkeypatch.setattr(best_plans, "search_strategies", lambda _: ([], True))
    monkeypatch.setattr(best_plans, "fewer_ranks", lambda _: [])
    monkeypatch.setattr(best_plans, "least_bytes", lambda _: (1.0, 2.0))
    monkeypatch.setattr(PipelineSearch, "estimate_s", lambda *_: estimate_s)
    for kind, name in ((ShortMemorySearch, "one mesh"), (PipelineSearch, "pipelines")):
        monkeypatch.setattr(kind, "plans", lambda self, best_s, name=name: iter(looked_for.append(name) or ()))
    search_plans(one, batch_of("mlp"))
    assert looked_for == order


def test_one_mesh_goes_first_where_experts_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that holds more than rests has pipelines looked for first on many ranks, unless the model has experts."""
    monkeypatch.setattr(best_plans, "MANY_RANKS", 1)
    monkeypatch.setattr(best_plans, "least_bytes", lambda _: (1.0, 2.0))
    assert best_plans._pipelines_first(task("mlp"))
    monkeypatch.setattr(best_plans, "numbers_of_experts", lambda *_: {8})
    assert not best_plans._pipelines_first(task("mlp"))


def test_where_no_plan_fits_in_one_order_none_is_looked_for_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    one = task("mlp", 0.4)
    search = search_of(one, "mlp")
    monkeypatch.setattr(search, "_could_fit", lambda _: True)
    assert list(search.plans(math.inf)) == []
    assert {M for _, M, _ in search.without_room} >= {1, 2}
    monkeypatch.setattr(short_memory, "fastest_within_limit", lambda *_: pytest.fail("it is known not to fit"))
    again = ShortMemorySearch(search.tasks, search.without_room)
    monkeypatch.setattr(again, "_could_fit", lambda _: True)
    assert list(again.plans(math.inf)) == []


@pytest.mark.parametrize(("least", "clear"), [(2.0, True), (1.1, False)])
def test_where_a_count_has_no_room_for_clear_fewer_are_not_asked(
    least: float, clear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finer mesh begins below the first count that fits on a first one, 8, with the largest of them. What two microbatches hold
    beside sums of gradients, one has without. least: bytes of the smallest plan as a share of the limit, most for a moment."""
    one = task("mlp")
    search, meshes = search_of(one, "mlp"), [Mesh.of(dp=2), Mesh.of(tp=2)]
    search._meshes, search._finer = ([(mesh, joint_on(one, mesh))] for mesh in meshes)
    asked = asked_where_eight_fit(search, monkeypatch, least)
    counts = [[M for at, M in asked if at == mesh] for mesh in meshes]
    assert counts == [[1, 2, 4, 8], [4, 1, 8] if clear else [4, 2, 1, 8]]


def test_the_first_meshes_take_turns_until_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh is asked for ever more microbatches before the others were asked for fewer."""
    one = task("mlp")
    search, (dp, tp) = search_of(one, "mlp"), (Mesh.of(dp=2), Mesh.of(tp=2))
    search._meshes, search._finer = [(mesh, joint_on(one, mesh)) for mesh in (dp, tp)], []
    asked = asked_where_eight_fit(search, monkeypatch)
    assert asked == [(mesh, M) for M in (1, 2, 4, 8) for mesh in (dp, tp)]


def test_once_a_mesh_has_room_the_likeliest_of_first_and_finer_meshes_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good plan on a finer mesh leaves fewer questions to the first meshes, as theirs to it."""
    one, orders = task("mlp"), list[list[Mesh]]()
    search, (dp, tp, cp) = search_of(one, "mlp"), (Mesh.of(dp=2), Mesh.of(tp=2), Mesh.of(cp=2))
    search._meshes, search._finer = [(mesh, joint_on(one, mesh)) for mesh in (dp, tp)], [(cp, joint_on(one, cp))]

    def last_first(
        _: ShortMemorySearch, meshes: list[tuple[Mesh, JointSearch]], offload: frozenset[str]
    ) -> list[tuple[Mesh, JointSearch]]:
        orders.append([mesh for mesh, _ in meshes])
        return meshes[::-1]

    monkeypatch.setattr(ShortMemorySearch, "_likeliest_first", last_first)
    asked = asked_where_eight_fit(search, monkeypatch)
    assert orders == [[tp, cp]]
    assert list(dict.fromkeys(mesh for mesh, M in asked if M == 8)) == [dp, cp, tp]


def asked_where_eight_fit(
    search: ShortMemorySearch, monkeypatch: pytest.MonkeyPatch, least: float = 1.1
) -> list[tuple[Mesh, int]]:
    """The meshes and counts that a search asks for plans on, in order, where eight microbatches have room on every mesh, and
    fewer have none. least: bytes of the smallest plan as a share of the limit."""
    asked: list[tuple[Mesh, int]] = []

    def of_eight(one: Task, joint: JointSearch, useless_from_s: float) -> PricedPlan | Shortage:
        asked.append((joint.fastest.problem.mesh, one.setting.microbatches))
        if one.setting.microbatches < 8:
            return Shortage(least * one.limit, ())
        return one.finish(candidate_at(one, joint.fastest, joint.fastest.seconds))

    monkeypatch.setattr(short_memory, "fastest_within_limit", of_eight)
    monkeypatch.setattr(ShortMemorySearch, "_may_win", lambda *_: True)
    list(search.plans(math.inf))
    return asked


@pytest.mark.parametrize(("without_room", "looked_at"), [((), [1, 2]), ((1, 2), [1, 2, 4])])
def test_after_a_count_that_does_not_win_one_that_takes_more_is_the_end(
    without_room: tuple[int, ...], looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two microbatches take least at the price of a byte. Where they have no room, more may have."""
    at_price_s, asked = {1: 5.0, 2: 4.0, 4: 6.0, 8: 7.0}, list[int]()

    def plan(search: ShortMemorySearch, one: Task, joint: JointSearch, question: Question) -> Shortage | None:
        asked.append(question[1])
        return Shortage(math.inf, ()) if question[1] in without_room else None

    monkeypatch.setattr(ShortMemorySearch, "_at_price_s", lambda _, one, joint: at_price_s[one.setting.microbatches])
    monkeypatch.setattr(ShortMemorySearch, "_may_win", lambda *_: True)
    monkeypatch.setattr(ShortMemorySearch, "_plan", plan)
    one = task("mlp")
    search = search_of(one, "mlp")
    search._meshes = [(Mesh.of(dp=2), joint_on(one, Mesh.of(dp=2)))]
    assert list(search.plans(math.inf)) == []
    assert asked == looked_at


def test_the_mesh_that_is_likely_to_win_goes_first_and_its_search_is_begun_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, begun = task("mlp"), list[tuple[Mesh, int]]()
    meshes = [Mesh.of(dp=2), Mesh.of(tp=2)]
    pairs = [(mesh, joint_on(one, mesh)) for mesh in meshes]

    def noted(owner: Task, mesh: Mesh, **changes: object) -> JointSearch:
        begun.append((mesh, owner.setting.microbatches))
        return joint_on(owner, mesh)

    monkeypatch.setattr(short_memory, "joint_on", noted)
    monkeypatch.setattr(
        ShortMemorySearch, "_at_price_s", lambda _, one, joint: float(joint.fastest.problem.mesh == meshes[0])
    )
    monkeypatch.setattr(ShortMemorySearch, "_plan", lambda *_: None)
    search, natural = search_of(one, "mlp"), frozenset[str]()
    assert search._likeliest_first(pairs, natural) == pairs, "before a plan fits nothing is known"
    search._first_count[natural], search.byte_price = search.counts.index(2), 1e-12
    assert [mesh for mesh, _ in search._likeliest_first(pairs, natural)] == meshes[::-1]
    list(search._look_on(*pairs[1], natural))
    assert begun.count((meshes[1], 2)) == 1


@pytest.mark.parametrize("M", [1, 2])
def test_a_count_could_fit_where_a_plan_does(M: int) -> None:
    one = TasksByCount(task("mlp"), batch_of("mlp")).at(M)
    joint = joint_on(one, Mesh.of(dp=2))
    peak = account_of(smallest(one, candidate_at(one, joint.smallest(), 0.0))).peak_bytes
    for share, fits in ((1.0, True), (0.6, False)):
        bounded = one.changed(options=replace(one.options, memory_bytes=share * peak))
        assert search_of(bounded, "mlp")._could_fit(bounded) == fits


@pytest.mark.slow
@pytest.mark.parametrize("faster", [0.9, 0.97, 1.0])
def test_plans_slower_than_those_of_another_kind_bound_only_what_does_not_win(
    faster: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faster: the seconds of a plan of another kind, as a share of those of the best plan on one mesh."""
    *_, best = search_of(task("mlp", 0.46), "mlp").plans(math.inf)
    to_beat_s = faster * best[0][1].step_s
    bounded = search_of(task("mlp", 0.46), "mlp")
    found = [told(ranking) for ranking in bounded.plans(to_beat_s)]
    assert (bounded.byte_price > 0) == bool(bounded.faster or bounded.near)
    assert bounded.share_s <= 1
    monkeypatch.setattr(JointSearch, "bound_s", lambda *_: -math.inf)
    assert found == [told(ranking) for ranking in search_of(task("mlp", 0.46), "mlp").plans(to_beat_s)]


def test_gradients_reduced_by_microbatch_are_lowered_and_counted_as_from_scratch() -> None:
    one = TasksByCount(task("mlp"), batch_of("mlp")).at(2)
    one = one.changed(options=replace(one.options, strategy="zero3"))
    joint = joint_on(one, Mesh.of(dp=2))
    whole = one.finish(candidate_at(one, joint.fastest, joint.fastest.seconds))
    names = frozenset(one.program.trained)
    reduced = reducing(one, whole, names)
    fresh = one.finish(PricedPlan(reduced_by_microbatch(whole.plan, names), whole.solution))
    assert reduced.plan == fresh.plan != whole.plan
    assert (
        account_of(reduced).stages[0].memory == account_of(fresh).stages[0].memory != account_of(whole).stages[0].memory
    )
    assert account_of(reduced).step == account_of(fresh).step != account_of(whole).step
    assert reduced.lowered is not None
    assert fresh.lowered is not None
    ours, theirs = reduced.lowered.stages[0], fresh.lowered.stages[0]
    assert (ours.parameters, ours.backward) == (theirs.parameters, theirs.backward)


def test_what_an_op_reads_and_makes_keeps_to_its_room() -> None:
    """Held to less than the largest op of the fastest plan reads and makes, a problem has none of the choices that need more, and
    all others. No plan peaks below what its largest op needs."""
    one = task("mlp")
    joint = joint_on(one, Mesh.of(dp=2))
    free = joint.fastest.problem
    largest = free.largest_moment_bytes(joint.fastest.choice)
    assert 0 < largest <= account_of(one.finish(candidate_at(one, joint.fastest, 0.0))).peak_bytes
    bounded = joint_on(one, Mesh.of(dp=2), room_bytes=0.99 * largest)
    held = bounded.fastest.problem
    assert held.largest_moment_bytes(bounded.fastest.choice) < largest
    fewer = [(len(a), len(b)) for a, b in zip(free.graph.states, held.graph.states, strict=True)]
    assert all(b <= a for a, b in fewer)
    assert any(b < a for a, b in fewer)
    assert bounded.fastest.seconds >= joint.fastest.seconds
