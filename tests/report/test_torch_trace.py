"""Artefacts in torch's structured trace: the private function that writes them, the log as tlparse reads it, and tlparse."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._logging import _internal as torch_logging
from torch._logging import trace_structured

import autopar
from autopar.report import torch_trace
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

STEP = """
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo
print(compiled_zoo(BY_NAME["mlp"], 2).plan.program)
"""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The text that torch's own formatter writes of its trace."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(torch_logging.TorchLogsFormatter(trace=True))
    torch_logging.trace_log.addHandler(handler)
    yield written
    torch_logging.trace_log.removeHandler(handler)


def entries(text: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Artefacts of a raw log by name, with their metadata and payload: lines of JSON, each followed by lines after a tab."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if '{"artifact": ' in line:
            said = json.loads(line[line.index("{") :])
            payload = []
            for following in lines[i + 1 :]:
                if not following.startswith("\t"):
                    break
                payload.append(following[1:])
            found[said["artifact"]["name"]] = said, "\n".join(payload)
    return found


def assert_artifacts(found: dict[str, tuple[dict[str, Any], str]], program: autopar.Program | None = None) -> None:
    own = {name: (said, text) for name, (said, text) in found.items() if name.startswith("autopar_")}
    assert {name: said["artifact"]["encoding"] for name, (said, _) in own.items()} == {
        "autopar_plan": "json",
        "autopar_report": "string",
        "autopar_graph": "string",
    }
    for said, text in own.values():
        assert hashlib.md5(text.encode()).hexdigest() == said["has_payload"]
    plan = autopar.Plan.from_dict(json.loads(own["autopar_plan"][1]))
    assert "predicted: step" in own["autopar_report"][1]
    compile(own["autopar_graph"][1], "graph", "exec")
    if program is not None:
        assert plan == program.plan
        assert own["autopar_report"][1] == program.report()


def test_torchs_private_function_takes_what_it_is_given() -> None:
    parameters = inspect.signature(trace_structured).parameters
    assert {"name", "metadata_fn", "payload_fn", "expect_trace_id"} <= parameters.keys()
    assert [*parameters][:2] == ["name", "metadata_fn"]


def test_compile_writes_plan_report_and_graph_where_a_trace_is_asked_for(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    program = compiled_zoo(BY_NAME["mlp"], 2)
    assert_artifacts(entries(log.getvalue()), program)


def test_without_a_trace_nothing_is_put_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    monkeypatch.setattr(torch_trace, "artifacts", lambda program: pytest.fail("asked for"))
    torch_trace.trace(None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_with_torch_trace_leaves_a_log_that_tlparse_lists(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    run = [sys.executable, "-c", STEP]
    subprocess.run(run, check=True, timeout=200, env={**os.environ, "TORCH_TRACE": str(folder)})
    (log,) = folder.glob("*.log")
    assert_artifacts(entries(log.read_text()))
    if (tlparse := shutil.which("tlparse")) is None:
        pytest.skip("the log is right; tlparse, which would list it, is not installed")
    out = tmp_path / "out"
    subprocess.run([tlparse, str(log), "-o", str(out), "--no-browser"], check=True, timeout=60)
    listed = (out / "index.html").read_text()
    for name, suffix in (("plan", "json"), ("report", "txt"), ("graph", "txt")):
        (file,) = out.rglob(f"autopar_{name}_*.{suffix}")
        assert file.name in listed
