"""The laws of the search: no forced plan beats its choice, more never costs time, order never matters; and their benchmark."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import ClusterSpec
from benchmarks import no_worse, properties, properties_drawn
from benchmarks.properties_cases import CHOICE, WORKLOADS, Place, cluster_at, mixed, slower_devices, slower_links
from benchmarks.sameness import of_zoo

AS_GOOD = 1 + 1e-9


def line(case: str, kind: str, step_s: float, ranks: int = 4, **fields: Any) -> dict[str, Any]:
    """A line of the benchmark's file. case: "where: question"."""
    where, question = case.split(": ")
    given = {
        "options": {question: 1},
        "fits": True,
        "left_out": [],
        "bound_s": 0.0,
        "plan": "",
        "family": "dense",
        "workload": where.split()[0],
    }
    return {
        "case": case,
        "where": where,
        "kind": kind,
        "question": question,
        "step_s": step_s,
        "place": ["h100", ranks],
        **given,
        **fields,
    }


def ratios(lines: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(law["law"], law["case"]): law["ratio"] for law in properties.broken_laws(lines)}


# --- what the benchmark calls broken


def test_a_forced_plan_that_beats_the_choice_is_regretted() -> None:
    lines = [line("a on 4: choice", "choice", 1.1), line("a on 4: tp=2", "forced", 1.0)]
    found = properties.summary(lines)
    assert found["all"]["worst"] == pytest.approx(1.1)
    assert list(found["regretted"]) == ["a on 4: tp=2"]
    assert not found["holds"]


def test_a_forced_plan_that_does_not_fit_is_no_rival() -> None:
    lines = [line("a on 4: choice", "choice", 1.1), line("a on 4: tp=2", "forced", 1.0, fits=False)]
    assert properties.summary(lines)["all"] == {"cases": 0}


def test_where_the_choice_was_refused_any_forced_plan_beats_it() -> None:
    refused = {k: v for k, v in line("a on 4: choice", "choice", 0.0).items() if k != "step_s"}
    [entry] = properties.regrets([refused, line("a on 4: tp=2", "forced", 1.0)])
    assert entry["ratio"] == math.inf


def test_less_must_not_be_faster_and_order_must_not_matter() -> None:
    lines = [
        line("a on 4: choice", "choice", 1.0),
        line("a on 4: slower links", "slower", 0.8),
        line("a on 4: memory 70%", "less memory", 1.25),
        line("a on 4: workers=2", "same", 0.5),
        line("a on 4: tp=2", "forced", 4.0, options={"mesh": {"tp": 2}}),
        line("a on 4: axes of other names", "same as tp=2", 1.0),
        line("a on 4: megatron tp=2", "forced", 3.0, options={"mesh": {"tp": 2}, "strategy": "megatron"}),
    ]
    assert ratios(lines) == {
        ("slower", "a on 4: slower links"): 1.25,
        ("less memory", "a on 4: memory 70%"): 0.8,
        ("same", "a on 4: workers=2"): 2.0,
        ("same", "a on 4: axes of other names"): 4.0,
        ("more options", "a on 4: megatron tp=2"): 4 / 3,
    }


def test_more_devices_must_not_be_slower() -> None:
    steps_s = {2: 1.0, 4: 0.5, 8: 0.75}
    lines = [line(f"a on {n}: choice", "choice", s, n) for n, s in steps_s.items()]
    assert ratios(lines) == {("more devices", "a on 2: choice"): 0.5, ("more devices", "a on 4: choice"): 1.5}


def test_an_early_end_must_name_a_bound_that_no_plan_is_below() -> None:
    lines = [
        line("a on 4: choice", "choice", 1.0),
        line("a on 4: tp=2", "forced", 0.5),
        line("a on 4: search_s=0", "ended early", 2.0, bound_s=1.0, left_out=["pipelines"]),
        line("a on 4: search_s=1", "ended early", 2.0, fits=False),
    ]
    found = ratios(lines)
    assert found["ended early", "a on 4: search_s=0"] == 2.0
    assert found["ended early", "a on 4: search_s=1"] == math.inf


def test_cases_that_a_file_has_are_not_run_again_and_each_has_its_choice() -> None:
    cases = properties.all_cases()
    assert len({case.name for case in cases}) == len(cases) > 2000
    first = properties.wanted(cases, set(), "", "forced", 50)
    assert sum(case.question.kind == "forced" for case in first) == 50
    assert {case.where for case in first} == {case.where for case in first if case.question == CHOICE}
    again = properties.wanted(cases, {case.name for case in first}, "", "forced", 50)
    assert not {case.name for case in first} & {case.name for case in again}


def test_more_devices_of_a_family_have_fewer_ones_of_it_among_them() -> None:
    for workload in WORKLOADS.values():
        for place in workload.places:
            cluster = cluster_at(place)
            assert cluster.size == place.ranks
            assert {device for _, device in cluster.devices} == {
                device for _, device in cluster_at(Place(place.family, workload.places[-1].ranks)).devices
            } or place.family != workload.places[-1].family


@pytest.mark.slow
def test_a_workload_gives_a_line_for_every_question_and_shares_its_capture(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    names = [f"bags on 2 h100: {question}" for question in ("choice", "dp=2", "strategy=zero3", "memory 85%")]
    properties.run_workload(names, out, math.inf)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [one["case"] for one in lines] == names
    assert all("step_s" in one or "refused" in one for one in lines)
    assert [one["kind"] for one in properties.regrets(lines)] == ["forced"] * 2


# --- the laws, of small models


H100_4 = cluster_at(Place("h100", 4))
FORCED: dict[str, dict[str, Any]] = {
    "tp=2": {"mesh": {"dp": 2, "tp": 2}},
    "zero1": {"strategy": "zero1"},
    "two stages": {"pp": 2, "microbatches": 2},
    "two stages in one microbatch": {"pp": 2, "microbatches": 1},
}
LARGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "moe", "t5", "resnet", "recommender")]


@pytest.fixture(scope="module", params=["mlp", *LARGER])
def chosen(request: pytest.FixtureRequest) -> autopar.ParallelProgram:
    return of_zoo(request.param, H100_4)


def again(program: autopar.ParallelProgram, cluster: ClusterSpec, **options: Any) -> autopar.ParallelProgram:
    """The same program elsewhere, under other options."""
    return program.compile_again(replace(program.request, cluster=cluster, options=replace(program.options, **options)))


def step_s(program: autopar.ParallelProgram, cluster: ClusterSpec = H100_4, **options: Any) -> float:
    """Seconds of a step of the plan for the same program elsewhere, under other options."""
    return again(program, cluster, **options).predicted.step_time_s


def test_no_forced_plan_beats_the_choice(chosen: autopar.ParallelProgram) -> None:
    for options in FORCED.values():
        with suppress(autopar.CoupledError):  # statistics of a batch leave one microbatch
            assert chosen.predicted.step_time_s <= AS_GOOD * step_s(chosen, **options), options


@pytest.mark.slow
def test_slower_links_are_no_faster(chosen: autopar.ParallelProgram) -> None:
    assert chosen.predicted.step_time_s <= AS_GOOD * step_s(chosen, slower_links(H100_4))


@pytest.mark.slow
def test_slower_devices_less_memory_and_fewer_devices_are_no_faster(chosen: autopar.ParallelProgram) -> None:
    others = {
        "slower devices": step_s(chosen, slower_devices(H100_4)),
        "less memory": step_s(chosen, memory_bytes=0.9 * chosen.predicted.peak_bytes),
        "fewer devices": step_s(chosen, cluster_at(Place("h100", 2))),
    }
    assert {name: s for name, s in others.items() if chosen.predicted.step_time_s > AS_GOOD * s} == {}


def test_names_of_axes_change_nothing(chosen: autopar.ParallelProgram) -> None:
    assert step_s(chosen, mesh={"dp": 2, "tp": 2}) == step_s(chosen, mesh={"a": 2, "b": 2})


def test_a_search_without_time_gives_a_plan_and_a_bound_that_no_plan_is_below(chosen: autopar.ParallelProgram) -> None:
    hasty = again(chosen, H100_4, search_s=0.0)
    assert hasty.predicted.peak_bytes <= no_worse.limit_bytes(hasty)
    assert hasty.predicted.step_time_s * (1 - hasty.solver.gap) <= AS_GOOD * chosen.predicted.step_time_s


@pytest.mark.slow
def test_the_order_in_which_machines_are_listed_changes_nothing() -> None:
    forth, back = mixed(4), mixed(4, backwards=True)
    program = of_zoo("mlp", forth)
    assert program.predicted.step_time_s == pytest.approx(step_s(program, back), rel=1e-9)


def test_drawn_cases_are_those_of_their_seed_and_ask_for_options_that_there_are() -> None:
    cases, again, others = (properties.all_cases(seed) for seed in (1, 1, 2))
    assert [case.question.options for case in cases] == [case.question.options for case in again]
    assert [case.name for case in cases] != [case.name for case in others]
    for case in cases:
        size = cluster_at(case.place).size
        options = autopar.Options(**case.question.options)
        assert math.prod((options.mesh or {}).values()) * (options.pp or 1) in (size, options.pp or 1)
    forced = {key for case in cases for key in case.question.options}
    assert forced == {"pp", "schedule", "mesh", "strategy", "recompute", "microbatches", "overlap", "order"}


def test_cases_of_a_workload_stay_in_the_order_of_their_list() -> None:
    cases = properties.all_cases(1)
    names = [*dict.fromkeys(case.workload.name for case in properties.wanted(cases, set(), "", "choice", None))]
    assert names == [*properties_drawn.WORKLOADS]


def test_a_crash_is_a_line_and_no_law_holds_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(_: Any) -> autopar.ParallelProgram:
        raise KeyError("lost")

    case = properties.all_cases()[0]
    request: Any = None
    told, compiled = properties.answered(case, request, crashes)
    assert told["crashed"] == "KeyError: 'lost'"
    assert compiled is crashes
    assert not properties.summary([told])["holds"]
    assert properties.summary([])["holds"]
