"""The benchmark that holds today's plans beside an older commit's: what it calls worse, and what is no rival."""

from __future__ import annotations

import dataclasses
import math

import pytest

import autopar
from benchmarks import no_worse
from benchmarks.sameness import of_zoo


def in_two_stages() -> autopar.ParallelProgram:
    """A program under a plan that the search would not choose."""
    return of_zoo("mlp", 2, pp=2, microbatches=2)


def test_a_plan_beside_itself_is_as_good() -> None:
    program = of_zoo("mlp", 2)
    entry = no_worse.compared(program, no_worse.recorded(program))
    assert entry["ratio"] == 1.0
    assert entry["today"] == entry["older"]
    assert no_worse.summary({"mlp": entry})["worse"] == []


@pytest.mark.slow
def test_both_plans_are_priced_by_the_account_of_today() -> None:
    today, older = of_zoo("mlp", 2), in_two_stages()
    entry = no_worse.compared(today, no_worse.recorded(older))
    assert entry["ratio"] == today.predicted.step_time_s / older.predicted.step_time_s
    assert entry["ratio"] < 1


def test_a_plan_that_is_slower_than_the_older_one_is_worse() -> None:
    entry = no_worse.compared(in_two_stages(), no_worse.recorded(of_zoo("mlp", 2)))
    assert entry["ratio"] > 1
    assert no_worse.summary({"mlp": entry})["worse"] == ["mlp"]


def test_an_older_plan_that_takes_too_many_bytes_is_no_rival() -> None:
    small = of_zoo("mlp", 2, strategy="zero3")
    short = dataclasses.replace(small.options, memory_bytes=small.predicted.peak_bytes)
    limited = dataclasses.replace(small, request=dataclasses.replace(small.request, options=short))
    entry = no_worse.compared(limited, no_worse.recorded(of_zoo("mlp", 2, strategy="dp")))
    assert "memory limit" in entry["no_rival"]
    assert no_worse.summary({"mlp": entry})["with_rival"] == 0


def test_a_plan_that_the_options_do_not_leave_is_no_rival() -> None:
    sharded, whole = of_zoo("mlp", 2, strategy="zero3"), of_zoo("mlp", 2, strategy="dp")
    entry = no_worse.compared(sharded, no_worse.recorded(whole))
    assert "zero3" in entry["no_rival"]
    assert no_worse.compared(whole, no_worse.recorded(whole))["no_rival"] == ""


def test_a_plan_for_a_cluster_as_it_was_described_before_is_replayed_on_it_as_it_is_now() -> None:
    program = of_zoo("mlp", 2)
    older = no_worse.recorded(program)
    older["plan"]["cluster"] = "another"
    assert no_worse.compared(program, older)["ratio"] == 1.0


def test_a_case_that_only_one_commit_plans_says_so() -> None:
    program = of_zoo("mlp", 2)
    newly = no_worse.compared(program, no_worse.recorded("InfeasibleError: too large"))
    assert newly == {"ratio": None, "no_rival": "InfeasibleError: too large"}
    lost = no_worse.compared("InfeasibleError: too large", no_worse.recorded(program))
    assert lost["ratio"] == math.inf
    counts = no_worse.summary({"newly": newly, "lost": lost})
    assert (counts["cases"], counts["with_rival"], counts["worse"]) == (2, 1, ["lost"])


def test_there_are_forty_cases_and_more() -> None:
    assert len(no_worse.searched_cases()) >= 40
