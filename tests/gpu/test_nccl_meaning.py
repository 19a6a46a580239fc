"""Runs whose messages order streams (nccl_meaning.py): they train and save as over Gloo, and whoever keeps them waiting is named.

The faults are those of tests/runtime/run/test_faults.py.
"""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.health.flight import Flight
from autopar.runtime.health.flight_files import conclusion, read_flights
from autopar.runtime.health.stream_waits import StreamWaits
from tests.at_once import at_once
from tests.gpu.nccl_meaning import NAME
from tests.runtime.health import test_dropped_link
from tests.runtime.health.test_stalls import booked
from tests.runtime.preflight import two_machines
from tests.runtime.run import test_faults
from tests.runtime.run.test_faults import Ended, stage
from tests.runtime.run.test_launch import RUN, emitted, losses  # noqa: F401
from tests.warm import python

ON_DEVICE = RUN.replace(
    "from autopar_runtime.run import launch\n",
    'import nccl_meaning\nnccl_meaning.install("autopar_runtime")\nfrom autopar_runtime.run import launch, train_loop\n'
    'if here.name in ("0", "1"):\n    train_loop.Loop.__init__.__kwdefaults__["late"] = int(here.name)\n',
)
SIGNALLED = """
def signalled():
    return batches(lambda n, b: os.kill(os.getpid(), signal.SIGTERM) if (RANK, n) == (2, 7) else time.sleep(0.02))

def much_slower():
    return batches(lambda n, b: time.sleep(0.2) if RANK == 2 else None)
"""
DOUBLE = Path(__file__).with_name("nccl_meaning.py")


def on_device(out: Path) -> Path:
    """A program whose `run.py` can compute on the device that messages order the stream of."""
    shutil.copy(DOUBLE, out / DOUBLE.name)
    (out / "run.py").write_text(ON_DEVICE)
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the faults, in folders by how many steps late losses are read."""
    program = on_device(test_faults.out.__wrapped__(tmp_path_factory))
    (program / "data.py").write_text(test_faults.DATA + SIGNALLED)
    folder = tmp_path_factory.mktemp("programs")
    for late in ("default", "0", "1"):
        shutil.copytree(program, folder / late, symlinks=True)
    return folder


def run(out: Path, folder: Path, fault: str, *more: object, late: str = "default") -> Ended:
    return stage(out / late, folder, fault, "--backend", NAME, *more)


def final(ended: Ended, step: int) -> dict[str, torch.Tensor]:
    directory = RunDirectory(ended.run)
    found = directory.read(step)
    assert directory.check(found, found.files) == ""
    source = checkpoint.TensorSource(directory.folder(step))
    return {name: source.read(name) for name, kind in source.signatures.items() if kind is not None}


@pytest.mark.parametrize("late", ["default", pytest.param("0", marks=pytest.mark.slow)])
def test_healthy_runs_are_those_of_gloo(out, tmp_path, late):
    """late: how many steps late losses are read."""
    done: dict[str, Ended] = {}

    def ran(name: str, fault: str, *more: object, late: str = "default") -> None:
        done[name] = run(out, tmp_path / name, fault, *more, late=late)

    steps = ("--steps", 12, "--save-every", 4)
    at_once(
        {
            "gloo": functools.partial(ran, "gloo", "nothing", "--backend", "gloo", *steps),
            "device": functools.partial(ran, "device", "nothing", *steps, late=late),
        },
        most=4,
    )
    wanted, saved = losses(done["gloo"].said), final(done["gloo"], 12)
    assert len(wanted) == 12
    assert done["device"].codes == [0] * 4, done["device"].said
    assert losses(done["device"].said) == wanted
    assert not (done["device"].run / "flight").exists()
    own = final(done["device"], 12)
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[key], saved[key]) for key in saved)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("late", ["default", "0"])
def test_a_stopped_rank_is_named_as_over_gloo(out, tmp_path, late):
    """late: how many steps late losses are read."""
    done = run(out, tmp_path / "stopped", "stopped", late=late)
    assert any(done.codes)
    assert "this run hangs: rank 2 no longer runs (stopped" in done.said
    assert done.culprits == (2,)
    assert len(booked(done.run)) == 1


GOES_ON = {
    "skip": (
        "wrong_numbers --on-nan skip --grad-norm",
        "default",
        ["the loss of step 10 is nan: its update is skipped, 2 so far"],
    ),
    "rewind": (
        "wrong_numbers --on-nan rewind --recheck 3",
        "1",
        ["step 8: the loss is nan; back to step 4", "step 6: the loss is nan; back to step 4"],
    ),
}
"""Runs whose losses are not as they should be, how late the same run over Gloo reads them, and what both say."""


def step_lines(said: str) -> list[list[str]]:
    return [line.split("  ")[:-1] for line in said.splitlines() if line.startswith("step ") and "  loss " in line]


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("name", GOES_ON)
def test_what_listeners_do_about_a_loss_is_what_they_do_over_gloo(out, tmp_path, name):
    """Losses that are read late take back one step more, and its batch."""
    how, late_over_gloo, said = GOES_ON[name]
    done: dict[tuple[str, str], Ended] = {}

    def ran(name: str, backend: str, late: str, fault: str, *more: str) -> None:
        own = ("--steps", 12, "--save-every", 4, *more, "--backend", backend)
        done[name, backend] = run(out, tmp_path / f"{name} {backend}", fault, *own, late=late)

    cases = {(name, b): (late_over_gloo if b == "gloo" else "default", *how.split()) for b in ("gloo", NAME)}
    at_once({key: functools.partial(ran, *key, *row) for key, row in cases.items()}, most=2)
    over_gloo, on_device = done[name, "gloo"], done[name, NAME]
    for one in (over_gloo, on_device):
        assert one.codes == [0] * 4, one.said
    (step,) = {RunDirectory(one.run).steps()[0] for one in (over_gloo, on_device)}
    assert step_lines(on_device.said) == step_lines(over_gloo.said)
    for part in said:
        assert part in on_device.said
        assert part in over_gloo.said
    assert RunDirectory(on_device.run).read(step).position == RunDirectory(over_gloo.run).read(step).position
    own, other = final(on_device, step), final(over_gloo, step)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], other[key]) for key in other)


NAMED = [
    ("looping", (1,), "this run hangs: rank 1 is not waiting for anybody … data.py: … (harm)"),
    ("asleep", (3,), "this run hangs: rank 3 is not waiting for anybody … data.py: … (<lambda>)"),
    ("failing", (1,), "IndexError: list index out of range"),
    ("left_out", (3,), "rank 3 sent other messages than the rest: message 1 of group dp (1, 3)"),
    ("other_shape", (3,), "rank 3 sent other messages than the rest"),
    ("other_site", (3,), "rank 3 sent other messages than the rest"),
    ("other_weights", (3,), "hold other values than the ranks that have copies"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_staged_fault_is_named(out, tmp_path):
    def look(fault: str, culprits: tuple[int, ...], said: str) -> None:
        done = run(out, tmp_path / fault, fault)
        assert any(done.codes)
        assert done.culprits == culprits, done.said
        assert all(part in done.said for part in said.split(" … ")), done.said

    at_once({row[0]: functools.partial(look, *row) for row in NAMED}, most=2)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("late", ["default", "0"])
def test_a_signal_ends_all_ranks_after_the_same_step(out, tmp_path, late):
    done = run(out, tmp_path / "run", "signalled", late=late)
    assert done.codes == [0] * 4, done.said
    assert "stopped by a signal after step " in done.said
    (step,) = RunDirectory(done.run).steps()
    assert 8 < step < 20


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_slow_rank_is_the_first_that_is_called_slow(out, tmp_path):
    done = run(out, tmp_path / "run", "much_slower")
    assert done.codes == [0] * 4, done.said
    assert "step 51  slow: rank 2 (" in done.said


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not two_machines.possible(), reason="needs namespaces of a user, with veth and tc")
def test_a_dropped_link_is_named_on_both_its_ends(emitted, tmp_path):  # noqa: F811
    """Batch 21 is read as soon as the host has told its device of step 20, and of losses that of step 18 has then been read. So
    the device stands at a message of one of the three steps behind that."""
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    on_device(out)
    (out / "data.py").write_text(test_dropped_link.DATA)
    own = ["--run-dir", tmp_path / "run", "--steps", 4000, "--data", f"{out / 'data.py'}:batches", "--timeout", 600]
    command = [python(), *map(str, [out / "run.py", *own, "--hang", 4, "--backend", NAME])]
    ends, _ = two_machines.on_two(tmp_path, [command, command], setup=test_dropped_link.DROP)
    for machine, said in ((0, "no longer runs"), (1, "the job's store")):
        assert ends[machine].status == 1
        lines = [line for line in ends[machine].out.splitlines() if "this run hangs" in line and said in line]
        assert lines, ends[machine]
        assert re.findall(r"step (\d+), action", lines[0])[-1] in ("19", "20", "21"), lines


# ---- the waits of a stream, without processes


class Marks:
    """Marks of a stream that has passed as many of them as it is told."""

    def __init__(self) -> None:
        self.made, self.reached = 0, 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def passed(self, mark: int) -> bool:
        return mark <= self.reached

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


def test_a_rank_waits_for_what_its_device_stands_at_and_not_where_its_host_is():
    marks, flight = Marks(), Flight(0, 2)
    flight.stream = StreamWaits(marks, lambda: None)
    entries = []
    for step in (1, 2):
        flight.begin_step(step)
        entries.append(flight.start(step, "dp", (0, 1), ("all_reduce",), "all_reduce at loss".__str__))
        flight.wait(entries[-1])
        flight.end(entries[-1])
    seen = []
    for marks.reached in range(5):
        flight.poll()
        beat = flight.beat()
        seen.append((flight.waiting, beat.step, beat.started["dp"], flight.waited_s))
    assert seen == [
        (None, 1, 1, 0.0),  # the device has not come to it
        (entries[0], 1, 1, 0.0),
        (None, 2, 2, 1.0),
        (entries[1], 2, 2, 1.0),
        (None, 2, 2, 2.0),
    ]


def test_a_host_that_does_not_come_back_from_a_wait_waits():
    marks, flight = Marks(), Flight(0, 2)
    flight.stream = StreamWaits(marks, lambda: None)
    entry = flight.start(0, "dp", (0, 1), ("all_reduce",), "all_reduce at loss".__str__)
    with flight.connects(entry):
        assert flight.waiting is entry
    assert flight.waiting is None
    flight.wait(entry)
    marks.reached = 1
    flight.poll()
    assert flight.waiting is entry


@pytest.mark.parametrize("in_message", [False, True])
def test_a_host_that_fails_outside_of_messages_ended_the_run_wherever_its_device_stands(tmp_path, in_message):
    marks, flight = Marks(), Flight(0, 2)
    flight.stream = StreamWaits(marks, lambda: None)
    for step in (1, 2):
        flight.begin_step(step)
        entry = flight.start(step, "dp", (0, 1), ("all_reduce",), "all_reduce at loss".__str__)
        flight.wait(entry)
        flight.end(entry)
    marks.reached = 1  # the device stands at the message of step 1
    flight.poll()
    if in_message:
        flight.fail()
    beat = flight.failed(ValueError("no such row"))
    assert (beat.waits, beat.step) == (("all_reduce at loss", 1) if in_message else ("", 2))
    flight.write(tmp_path, beat)
    named = conclusion(read_flights(tmp_path))
    assert named.culprits == ((1,) if in_message else (0,))
    assert ("rank 0 failed with ValueError: no such row, at step 2" in named.text) is not in_message
