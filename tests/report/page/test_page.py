"""The page says what the report says, is one file that asks nothing of a network, and does not grow with depth."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.dump import main
from autopar.cluster.arrangement import arranged
from autopar.errors import EmitError, InputError
from autopar.ir.text import size_text, time_text
from autopar.plan import Plan
from autopar.report import facts
from autopar.report.advice.planned import saved_advice
from autopar.report.page import page_html
from autopar.report.page.tree import blocks
from autopar.report.page.worst import worst_bytes, worst_rows
from autopar.report.predicted_vs_measured import Profile
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.comm.recorder import Recorder, Span, StepRecord
from autopar.runtime.data.fields import from_data, to_data

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Layers(nn.Module):
    """Token embeddings, so many layers, and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compiled(layers: int = 4, cluster: autopar.ClusterSpec | None = None, **options: object) -> autopar.ParallelProgram:
    ids = torch.zeros(8, 4, dtype=torch.long)
    return autopar.compile(
        Layers(layers),
        cluster or autopar.ClusterSpec.local(4),
        (ids, ids),
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        optimizer=SGD,
        options=autopar.Options(**options),
    )


class Page(HTMLParser):
    """Tables of a page by their id, rows of cells; all elements with their attributes; all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._table, self._cell, self._in_data = "", False, False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "table":
            self._table = attributes.get("id") or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            self._cell = True
        self._in_data = attributes.get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data
        if self._cell:
            self.tables[self._table][-1][-1] += data

    def rows(self, table: str) -> list[list[str]]:
        """The rows of a table below its head."""
        return self.tables[table][1:]


@pytest.fixture(scope="module")
def pipeline() -> autopar.ParallelProgram:
    return compiled(pp=2, microbatches=4, schedule="zb-h1", mesh={"dp": 2})


@pytest.fixture(scope="module")
def sharded() -> autopar.ParallelProgram:
    return compiled(cluster=autopar.ClusterSpec.preset("dgx-h100", nodes=1), mesh={"dp": 2, "tp": 4}, strategy="zero3")


@pytest.fixture(params=["pipeline", "sharded"])
def program(request: pytest.FixtureRequest) -> autopar.ParallelProgram:
    return request.getfixturevalue(request.param)


def lanes_of(program: autopar.ParallelProgram) -> dict[str, Any]:
    """The data of the drawn schedule."""
    lanes: dict[str, Any] = json.loads(Page(page_html(facts(program), program.plan)).data)["lanes"]
    return lanes


def figures(html: str) -> dict[str, str]:
    """The answer's figures by name."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong>", html))


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


def elements_of(html: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    yield from Page(html).elements


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


def test_names_cannot_leave_their_place(pipeline: autopar.ParallelProgram) -> None:
    evil = "</script><script>alert(1)</script><!--"
    program = facts(pipeline)
    object.__setattr__(program, "model", evil)
    for stage in program.stages:
        for template in stage.templates.values():
            for function in template.functions.values():
                for line in function.lines:
                    object.__setattr__(line, "source", evil)
    html = page_html(program, pipeline.plan)
    assert evil not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert evil in json.dumps(json.loads(Page(html).data))


def test_a_run_stands_beside_the_prediction(pipeline: autopar.ParallelProgram) -> None:
    ids = torch.zeros(8, 4, dtype=torch.long)
    profile = pipeline.run([(ids, ids)], steps=2, profile=True).profile
    rows = Page(page_html(facts(pipeline), pipeline.plan, profile)).rows("measured-table-1")
    text = pipeline.beside(profile)
    assert len(rows) == 1 + sum(line.startswith("  stage ") for line in text.splitlines())
    for what, predicted, measured, ratio in rows:
        what = what.replace("once a step", "gradients, update, parameters")
        assert re.search(
            rf"^  {what} +{re.escape(predicted)} +{re.escape(measured)} +{re.escape(ratio)}$", text, re.MULTILINE
        )


def test_a_saved_run_stands_on_the_page_of_a_saved_program(
    pipeline: autopar.ParallelProgram, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    span = Span("F0.0", 0.0, 0.002)
    step = StepRecord(0.01, (span,), ())
    for rank in range(4):
        recorder = Recorder(torch.device("cpu"))
        recorder.steps.append(step)
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(recorder.as_data(rank)))
    saved = pipeline.save(tmp_path / "out")
    assert main([str(saved), "--format", "html", "--profile", str(tmp_path)]) == 0
    html = capsys.readouterr().out
    profile = Profile(((step,),) * 4)
    advice = saved_advice(facts(pipeline), arranged(pipeline.cluster, pipeline.plan.placement), profile).facts()
    assert html.strip() == page_html(facts(pipeline), pipeline.plan, profile, advice=advice).strip()
    (whole, *_) = Page(html).rows("measured-table-1")
    assert whole[:3] == ["step", time_text(pipeline.predicted.step_time_s), "10 ms"]


def test_a_plan_that_does_not_fit_says_how_much_is_short(pipeline: autopar.ParallelProgram) -> None:
    program = facts(pipeline)
    room = replace(program.room, device_bytes=program.room.needed_bytes - 2048)
    html = page_html(replace(program, room=room), pipeline.plan)
    assert next(iter(figures(html).items())) == ("Fits", "no, 2.05 kB short")
    assert "Does not fit: short by 2.05 kB of " in html
    assert html.index('id="memory"') < html.index('id="time"')
    assert ["short", "2.05 kB"] in Page(html).rows("room-table")


WHAT_IF = {
    "change": "tp=4",
    "sentence": "tp=4: 12 % slower, 8 GB less: its all-reduces are exposed by 0.4 s",
    "step_time_s": [1.0, 1.12],
    "peak_bytes": [24e9, 16e9],
    "seconds": {"computing": -0.01, "messages in layers": 0.4},
    "bytes": {"parameters": -8e9},
    "plan": [{"what": "mesh", "before": "dp=2", "after": "tp=4"}],
}
NO_FIT = {
    "change": "memory_gb=1",
    "sentence": "does not fit: short by 3 GB of 1 GB",
    "step_time_s": [1.0, None],
    "peak_bytes": [24e9, None],
}
SUGGESTION = {
    "change": "microbatches=8",
    "limit": "bubble",
    "step_before_s": 1.9,
    "step_after_s": 1.4,
    "batch_before": 8,
    "batch_after": 16,
    "sentence": "microbatches=8: step 1.9 s → 1.4 s for 2 × the samples",
}
ADVICE = {
    "limits": [{"stages": [0, 1], "limit": "bubble", "limit_s": 0.5, "step_s": 2.0}],
    "suggestions": [SUGGESTION],
    "mismatches": [{"sentence": "a link has half its bandwidth"}],
    "scaling": {"sentence": "60% of one device"},
}


def test_answers_of_others_are_sections_of_the_page(pipeline: autopar.ParallelProgram) -> None:
    html = page_html(facts(pipeline), pipeline.plan, what_if=[WHAT_IF, NO_FIT], advice=ADVICE)
    page = Page(html)
    assert page.rows("what-if-table") == [
        ["tp=4", "1 s", "1.12 s", "+12.0%", "24 GB", "16 GB"],
        ["memory_gb=1", "1 s", "does not fit", "–", "24 GB", "–"],
    ]
    assert page.rows("what-if-plan-1") == [["mesh", "dp=2", "tp=4"]]
    assert page.rows("what-if-1") == [
        ["computing", "-10 ms"],
        ["messages in layers", "+400 ms"],
        ["parameters", "-8 GB"],
    ]
    assert page.rows("limits-table") == [["0, 1", "bubble", "500 ms", "25.0%", "2 s"]]
    assert page.rows("suggestions-table") == [["microbatches=8", "bubble", "1.9 s → 1.4 s", "8 → 16"]]
    said = (WHAT_IF, NO_FIT, SUGGESTION, ADVICE["scaling"], *ADVICE["mismatches"])
    assert all(str(one["sentence"]) in html for one in said)
    without = page_html(facts(pipeline), pipeline.plan)
    assert 'id="advice"' not in without
    assert 'id="what-if"' not in without


def test_an_answer_that_lacks_something_is_refused(pipeline: autopar.ParallelProgram) -> None:
    told = facts(pipeline)
    for answers, said in (
        (
            {"what_if": [{"change": "tp=4"}]},
            "an entry of what_if lacks sentence, step_time_s, peak_bytes; it has change",
        ),
        (
            {"what_if": [{**WHAT_IF, "step_time_s": 3.0}]},
            "step_time_s of what_if is two numbers, before and after, not 3.0",
        ),
        ({"advice": {"limits": []}}, "an entry of advice lacks suggestions"),
    ):
        with pytest.raises(InputError, match=said):
            page_html(told, pipeline.plan, **answers)


@pytest.mark.parametrize("path", ["", 3, None, "a\0b"])
def test_a_path_that_is_none_is_refused(pipeline: autopar.ParallelProgram, path: object) -> None:
    with pytest.raises(EmitError, match="path of a file"):
        pipeline.report_html(path)  # type: ignore[arg-type]


USED = """<script>
"use strict";
addEventListener("load", () => {
  const seen = () => document.getElementById("seen").textContent, lanes = document.getElementById("lanes");
  const press = (on, key) => on.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const said = [seen()];
  for (const name of ["in", "in", "right", "out", "all"]) {
    document.querySelector(`[data-do=${name}]`).click();
    said.push(seen());
  }
  const canvas = document.getElementById("canvas"), tall = [canvas.offsetHeight];
  for (let n = 0; n < 2; n++) {
    press(lanes, "m");
    tall.push(canvas.offsetHeight);
  }
  for (const key of ["+", "+", "ArrowRight", "-", "Home"]) {
    press(lanes, key);
    said.push(seen());
  }
  const shown = () => document.querySelectorAll("#tree li:not([hidden])").length;
  const first = document.querySelector("#tree [tabindex='0']"), before = shown();
  press(first, first.getAttribute("aria-expanded") === "true" ? "ArrowLeft" : "ArrowRight");
  press(first, "Enter");
  const lines = document.querySelectorAll("#detail tbody tr").length;
  document.body.dataset.used = JSON.stringify({ said, tall, before, after: shown(), lines });
});
</script></body>"""


@pytest.mark.chromium
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a Chromium on the path")
def test_every_control_works_in_a_browser(pipeline: autopar.ParallelProgram, tmp_path: Path) -> None:
    html = page_html(facts(pipeline), pipeline.plan)
    (tmp_path / "plan.html").write_text(html.replace("</body>", USED))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    ran = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'plan.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in ran.stderr, ran.stderr
    (body,) = [attributes for tag, attributes in elements_of(ran.stdout) if tag == "body"]
    used = json.loads(body["data-used"] or "")
    whole, *by_buttons, reset = used["said"][:6]
    assert len({whole, *by_buttons}) == 5
    assert reset == whole
    assert used["said"][6:] == [*by_buttons, whole]
    with_messages, without, again = used["tall"]
    assert with_messages == again > without
    assert used["before"] != used["after"]
    assert used["lines"] > 0
