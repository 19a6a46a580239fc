"""A step that does not fit has a page too: by how much it is short, what fills the memory, and what would do."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.main import main
from autopar.errors import EmitError, InfeasibleError
from autopar.ir.text import size_text
from autopar.report import facts
from autopar.report.page.tree import blocks
from autopar.report.page.worst import moment_text, worst_bytes, worst_rows
from tests.report.page.pages import Page, compiled, figures

LIMIT = 1.2e6
"""Bytes: less than half of the wide layer's parameters, gradients and state on two ranks."""


def with_one_wide_layer() -> dict[str, Any]:
    """A step whose third layer has most of the bytes."""
    layers = [nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32)) for width in (32, 32, 2048, 32)]
    x = torch.zeros(16, 32)
    return {
        "model": nn.Sequential(*layers),
        "example_inputs": (x, x),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
        "options": autopar.Options(memory_bytes=LIMIT, mesh={"dp": 2}, microbatches=1, explain_s=10.0),
    }


@pytest.fixture(scope="module")
def error() -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        autopar.compile(cluster=autopar.ClusterSpec.homogeneous(devices=2, device="h100"), **with_one_wide_layer())
    return caught.value


def test_the_page_says_what_the_error_says(error: InfeasibleError, tmp_path: Path) -> None:
    html = error.report_html(tmp_path / "plan.html").read_text()
    page, short = Page(html), error.shortage
    assert short is not None
    assert next(iter(figures(html).items())) == ("Fits", f"no, {size_text(short.short_bytes)} short")
    assert f"Does not fit: short by {size_text(short.short_bytes)} of {size_text(LIMIT)} of h100" in html
    memory = {re.sub("^[0-9]", "", name): amount for name, amount, _ in page.rows("memory-table")[:-1]}
    assert memory == {kind: size_text(n) for kind, n in short.by_kind.items() if n >= 0.5}
    assert [row[0] for row in page.rows("changes-table")] == [one.text for one in error.alternatives] != []
    assert page.rows("modules-table")[-1][-1] == size_text(short.needed_bytes)


def test_the_program_that_does_not_fit_is_the_smallest_plan(error: InfeasibleError) -> None:
    assert error.make_program is not None
    program, short = error.make_program(), error.shortage
    assert short is not None
    assert program.predicted.peak_bytes == short.needed_bytes
    told = facts(program)
    assert told.worst is not None
    *in_blocks, _, _ = worst_rows(told, blocks(told, program.plan, worst_bytes(told, program.plan)))
    assert max(in_blocks, key=lambda row: row.nbytes).name.startswith("2")
    assert moment_text(told, told.worst).startswith("2"), "the wide layer runs when most is needed"


def test_where_no_smallest_plan_is_known_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="no page of what does not fit"):
        InfeasibleError("nothing fits").report_html(tmp_path / "plan.html")


def test_the_command_line_writes_the_page_before_it_fails(
    error: InfeasibleError, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise error

    monkeypatch.setattr("autopar.api.compile", refused)
    path = tmp_path / "plan.html"
    model = "tests.report.page.test_not_fitting:with_one_wide_layer"
    assert main(["plan", model, "--cluster", "dgx-h100", "--html", str(path)]) == 2
    assert "Does not fit: short by" in path.read_text()
    assert f"{path} is the page of the smallest plan" in capsys.readouterr().err


@pytest.mark.slow
def test_stages_that_do_not_fit_have_a_page(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError) as caught:
        compiled(pp=4, memory_bytes=30e3, explain_s=0)
    html = caught.value.report_html(tmp_path / "plan.html").read_text()
    page = Page(html)
    short = next(row[1] for row in page.rows("room-table") if row[0] == "short")
    assert f"no, {short} short" in html
    assert len(page.rows("groups-table")) == 4
