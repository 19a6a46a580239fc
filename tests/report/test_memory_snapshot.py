"""Memory snapshots: torch's own reader takes them, and their highest sum is the peak that is predicted for the rank."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.cuda._memory_viz as memory_viz

import autopar
from autopar import ClusterSpec, Options
from autopar.capture.source_lines import place_in
from autopar.cli.main import main
from autopar.errors import EmitError, InputError
from autopar.ir.resting import resting_rows
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

PIPELINE = {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}
ON_GPUS = ClusterSpec.homogeneous(devices=2, device="h100", devices_per_node=2)


def snapshot(program: autopar.Program, path: Path, rank: int = 0) -> dict[str, Any]:
    with program.memory_snapshot(path, rank=rank).open("rb") as file:
        data: dict[str, Any] = pickle.load(file)
    return data


def alive_after(events: list[dict[str, Any]]) -> list[int]:
    """Bytes alive after every event, by address; a block is freed once, and none lies where another one is."""
    alive: dict[int, int] = {}
    sums = []
    for event in events:
        if event["action"] == "alloc":
            assert all(at + size <= event["addr"] or event["addr"] + event["size"] <= at for at, size in alive.items())
            alive[event["addr"]] = event["size"]
        else:
            assert event["action"] == "free_completed"
            assert alive.pop(event["addr"]) == event["size"]
        sums.append(sum(alive.values()))
    return sums


def assert_peaks(program: autopar.Program, path: Path) -> None:
    for group, peak in zip(program.lowered.graph.groups, program.account.peaks, strict=True):
        data = snapshot(program, path, program.plan.stages[group[0]].mesh.offset)
        (events,) = data["device_traces"]
        sums = alive_after(events)
        assert max(sums) == round(peak)
        (segment,) = data["segments"]
        in_the_end = sum(b["size"] for b in segment["blocks"] if b["state"] == "active_allocated")
        assert in_the_end == sums[-1] == segment["allocated_size"]
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
        resting = sum(program.account.stages[s].memory.resting_bytes for s in group)
        assert sums[-1] == pytest.approx(resting, abs=len(events) if resting % 1 else 0)


@pytest.fixture(scope="module")
def program() -> autopar.Program:
    return compiled_zoo(BY_NAME["mlp"], 2, options=Options(**PIPELINE))


def test_the_highest_sum_is_the_predicted_peak_of_the_rank(program: autopar.Program, tmp_path: Path) -> None:
    assert_peaks(program, tmp_path / "snapshot.pickle")
    assert max(program.account.peaks) == program.predicted.peak_bytes


def test_so_it_is_where_sends_are_under_way_on_gpus(tmp_path: Path) -> None:
    assert_peaks(compiled_zoo(BY_NAME["mlp"], ON_GPUS, options=Options(**PIPELINE)), tmp_path / "snapshot.pickle")


@pytest.mark.slow
@pytest.mark.parametrize("zoo", MODELS, ids=str)
@pytest.mark.parametrize("asked", [{}, {"microbatches": 4}, {"strategy": "zero3"}, PIPELINE], ids=str)
def test_so_it_is_for_every_model(zoo: ZooModel, asked: dict[str, Any], tmp_path: Path) -> None:
    try:
        programs = [compiled_zoo(zoo, on, options=Options(**asked)) for on in (2, ON_GPUS)]
    except autopar.AutoparError as error:
        pytest.skip(str(error))
    for program in programs:
        assert_peaks(program, tmp_path / "snapshot.pickle")


def test_torch_reads_it(program: autopar.Program, tmp_path: Path) -> None:
    data = snapshot(program, tmp_path / "snapshot.pickle")
    (events,) = data["device_traces"]
    assert f"{len(events)} entries" in memory_viz.trace(data)
    assert "segments: 1" in memory_viz.segsum(data)
    assert "<html" in memory_viz.trace_plot(data)
    assert "<html" in memory_viz.segment_plot(data)
    assert memory_viz.memory(data, format_flamegraph=lambda text: text).count("stream_0") > 0


@pytest.mark.slow
def test_torchs_command_reads_it(program: autopar.Program, tmp_path: Path) -> None:
    path = program.memory_snapshot(tmp_path / "snapshot.pickle")
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(tmp_path / "x.html")]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "x.html").stat().st_size > 0


def test_frames_are_lines_of_the_model_and_names_of_the_program(program: autopar.Program, tmp_path: Path) -> None:
    (events,) = snapshot(program, tmp_path / "snapshot.pickle")["device_traces"]
    frames = [frame for event in events for frame in event["frames"]]
    assert all(frame.keys() == {"name", "filename", "line"} for frame in frames)
    sources = {line.source for t in program.stages[0].templates.values() for line in t.forward.lines if line.source}
    places = {place for place in map(place_in, sources) if place is not None}
    assert places & {(frame["filename"], frame["line"]) for frame in frames}
    resting = {f"{p.name} ({row.kind})" for p, row in resting_rows(program.stages[0], program.setting)}
    assert {f for f in resting if "(parameters)" in f} <= {frame["name"] for frame in frames}
    times = [event["time_us"] for event in events]
    assert times == sorted(times)
    assert times[-1] == round(1e6 * program.predicted.step_time_s)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("layers.0.attn · model.py:12: x = f(a: int)", ("model.py", 12)),
        ("model.py:7: return x", ("model.py", 7)),
        ("layers.0", None),
        ("the loss", None),
        ("", None),
    ],
)
def test_the_place_in_a_source_is_its_file_and_line(source: str, place: tuple[str, int] | None) -> None:
    assert place_in(source) == place


def test_what_cannot_be_written_is_refused(program: autopar.Program, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank 2 does not exist"):
        program.memory_snapshot(tmp_path / "x", rank=2)
    with pytest.raises(EmitError, match="cannot write"):
        program.memory_snapshot(tmp_path / "no" / "x")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    command = ["plan", "tests.cli.test_plan:mlp", "--cluster", "dgx-h100", "--json", "--memory-snapshot"]
    assert main([*command, "3", str(path)]) == 0
    with path.open("rb") as file:
        assert len(pickle.load(file)["device_traces"]) == 1
    capsys.readouterr()
    assert main([*command, "x", str(path)]) == 2
    assert "number of a rank" in capsys.readouterr().err
