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

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import EmitError
from autopar.plan import Plan
from autopar.report import facts
from autopar.report.page import page_html
from autopar.report.program_facts import ProgramFacts
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
    lanes = json.loads(Page(page_html(facts(pipeline), pipeline.plan)).data)["lanes"]
    timeline = pipeline.account.timeline
    assert lanes["span_s"] == timeline.makespan_s
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


def test_a_plan_that_does_not_fit_says_how_much_is_short(pipeline: autopar.ParallelProgram) -> None:
    program = facts(pipeline)
    room = replace(program.room, device_bytes=program.room.needed_bytes - 2048)
    html = page_html(replace(program, room=room), pipeline.plan)
    assert figures(html)["Fits"] == "no, 2.05 kB short"
    assert ["short", "2.05 kB"] in Page(html).rows("room-table")


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
  for (const key of ["+", "+", "ArrowRight", "-", "Home"]) {
    press(lanes, key);
    said.push(seen());
  }
  const shown = () => document.querySelectorAll("#tree li:not([hidden])").length;
  const first = document.querySelector("#tree [tabindex='0']"), before = shown();
  press(first, first.getAttribute("aria-expanded") === "true" ? "ArrowLeft" : "ArrowRight");
  press(first, "Enter");
  const lines = document.querySelectorAll("#detail tbody tr").length;
  document.body.dataset.used = JSON.stringify({ said, before, after: shown(), lines });
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
    assert used["before"] != used["after"]
    assert used["lines"] > 0
