"""Recompute call by call: the first calls of a template recompute, the others less; the step and the peak are between."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

import autopar
from autopar import Plan
from autopar.errors import PlanError
from autopar.exchange.from_plan import layout_of
from autopar.passes.lower.cut import cut
from autopar.passes.lower.first_calls import first_calls_apart
from autopar.passes.rules.recomputation import made_forward
from autopar.plan import TemplatePlan
from autopar.report.facts import facts
from tests.measure import measure_peak
from tests.passes.recompute.recomputed import llama_on, with_policy
from tests.zoo.models import BY_NAME, MODELS
from tests.zoo.pipelined import assert_right, batch_of, on_ranks


def in_first(plan: Plan, program: autopar.Program, calls: int) -> Plan:
    """The plan with its recompute in so many first calls of every template that is called more often."""
    return every(plan, program, lambda name, t, times: replace(t, recompute_calls=calls if calls < times else None))


def every(plan: Plan, program: autopar.Program, change: Callable[[str, TemplatePlan, int], TemplatePlan]) -> Plan:
    """The plan with its templates changed. change: of a template's name, plan, and calls in the stage that have a backward."""
    stages = []
    for part, stage in zip(cut(program.ir, [stage.calls for stage in plan.stages]), plan.stages, strict=True):
        times = Counter(part.calls[i].template for i in part.backward_calls)
        templates = {n: change(n, t, times[n]) if times[n] else t for n, t in stage.templates.items()}
        stages.append(replace(stage, templates=templates))
    return replace(plan, stages=tuple(stages))


def with_random_first_calls(program: autopar.Program, plan: Plan, seed: int) -> Plan:
    """The plan with two random sets of values for the calls of every template, from a random call on the second."""
    rng = random.Random(seed)

    def change(name: str, template: TemplatePlan, times: int) -> TemplatePlan:
        made = sorted(made_forward(program.ir.templates[name]))
        first, after = (tuple(v for v in made if rng.random() < share) for share in (0.7, 0.3))
        return replace(template, recompute=first, recompute_calls=rng.randint(1, times), recompute_after=after)

    return every(plan, program, change)


# --- the same numbers, and the bytes that were promised -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pp", "schedule"),
    [
        ("vit", 2, "zb-h1"),
        *(pytest.param(zoo.name, 1, None, marks=pytest.mark.slow) for zoo in MODELS),
        *(pytest.param(zoo.name, 2, "1f1b", marks=pytest.mark.slow) for zoo in MODELS),
    ],
)
def test_any_first_calls_equal_one_device(name: str, pp: int, schedule: str | None) -> None:
    program = on_ranks(name, 4, 4)
    try:
        plan = autopar.random_plan(program, pp, pp, schedule)
    except PlanError:
        pytest.skip(f"{name} has too few places to cut")
    assert_right(program.with_plan(with_random_first_calls(program, plan, pp)), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "moe", "bert"])
def test_every_call_more_holds_less_as_a_running_program_does(name: str) -> None:
    program = on_ranks(name, 2, 4)
    full = with_policy(program, autopar.random_plan(program, 1, pp=1), "full")
    most = max(Counter(program.ir.calls[i].template for i in program.ir.backward_calls).values())
    held = []
    for calls in range(1, most + 1):
        made = program.with_plan(in_first(full, program, calls))
        measured = max(measure_peak(made, batch_of(BY_NAME[name], 8, seed=1)))
        assert made.predicted.peak_bytes / 1.05 <= measured <= made.predicted.peak_bytes * 1.02
        held.append(made.account.stages[0].memory.actions["F"].after)
    assert most > 1
    assert all(more > less for more, less in pairwise(held))


# --- as many calls as just fit ------------------------------------------------------------------------------------------


ON_ONE_MESH = (("mesh", (("dp", 4),)), ("pp", 1), ("microbatches", 1))
IN_STAGES = (("pp", 2), ("microbatches", 4), ("schedule", "1f1b"), ("chunks", 1))
SHARES = {ON_ONE_MESH: 0.42, IN_STAGES: 0.65}
"""The bytes that are given, of those of the fastest plan that keeps everything."""


@functools.cache
def llama(asked: tuple[tuple[str, object], ...], short: bool) -> autopar.Program:
    """A llama of six layers on four ranks; short: of memory, which is a share of what keeping everything takes."""
    options = {name: dict(value) if name == "mesh" else value for name, value in asked}  # type: ignore[call-overload]
    if not short:
        return llama_on(layers=6, recompute="none", **options)
    limit = SHARES[asked] * llama(asked, False).predicted.peak_bytes
    return llama_on(layers=6, memory_bytes=limit, **options)


def split(plan: Plan, change: Callable[[TemplatePlan], TemplatePlan]) -> Plan:
    """The plan with the templates changed whose first calls recompute otherwise than the others."""
    stages = (
        replace(s, templates={n: t if t.recompute_calls is None else change(t) for n, t in s.templates.items()})
        for s in plan.stages
    )
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    "asked", [ON_ONE_MESH, pytest.param(IN_STAGES, marks=pytest.mark.slow)], ids=["one mesh", "stages"]
)
def test_as_few_calls_recompute_as_fit_and_the_step_is_between(asked: tuple[tuple[str, object], ...]) -> None:
    roomy, made = llama(asked, False), llama(asked, True)
    limit = SHARES[asked] * roomy.predicted.peak_bytes
    assert any(t.recompute_calls for stage in made.plan.stages for t in stage.templates.values())
    all_calls = roomy.with_plan(split(made.plan, lambda t: replace(t, recompute_calls=None, recompute_after=())))
    no_calls = split(
        made.plan, lambda t: replace(t, recompute=t.recompute_after, recompute_calls=None, recompute_after=())
    )
    none = roomy.with_plan(no_calls)
    assert none.predicted.step_time_s < made.predicted.step_time_s < all_calls.predicted.step_time_s
    assert all_calls.predicted.peak_bytes < made.predicted.peak_bytes <= limit < none.predicted.peak_bytes


def test_one_call_fewer_does_not_fit() -> None:
    roomy, made = llama(ON_ONE_MESH, False), llama(ON_ONE_MESH, True)
    fewer = roomy.with_plan(split(made.plan, lambda t: replace(t, recompute_calls=(t.recompute_calls or 2) - 1)))
    assert fewer.predicted.peak_bytes > SHARES[ON_ONE_MESH] * roomy.predicted.peak_bytes


# --- plans --------------------------------------------------------------------------------------------------------------


def test_a_plan_says_it_in_its_file_and_absent_means_all_calls() -> None:
    plan = llama(ON_ONE_MESH, True).plan
    data = json.loads(plan.to_json())
    assert Plan.from_dict(data) == plan
    written = data["stages"][0]["templates"]
    assert written["blocks"]["recompute_calls"] == plan.stages[0].templates["blocks"].recompute_calls
    assert all("recompute_calls" not in t for n, t in written.items() if n != "blocks")
    written["blocks"]["recompute_calls"] = 0
    with pytest.raises(PlanError, match=r"recompute_calls must be a whole number from 1"):
        Plan.from_dict(data)


def test_more_first_calls_than_a_stage_has_are_refused() -> None:
    made = llama(ON_ONE_MESH, True)
    with pytest.raises(PlanError, match=r"first 7 calls of blocks, and of calls 0 to \d+ 6 are that"):
        made.with_plan(split(made.plan, lambda t: replace(t, recompute_calls=7)))


def test_the_calls_apart_are_of_the_same_block_and_the_emitted_file_names_both() -> None:
    made = llama(ON_ONE_MESH, True)
    program, stage = first_calls_apart(made.ir, made.plan.stages[0])
    block, first = program.templates["blocks"], program.templates["blocks_first"]
    assert first.graph is block.graph
    assert stage.templates["blocks"].recompute == made.plan.stages[0].templates["blocks"].recompute_after
    assert first_calls_apart(made.ir, made.plan.stages[0])[0].templates["blocks_first"] is first
    assert program.multiplicity["blocks_first"] == made.plan.stages[0].templates["blocks"].recompute_calls
    assert "def blocks_first_backward(" in made.sources[0]
    assert "def blocks_backward(" in made.sources[0]
    assert [call.template for call in facts(made).calls] == [call.template for call in program.calls]


def test_megatron_is_told_the_layers_that_recompute() -> None:
    made = llama(ON_ONE_MESH, True)
    full = with_policy(made, split(made.plan, lambda t: replace(t, recompute_calls=None, recompute_after=())), "full")
    layout, _ = layout_of(made.with_plan(in_first(full, made, 2)))
    assert (layout.recompute, layout.recompute_layers) == ("full", 2)
    assert layout_of(made.with_plan(full))[0].recompute_layers is None
    layout, lost = layout_of(made)
    assert layout.recompute_layers is None
    assert any("first calls of a block" in one.what for one in lost)
