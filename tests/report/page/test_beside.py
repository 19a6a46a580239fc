"""The page has beside the plan a run, answers, advice and what is short, keeps names in their place, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli.dump import main
from autopar.cluster.arrangement import arranged
from autopar.errors import EmitError, InputError
from autopar.ir.text import time_text
from autopar.report import facts
from autopar.report.advice.planned import saved_advice
from autopar.report.page import page_html
from autopar.report.predicted_vs_measured import Profile
from autopar.runtime.comm.recorder import Recorder, Span, StepRecord
from tests.report.page.pages import Page, elements_of, figures


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
