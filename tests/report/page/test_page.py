"""The page says what the report says, is one file that asks nothing of a network, and does not grow with depth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import autopar
from autopar.ir.text import size_text
from autopar.plan import Plan
from autopar.report import facts
from autopar.report.page import page_html
from autopar.report.page.tree import blocks
from autopar.report.page.worst import worst_bytes, worst_rows
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.data.fields import from_data, to_data
from tests.report.page.pages import Page, compiled, elements_of, figures, lanes_of


def test_every_number_is_the_reports(program: autopar.ParallelProgram) -> None:
    html, report = page_html(facts(program), program.plan), program.report()
    page, answer = Page(html), figures(html)
    assert f"predicted: step {answer['Step']}, of which" in report
    assert f"peak {answer['Peak memory']} per rank" in report
    rate = re.search(r"^rate: (.*)$", report, re.MULTILINE)
    assert rate is not None
    assert answer["Throughput"] in rate[1]
    assert rate[1].startswith(f"batch {answer['Batch']}, 32 tokens, ")
    assert rate[1].endswith(f"on {answer['Devices']} devices")
    assert ("MFU" in answer) == ("MFU" in rate[1])
    assert f"MFU {answer.get('MFU', '')}" in rate[1] or "MFU" not in answer
    time = [f"{re.sub('^[0-9]', '', name)} {amount} ({share})" for name, amount, share in page.rows("time-table")[:-1]]
    assert f"a step is {', '.join(time)}" in report.splitlines()
    memory = [f"{re.sub('^[0-9]', '', name)} {amount}" for name, amount, _ in page.rows("memory-table")[:-1]]
    assert f"per rank ({', '.join(memory)})" in report
    sent = page.rows("messages-table")
    assert len(sent) == len(re.findall(r"^  \w+ over \w+: ", report, re.MULTILINE)) > 0
    for kind, axis, times, nbytes, seconds in sent:
        assert (
            f"  {kind} over {axis}: {times.replace(',', '')} times, {nbytes} in all, {seconds}" in report.splitlines()
        )
    others = page.rows("others-table")[1:]
    assert len(others) == len(program.alternatives)
    for name, step, _, held, reason in others:
        assert f"  {name}: step {step}, {held} held; {reason}" in report.splitlines()
    *beside, (_, needed), (device, room), (left, free) = page.rows("room-table")[1:]
    causes = ", ".join(f"{what} {amount}" for what, amount in beside)
    assert not causes or f"  with {causes}: {needed} of {room}" in report.splitlines()
    assert causes
    assert (left, device) == ("free", f"memory of {program.cluster.device(0).name}")
    assert answer["Fits"] == f"yes, {free} free"


def test_the_parts_of_a_step_add_up_to_it(program: autopar.ParallelProgram) -> None:
    spent = facts(program).spent
    assert spent.step_s == pytest.approx(program.predicted.step_time_s, rel=1e-9)
    assert min(spent.computed_s, spent.messages_s, spent.idle_s, spent.gradients_s, spent.overhead_s) >= 0
    busy_s = max(program.account.timeline.busy_s)
    assert spent.computed_s + spent.messages_s + spent.tiers_s == pytest.approx(busy_s, rel=1e-9)
    assert (spent.idle_s > 0) == (program.pp > 1)


def test_blocks_of_parameters_add_up_to_what_rests(program: autopar.ParallelProgram) -> None:
    for stage in facts(program).stages:
        for kind in ("parameters", "optimizer"):
            total = sum(p.resting.get(kind, 0.0) for p in stage.parameters.values())
            assert total == pytest.approx(stage.resting[kind], rel=1e-9)


def test_calls_keep_what_their_stages_keep(pipeline: autopar.ParallelProgram) -> None:
    told = facts(pipeline)
    for stage, plan in zip(told.stages, pipeline.plan.stages, strict=True):
        held = sum(call.held_bytes for call in told.calls[slice(*plan.calls)])
        assert 0 < held <= stage.held_bytes


def test_the_page_of_what_files_say_is_that_of_the_program(pipeline: autopar.ParallelProgram, tmp_path: Path) -> None:
    assert pipeline.report_html(tmp_path / "plan.html") == tmp_path / "plan.html"
    written = json.loads(json.dumps(to_data(facts(pipeline))))
    read = from_data(ProgramFacts, written), Plan.from_dict(json.loads(pipeline.plan.to_json()))
    assert page_html(*read) == (tmp_path / "plan.html").read_text()


def test_nothing_is_loaded(program: autopar.ParallelProgram) -> None:
    html = page_html(facts(program), program.plan)
    for tag, attributes in elements_of(html):
        for name in ("src", "href", "action", "srcset", "poster"):
            target = attributes.get(name) or "#"
            assert target.startswith("#") or target == "data:,", (tag, target)
    assert "default-src 'none'" in html
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", html)


def test_every_table_has_a_caption_and_every_picture_a_twin(program: autopar.ParallelProgram) -> None:
    html = page_html(facts(program), program.plan)
    assert html.count("<caption>") == html.count("<table")
    ids = {attributes["id"] for _, attributes in elements_of(html) if "id" in attributes}
    assert {"time-table", "memory-table", "axes-table", "groups-table", "tree"} <= ids
    assert all(target[1:] in ids for _, a in elements_of(html) if (target := a.get("href") or "").startswith("#"))


@pytest.mark.slow
def test_the_page_does_not_grow_with_layers() -> None:
    small, large = (
        page_html(facts(one), one.plan) for one in (compiled(4, mesh={"dp": 4}), compiled(12, mesh={"dp": 4}))
    )
    assert len(large) < len(small) * 1.02
    assert ">0–3</code> <em>×4</em>" in small
    assert ">0–11</code> <em>×12</em>" in large


def test_actions_of_the_lanes_are_the_timelines(pipeline: autopar.ParallelProgram) -> None:
    lanes = lanes_of(pipeline)
    timeline = pipeline.account.timeline
    assert lanes["span_s"] == pytest.approx(pipeline.predicted.step_time_s, rel=1e-9)
    for g, row in enumerate(lanes["rows"]):
        bars = [row["bars"][n : n + 5] for n in range(0, len(row["bars"]), 5)]
        events = [e for e in timeline.events if e.group == g and e.action is not None and e.stream == "compute"]
        assert [("FBW"[k], s, m) for k, s, m, *_ in bars] == [
            (e.action.kind, e.action.stage, e.action.microbatch) for e in events if e.action is not None
        ]
        for (*_, start, long), event in zip(bars, events, strict=True):
            assert start / 1e6 * lanes["span_s"] == pytest.approx(event.start_s, abs=1e-6 * lanes["span_s"])
            assert long / 1e6 * lanes["span_s"] == pytest.approx(
                event.end_s - event.start_s, abs=2e-6 * lanes["span_s"]
            )


def test_what_one_group_sends_the_other_receives(pipeline: autopar.ParallelProgram) -> None:
    first, second = lanes_of(pipeline)["rows"]
    sends = [e for e in pipeline.account.timeline.events if e.stream == "comm"]
    assert len(first["sent"]) + len(second["sent"]) == 5 * len(sends) > 0
    for one, other in ((first, second), (second, first)):
        sent = [one["sent"][n : n + 5] for n in range(0, len(one["sent"]), 5)]
        received = [other["received"][n : n + 5] for n in range(0, len(other["received"]), 5)]
        ends = {(bar[0], bar[2]): bar[3] + bar[4] for bar in (one["bars"][n : n + 5] for n in range(0, 60, 5))}
        assert [(k, m, s, n) for k, m, _, s, n in sent] == [(k, m, s, n) for k, m, _, s, n in received]
        assert all(abs(ends[kind, microbatch] - start) <= 1 for kind, microbatch, _, start, _ in sent)


def test_messages_and_ends_of_lanes_are_parts_of_the_step(program: autopar.ParallelProgram) -> None:
    told, lanes = facts(program), lanes_of(program)
    for group, exposed_s in zip(told.schedule.graph.groups, told.schedule.exposed, strict=True):
        assert sum(told.schedule.shown.get((s, kind), 0.0) for s in group for kind in "FBW") == pytest.approx(exposed_s)
    spent = told.spent
    at_end_s = spent.gradients_s + spent.update_s + spent.rest_s + spent.overhead_s
    assert sum(ticks for _, ticks in lanes["ends"]) / 1e6 * lanes["span_s"] == pytest.approx(at_end_s, rel=1e-4)
    assert lanes["over"] + sum(ticks for _, ticks in lanes["ends"]) == pytest.approx(1e6, abs=5)


def test_the_worst_moment_by_block_adds_up_to_the_peak(program: autopar.ParallelProgram) -> None:
    told = facts(program)
    rows = worst_rows(told, blocks(told, program.plan, worst_bytes(told, program.plan)))
    assert sum(row.nbytes for row in rows) == pytest.approx(program.predicted.peak_bytes, rel=1e-12)
    *in_blocks, running, left = rows
    assert running.each["for a moment"] == told.memory["for a moment"]
    for cause in ("parameters", "gradients", "optimizer", "held for backward"):
        assert left.each.get(cause, 0.0) == pytest.approx(0.0, abs=1e-6), cause
        assert sum(row.times * row.each.get(cause, 0.0) for row in in_blocks) == pytest.approx(told.memory[cause])
    assert min(nbytes for row in rows for nbytes in row.each.values()) > -1e-6
    (whole,) = (row for row in Page(page_html(told, program.plan)).rows("modules-table") if row[0] == "together")
    assert whole[-1] == size_text(program.predicted.peak_bytes)


def test_microbatches_that_wait_at_the_worst_moment_are_those_of_the_table(program: autopar.ParallelProgram) -> None:
    told = facts(program)
    assert told.worst is not None
    row = told.schedule.table[told.worst.group]
    place = [str(one) for one in row].index(told.worst.action)
    for stage in told.worst.stages:
        count = {kind: sum(a.kind == kind and a.stage == stage.stage for a in row[:place]) for kind in "FBW"}
        last = {"B": "F", "W": "B"}.get(row[-1].kind)
        own = row[place].kind if row[place].stage == stage.stage else ""
        others = count["F"] - count["B"] - (own == "B")
        assert others + 0.5 * (own in ("F", "B")) <= stage.waiting <= others + (own in ("F", "B"))
        others = count["B"] - count["W"] - (own == "W") if last == "B" else 0
        assert others + 0.5 * (own == "W") <= stage.later <= others + (own == "W")


def test_calls_keep_what_their_stages_keep_after_each_action(pipeline: autopar.ParallelProgram) -> None:
    kept, told = pipeline.account.stages[0].memory.actions, facts(pipeline)
    held = [(call.held_bytes, call.later_bytes) for call in told.calls[slice(*pipeline.plan.stages[0].calls)]]
    assert [sum(one) for one in zip(*held, strict=True)] == [kept["F"].after, kept["B"].after]
    assert min(kept["F"].after, kept["B"].after) > 0
