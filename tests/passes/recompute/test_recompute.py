"""Recompute: what is kept and made again is chosen as brute force would, computes the same, and fits where it must."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

import autopar
from autopar import ParallelProgram, Plan
from autopar.errors import PlanError
from autopar.ir.memory_levers import RECOMPUTE_POLICIES
from autopar.passes.price.pricer import Pricer
from autopar.passes.recompute.choose import Choice, hull, of_values, settle, within
from autopar.passes.recompute.problem import Item, RecomputeProblem, recompute_problem
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.recomputation import recomputation
from tests.passes.recompute.recomputed import llama_on, with_random_recompute
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.pipelined import assert_right, on_ranks
from tests.zoo.programs import compiled_zoo

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)
SLACK = 1e-5


# --- one template -------------------------------------------------------------------------------------------------------


def random_problem(rng: random.Random, count: int) -> RecomputeProblem:
    """A random graph: inputs that are kept, views that are not, ops of any price."""
    items: list[Item] = []
    for i in range(count):
        operands = tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2)))))
        source = not operands
        view = not source and rng.random() < 0.2
        items.append(
            Item(
                f"v{i}",
                f"v{i}",
                math.inf if view else float(rng.randint(1, 9)),
                math.inf if source else 0.0 if view else float(rng.randint(0, 9)),
                operands,
            )
        )
    return RecomputeProblem(tuple(items), frozenset(rng.sample(range(count), rng.randint(1, count))))


def every_choice(problem: RecomputeProblem) -> list[Choice]:
    movable = [i for i, item in enumerate(problem.items) if math.isfinite(item.again_s)]
    found = []
    for picked in itertools.product([False, True], repeat=len(movable)):
        choice = settle(problem, {i for i, p in zip(movable, picked, strict=True) if p})
        if choice is not None:
            found.append(choice)
    return found


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", range(40))
def test_the_choice_within_a_budget_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 9))
    every = every_choice(problem)
    for budget in range(0, 40, 3):
        fitting = [c.again_s for c in every if c.bytes_kept <= budget]
        found = within(problem, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.bytes_kept <= budget
            assert found.again_s == min(fitting)


@pytest.mark.parametrize("seed", range(40))
def test_the_curve_is_the_lower_hull_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 9))
    every, corners = every_choice(problem), hull(problem)
    for price in (0.0, 0.05, 0.3, 0.7, 1.0, 1.7, 4.0, 50.0):
        best = min(c.again_s + price * c.bytes_kept for c in every)
        assert min(c.again_s + price * c.bytes_kept for c in corners) == pytest.approx(best, rel=SLACK)
    assert [c.bytes_kept for c in corners] == sorted({c.bytes_kept for c in corners}, reverse=True)


@functools.cache
def trained(name: str) -> ParallelProgram:
    zoo = BY_NAME[name]
    return compiled_zoo(zoo, 4, options=autopar.Options(pp=1))


def problems(name: str) -> Iterator[tuple[str, RecomputeProblem]]:
    program = trained(name)
    stage = program.plan.stages[0]
    pricer = Pricer(program.cluster, stage.mesh)
    for template in program.ir.templates.values():
        if template.differentiable:
            call = next(c for c in program.ir.calls if c.template == template.name)
            stored = {p: stage.parameters[given] for p, given in zip(template.params, call.params, strict=True)}
            yield (
                template.name,
                recompute_problem(template, stage.templates[template.name], stored, pricer, program.rules),
            )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "moe"])
def test_at_the_bytes_of_any_policy_no_policy_is_faster(name: str) -> None:
    for template, problem in problems(name):
        for policy in RECOMPUTE_POLICIES:
            theirs = of_values(problem, policy_set(trained(name).ir.templates[template], policy))
            ours = within(problem, theirs.bytes_kept)
            assert ours is not None
            assert ours.again_s <= theirs.again_s * (1 + SLACK)


@pytest.mark.slow
def test_keeping_everything_makes_nothing_again() -> None:
    for template, problem in problems("llama"):
        assert of_values(problem, ()).again_s == 0.0
        assert hull(problem)[0].again_s == 0.0, template


def test_full_keeps_the_inputs_of_a_block_alone() -> None:
    block = next(t for t in trained("llama").ir.templates.values() if "blocks" in t.name)
    kept = recomputation(block, flow(block), policy_set(block, "full")).kept
    assert set(kept) <= set(block.inputs)
    assert recomputation(block, flow(block), ()).again == frozenset()


# --- the same numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_any_recompute_under_any_plan_equals_one_device(zoo: ZooModel, share: float) -> None:
    program = on_ranks(zoo.name, 4, 1)
    seed = round(10 * share)
    made = program.with_plan(with_random_recompute(program, autopar.random_plan(program, seed, pp=1), seed, share))
    assert_right(made, zoo.name)


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize(("pp", "schedule"), [(2, "zb-h1"), (2, "zb-v"), (3, "1f1b")])
def test_pipelines_recompute_too_with_b_and_w_apart_or_not(zoo: ZooModel, pp: int, schedule: str) -> None:
    program = on_ranks(zoo.name, 4, 4)
    try:
        plan = autopar.random_plan(program, pp, pp, schedule)
    except PlanError:
        pytest.skip(f"{zoo.name} has too few places to cut")
    assert_right(program.with_plan(with_random_recompute(program, plan, pp, 0.7)), zoo.name)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("seed", range(20))
def test_many_random_recomputes_equal_one_device(zoo: ZooModel, seed: int) -> None:
    program = on_ranks(zoo.name, 4, 4)
    plan = with_random_recompute(program, autopar.random_plan(program, seed), seed, (seed % 5 + 1) / 5)
    assert_right(program.with_plan(plan), zoo.name)


# --- plans --------------------------------------------------------------------------------------------------------------


@functools.cache
def llama(recompute: str, share: float | None = None, **options: object) -> ParallelProgram:
    """A llama on one axis of four ranks; share: of the bytes that it needs when everything is kept."""
    given = {"mesh": {"dp": 4}, "pp": 1, **options}
    if share is not None:
        given["memory_bytes"] = share * llama("none").predicted.peak_bytes
    return llama_on(recompute=recompute, layers=3, microbatches=1, **given)


@pytest.mark.slow
def test_policies_trade_memory_for_time() -> None:
    none, selective, full = llama("none"), llama("selective"), llama("full")
    assert none.predicted.peak_bytes > selective.predicted.peak_bytes > full.predicted.peak_bytes
    assert none.predicted.step_time_s < selective.predicted.step_time_s < full.predicted.step_time_s


def test_the_solver_prices_what_lowering_runs_again() -> None:
    for policy in ("selective", "full"):
        program = llama(policy)
        assert program.predicted.step_time_s == pytest.approx(program.account.step_time_s, rel=1e-3)


def test_auto_recomputes_nothing_where_memory_is_plenty() -> None:
    assert all(not t.recompute for t in llama("auto").plan.stages[0].templates.values())


def test_auto_fits_where_keeping_everything_does_not_and_is_faster_than_full() -> None:
    share = 0.52
    limit = share * llama("none").predicted.peak_bytes
    with pytest.raises(autopar.InfeasibleError):
        llama("none", share)
    auto, full = llama("auto", share), llama("full", share)
    assert auto.predicted.peak_bytes <= limit
    assert any(t.recompute for t in auto.plan.stages[0].templates.values())
    assert auto.predicted.step_time_s < full.predicted.step_time_s


@pytest.mark.slow
def test_auto_is_no_slower_than_any_policy_that_fits() -> None:
    for share in (0.6, 0.5):
        fitting: list[ParallelProgram] = []
        for policy in ("selective", "full"):
            with suppress(autopar.InfeasibleError):
                fitting.append(llama(policy, share))
        assert fitting
        assert llama("auto", share).predicted.step_time_s <= min(p.predicted.step_time_s for p in fitting) * (1 + 1e-6)


def test_a_plan_that_recomputes_survives_a_file_and_absent_means_none() -> None:
    plan = llama("selective").plan
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    data = llama("none").plan.to_dict()
    assert all("recompute" not in t for stage in data["stages"] for t in stage["templates"].values())
    assert all(t.recompute == () for t in Plan.from_dict(data).stages[0].templates.values())


def test_the_emitted_backward_names_what_it_recomputes() -> None:
    text = llama("full").sources[0]
    start = text.index("def blocks_backward")
    backward = text[start : text.index("\ndef ", start + 1)]
    assert "# recomputed: blocks" in backward
    assert "attention.attention(" in backward
    forward = text[text.index("def blocks_forward") : start]
    assert "recomputed" not in forward


def test_a_plan_that_recomputes_what_nothing_makes_is_refused() -> None:
    program = llama("none")
    stage = program.plan.stages[0]
    name, planned = next((n, t) for n, t in stage.templates.items() if "blocks" in n)
    templates = {**stage.templates, name: replace(planned, recompute=("nothing",))}
    with pytest.raises(PlanError, match=r"recomputes .*nothing"):
        program.with_plan(replace(program.plan, stages=(replace(stage, templates=templates),)))


def test_a_policy_that_is_unknown_is_refused() -> None:
    with pytest.raises(autopar.InputError, match=r"recompute must be one of .*, got 'some'"):
        autopar.Options(recompute="some")


@pytest.mark.slow
def test_a_pipeline_recomputes_where_memory_is_short() -> None:
    asked = {"layers": 4, "pp": 2, "microbatches": 4, "schedule": "1f1b", "chunks": 1}
    limit = 0.85 * llama_on(recompute="none", **asked).predicted.peak_bytes
    auto = llama_on(recompute="auto", memory_bytes=limit, **asked)
    assert auto.pp == 2
    assert auto.predicted.peak_bytes <= limit
    assert any(t.recompute for stage in auto.plan.stages for t in stage.templates.values())
    full = llama_on(recompute="full", memory_bytes=limit, **asked)
    assert auto.predicted.step_time_s < full.predicted.step_time_s


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_pipeline_recomputes_as_it_was_told_to_however_much_memory_there_is(policy: str) -> None:
    program = llama_on(recompute=policy, layers=4, pp=2, microbatches=4, schedule="1f1b", chunks=1)
    asked = {name: set(policy_set(template, policy)) for name, template in program.ir.templates.items()}
    assert any(asked.values())
    for stage in program.plan.stages:
        assert {name: set(t.recompute) for name, t in stage.templates.items()} == {n: asked[n] for n in stage.templates}
