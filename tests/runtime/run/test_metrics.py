"""A run can be watched: a record of every step, in lines of JSON, over HTTP, in TensorBoard, and as a line on a terminal."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import io
import json
import math
import shutil
import socket
import sys
import threading
import urllib.request
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autopar.runtime.data.datafile import parse_json
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.arguments import address
from autopar.runtime.program.machines import Machines
from autopar.runtime.run.metrics import (
    JsonLines,
    Metrics,
    StepLine,
    StepMetrics,
    peak_seconds,
    prometheus,
    sinks,
    tensorboard,
)
from autopar.runtime.run.prometheus import Prometheus
from autopar.runtime.run.train_loop import Done
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.warm import torchrun

RECORD = StepMetrics(7, 1e9, 0.5, 0.25, 4096.0, None, None, 1 << 20, 0.125)


def test_a_step_is_a_line_of_json_and_what_is_not_known_is_null(tmp_path):
    note = JsonLines(tmp_path / "deep" / "metrics.jsonl")
    note(RECORD)
    note(StepMetrics(8, 1e9, math.nan, 0.25, None, None, 2.0, 1 << 20, None, 3.0))
    first, second = map(json.loads, (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines())
    assert first["tokens_per_s"] == 4096.0
    assert first["mfu"] is None
    assert (second["loss"], second["grad_norm"], second["save_s"]) == (None, 2.0, 3.0)


def test_numbers_beside_the_loss_are_in_every_sink(tmp_path):
    record = replace(RECORD, extras={"accuracy": 0.75, "heads.0": math.nan})
    JsonLines(tmp_path / "m.jsonl")(record)
    JsonLines(tmp_path / "m.jsonl")(RECORD)
    first, second = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["extras"] == {"accuracy": 0.75, "heads.0": None}
    assert "extras" not in second
    served = SimpleNamespace(text=b"")
    prometheus(served)(record)  # type: ignore[arg-type]
    assert b"\nautopar_extras_accuracy 0.75\n" in served.text
    assert b"\nautopar_extras_heads_0 nan\n" in served.text


def test_lines_go_behind_those_of_the_run_before(tmp_path):
    for _ in range(2):
        JsonLines(tmp_path / "m.jsonl")(RECORD)
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeProgramError, match=r"--metrics .*give another file"):
        JsonLines(tmp_path / "file" / "m.jsonl")


def test_a_lost_file_is_said_once_and_made_anew(tmp_path, capsys):
    path = tmp_path / "run" / "m.jsonl"
    note = JsonLines(path)
    note(RECORD)
    path.unlink()
    note(RECORD)
    note(RECORD)
    assert len(path.read_text().splitlines()) == 2
    shutil.rmtree(path.parent)
    for _ in range(3):
        note(RECORD)
    path.parent.mkdir()
    note(RECORD)
    assert len(path.read_text().splitlines()) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("the file is gone; what comes is written anew" in line for line in said)


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1')
    JsonLines(tmp_path / "m.jsonl")(RECORD)
    assert json.loads((tmp_path / "m.jsonl").read_text().splitlines()[1])["step"] == 7


def test_a_full_disk_is_said_once(tmp_path, capsys):
    note = JsonLines(Path("/dev/full"))
    note(RECORD)
    note(RECORD)
    assert capsys.readouterr().err == "--metrics /dev/full: step 7: No space left on device; steps are left out\n"


def test_what_is_no_number_of_json_is_null(tmp_path):
    note = JsonLines(tmp_path / "m.jsonl")
    for value in (math.inf, -math.inf, math.nan):
        note(replace(RECORD, loss=value, grad_norm=value, mfu=value))
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        found = parse_json(line)
        assert (found["loss"], found["grad_norm"], found["mfu"], found["step"]) == (None, None, None, 7)


@pytest.fixture
def served():
    found = Prometheus("127.0.0.1", 0)
    prometheus(found)(RECORD)
    yield found
    found.close()


def got(served, path="/metrics"):
    return urllib.request.urlopen(f"http://127.0.0.1:{served.port}{path}", timeout=20).read().decode()


def test_the_last_record_is_served_for_prometheus(served):
    text = got(served)
    assert "# TYPE autopar_loss gauge\nautopar_loss 0.5\n" in text
    assert "autopar_mfu" not in text
    with pytest.raises(RuntimeProgramError, match="give another port"):
        Prometheus("127.0.0.1", served.port)
    with pytest.raises(RuntimeProgramError, match="give another port, or an address of this machine"):
        Prometheus("203.0.113.9", 0)


def test_the_port_is_this_machines_alone_unless_another_address_is_given():
    assert address("9400") == ("127.0.0.1", 9400)
    assert address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert address("[::1]:0") == ("::1", 0)
    for words in ("65536", "x", "::1:70000", "host:"):
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            address(words)


def test_visitors_who_say_nothing_take_no_threads_and_keep_nobody_out_for_long(served, monkeypatch):
    monkeypatch.setattr("autopar.runtime.run.prometheus.REQUEST_S", 0.2)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(200)]
    idle[0].sendall(b"GET /")  # and no more
    assert threading.active_count() == before
    for one in idle:
        with suppress(ConnectionResetError):
            assert one.recv(1) == b""  # all of them are closed
        one.close()
    assert "autopar_loss" in got(served)


@pytest.mark.parametrize(
    "request_bytes", [b"GET / " + b"x" * 40000, b"\xff\x00" * 900 + b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_is_answered_with_nothing(served, request_bytes):
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as one:
        one.sendall(request_bytes)
        with suppress(ConnectionResetError):
            assert b"autopar" not in one.recv(1 << 16)
    assert "autopar_loss" in got(served)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RuntimeProgramError, match="pip install tensorboard, or use --metrics"):
        tensorboard(str(tmp_path))


def test_tensorboard_gets_what_is_known_as_scalars(tmp_path, monkeypatch):
    """A stand-in for its writer, which the package tensorboard has."""
    written, closed = [], []

    class Writer:
        def __init__(self, folder: str, flush_secs: int) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            written.append((self.folder, name, value, step, walltime))

        def close(self) -> None:
            closed.append(self.folder)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(atexit, "register", lambda close: closed.append(close))
    note = tensorboard(str(tmp_path))
    note(RECORD)
    note(StepMetrics(8, 2e9, None, 0.5, None, 0.4, 2.0, 1, None, 3.0))
    first = {
        "loss": 0.5,
        "seconds": 0.25,
        "tokens_per_s": 4096.0,
        "peak_bytes": 1 << 20,
        "waited_s": 0.125,
        "save_s": 0.0,
    }
    second = {"seconds": 0.5, "mfu": 0.4, "grad_norm": 2.0, "peak_bytes": 1, "save_s": 3.0}
    rows = [(name, value, 7, 1e9) for name, value in first.items()]
    rows += [(name, value, 8, 2e9) for name, value in second.items()]
    assert written == [(str(tmp_path), *row) for row in rows]
    closed.pop()()
    assert closed == [str(tmp_path)]


def test_nothing_is_written_unless_it_is_asked_for(tmp_path):
    nothing = argparse.Namespace(metrics=None, run=None, tensorboard=None, prometheus=None)
    assert sinks(nothing) == []
    nothing.run = str(tmp_path)
    sinks(nothing)[0](RECORD)
    assert (tmp_path / "metrics.jsonl").exists()


def test_utilisation_is_of_a_known_peak_of_the_devices_it_runs_on():
    def seconds(gpu: bool, peak_s: float | None, device: str) -> float | None:
        manifest = SimpleNamespace(machines=Machines(1, "h100", gpu, peak_s=peak_s))
        return peak_seconds(manifest, torch.device(device))  # type: ignore[arg-type]

    assert seconds(True, 2.0, "cuda") == 2.0
    assert seconds(True, None, "cuda") is None
    assert seconds(True, 2.0, "cpu") is None


def test_a_terminal_gets_one_line_and_a_file_one_per_step():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, lines in ((Terminal(), 1), (io.StringIO(), 3)):
        line = StepLine(3, out)
        for step in (1, 2, 3):
            line.show(step, "loss 0.5", 0.1)
        assert out.getvalue().count("\n") == lines
        assert "step 3  loss 0.5  100.0 ms" in out.getvalue()


def test_a_run_writes_records_beside_its_steps(emitted, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["update"]["clip_norm"] = {"max_norm": 1.0}
    machines = {"ranks_per_node": 2, "device": "cpu", "gpu": False, "links": [], "step_flops": 1e6, "peak_s": 1e-6}
    manifest["machines"] = machines | {"state_bytes": 0}
    (out / "manifest.json").write_text(json.dumps(manifest))
    data = f"{out / 'data.py'}:batches"
    done = torchrun(2, out / "run.py", "--run-dir", tmp_path / "run", "--steps", 4, "--save-every", 2, "--data", data)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2, 3, 4]
    printed = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    for one, line in zip(records, printed, strict=True):
        assert f"loss {one['loss']:.6f}" in line
        assert one["mfu"] == pytest.approx(1e-6 / one["seconds"])
        assert 0 <= one["waited_s"] < one["seconds"]
        assert one["grad_norm"] > 0
        assert one["peak_bytes"] > 1 << 24
        assert one["tokens_per_s"] is None
    assert records[2]["save_s"] > 0
    assert records[1]["save_s"] == 0


def test_a_step_of_a_run_writes_one_line_and_asks_for_no_message(tmp_path):
    """The session has no way to send anything, and its file grows by a line a step."""
    comm = SimpleNamespace(rank=0, device=torch.device("cpu"), excused=lambda what: nullcontext())
    loop = SimpleNamespace(
        program=SimpleNamespace(shapes=lambda batch: [(leaf.shape, leaf.dtype) for leaf in batch]), save_s=0.0
    )
    asked = argparse.Namespace(
        metrics=str(tmp_path / "m.jsonl"), run=None, tensorboard=None, prometheus=("127.0.0.1", 0)
    )
    metrics = Metrics(SimpleNamespace(comm=comm), SimpleNamespace(machines=None, inputs=()), asked)  # type: ignore[arg-type]
    batch = [torch.zeros(4, 8, dtype=torch.int64)]
    for step in range(5):
        metrics.on_loss(loop, Done(step, batch, 0.0, False, 0, loss=0.5, seconds=0.1))  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(5))
    assert lines[0]["tokens_per_s"] == pytest.approx(320)
