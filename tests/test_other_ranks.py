"""A program that is written for several numbers of ranks, and runs that go on with other numbers than they began with.

The reference is the program itself, run at one number of ranks by threads of this process; its losses are those of one rank.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, ClusterError, InfeasibleError, InputError
from autopar.report.other_machines import on_clusters
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.program.batches import user_batches
from autopar.runtime.program.worlds import manifest_for
from tests.warm import python

NOTED = """import os, sys, time
from pathlib import Path
OUT = Path(os.environ["PROGRAM"])
sys.path.insert(0, str(OUT))
from autopar_runtime.run import launch
step = launch.LoadedProgram.__call__

def noted(self, *batch):
    loss = step(self, *batch)
    if self.session.comm.rank == 0:
        with open(os.environ["LOSSES"], "a") as file:
            file.write(f"{self.step} {self.session.comm.world_size} {loss.item()!r}\\n")
    time.sleep(float(os.environ["SLEEP_S"]))
    return loss

launch.LoadedProgram.__call__ = noted
if __name__ == "__main__":
    sys.exit(launch.main(OUT))
"""
DATA = """import torch

def batches():
    for n in range(50):
        draw = torch.Generator().manual_seed(n)
        yield tuple(torch.randn(8, 24, generator=draw, dtype=torch.float64) for _ in range(2))
"""
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """Blocks with dropout, and a buffer that every step writes."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(dropout), nn.Linear(48, 24))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


def compiled(ranks: int = 4, dropout: float = 0.1, rows: int = 8, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    batch = tuple(torch.randn(rows, 24, dtype=torch.float64) for _ in range(2))
    cluster = autopar.ClusterSpec.local(ranks)
    given = autopar.Options(**{"idle_ranks": False, **options})
    return autopar.compile(Net(dropout).double(), cluster, batch, optimizer=ADAMW, options=given)


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    return compiled(mesh={"dp": 2, "tp": 2}, microbatches=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where run file and data lie."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "noted.py").write_text(NOTED)
    (folder / "data.py").write_text(DATA)
    return folder


@pytest.fixture(scope="module")
def saved(program: autopar.ParallelProgram, home: Path) -> Path:
    return program.save(home / "out", also=[3, 2, autopar.ClusterSpec.local(1)])


def batches(home: Path, steps: int) -> list[Any]:
    source = user_batches(f"{home / 'data.py'}:batches")
    return [next(source) for _ in range(steps)]


def test_every_number_of_ranks_has_a_program_that_takes_its_weights_from_the_first(program, saved):
    for ranks in (1, 2, 3):
        manifest = manifest_for(saved, ranks)
        plan = autopar.Plan.load(saved / "worlds" / str(ranks) / "plan.json")
        assert (manifest.world_size, plan.ranks, plan.microbatches) == (ranks, ranks, program.plan.microbatches)
        assert manifest.weights_folder == saved / "weights"
        assert not (saved / "worlds" / str(ranks) / "weights").exists()
    assert manifest_for(saved, 4).worlds == (1, 2, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "tp": 2}},
        {"strategy": "zero3", "dropout": 0.0},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "microbatches": 4},
        {"pp": 4, "microbatches": 2, "schedule": "zb-h1", "dropout": 0.0},
    ],
)
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_steps_are_the_same_on_other_clusters(home, options, ranks):
    program = compiled(**options)
    other = on_clusters(program, [ranks], program.compile_again)[0]
    assert other.plan.ranks == ranks
    assert options.get("dropout") == 0.0 or other.plan.microbatches == program.plan.microbatches
    ours, theirs = program.run(batches(home, 4)), other.run(batches(home, 4))
    for left, right in zip(ours.losses, theirs.losses, strict=True):
        assert math.isclose(left.item(), right.item(), rel_tol=1e-9)
    for name, value in ours.state.items():
        torch.testing.assert_close(theirs.state[name], value, rtol=0, atol=1e-9 * value.abs().max().item())


@pytest.mark.parametrize("rebalance", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sixteen_rows_go_on_with_three_ranks_of_four(rebalance):
    """Three ranks hold 6, 5 and 5 of the rows; parameters and optimizer state move over."""
    program = compiled(rows=16, mesh={"dp": 4}, strategy="zero1", rebalance=rebalance)
    other = on_clusters(program, [3], program.compile_again)[0]
    assert other.plan.ranks == 3
    draw = torch.Generator().manual_seed(1)
    given = [tuple(torch.randn(16, 24, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(6)]

    def steps(session: Any, first: int, state: Any = None) -> tuple[list[float], Any]:
        if state is not None:
            session.load_state_dict(state)
        losses = [session.train_step(batch).item() for batch in given[first : first + 3]]
        return losses, session.state_dict()

    before, state = program.on_ranks(lambda session: steps(session, 0))[0]
    after, _ = other.on_ranks(lambda session: steps(session, 3, state))[0]
    whole = [loss.item() for loss in program.run(given).losses]
    assert [*before, *after] == pytest.approx(whole, rel=1e-9)


def test_saving_again_takes_away_programs_that_are_no_longer_asked_for(program, tmp_path):
    out = program.save(tmp_path / "out", also=[2, 3])
    program.save(out, also=[3])
    assert not (out / "worlds" / "2" / "manifest.json").exists()
    assert manifest_for(out, 3).world_size == 3
    program.save(out)
    assert manifest_for(out, 4).worlds == ()


@pytest.mark.parametrize(
    ("also", "kind", "message"),
    [
        ([2, 2], InputError, "two programs for 2 ranks"),
        ([4], InputError, "two programs for 4 ranks"),
        (3, InputError, "also is a list"),
        ("local", InputError, "also is a list"),
        ([0], ClusterError, "the number of devices"),
        ([True], ClusterError, "the number of devices"),
        ([2.0], InputError, "cluster must be"),
    ],
)
def test_what_is_no_other_number_of_ranks_is_refused(program, tmp_path, also, kind, message):
    with pytest.raises(kind, match=message):
        program.save(tmp_path / "out", also=also)
    assert not (tmp_path / "out").exists()


def test_a_cluster_on_which_nothing_fits_is_named_and_nothing_is_written(program, tmp_path):
    small = autopar.ClusterSpec.local(1, memory_bytes=1000.0)
    with pytest.raises(InfeasibleError) as caught:
        program.save(tmp_path / "out", also=[small])
    assert "the program for 1 ranks" in " ".join(caught.value.__notes__)
    assert isinstance(caught.value, AutoparError)
    assert not (tmp_path / "out").exists()


# --- real processes


def command(home: Path, run: Path, steps: int, *launcher: str, executable: str = sys.executable) -> list[str]:
    own = ["--run-dir", str(run), "--steps", str(steps), "--save-every", "3", "--timeout", "120", "--hang", "0"]
    torchrun = [executable, "-m", "torch.distributed.run", *launcher, "--monitor-interval=0.1"]
    return [*torchrun, str(home / "noted.py"), *own, "--data", f"{home / 'data.py'}:batches"]


def environment(out: Path, losses: Path, sleep_s: float = 0.0) -> dict[str, str]:
    """TORCH_DISABLE_SHARE_RDZV_TCP_STORE: torchrun's shared store leaves out machines that join later."""
    own = {"PROGRAM": str(out), "LOSSES": str(losses), "SLEEP_S": str(sleep_s)}
    return os.environ | own | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def told(losses: Path) -> list[tuple[int, int, float]]:
    """Step, ranks and loss of all steps that were made, repeated ones too."""
    lines = losses.read_text().splitlines() if losses.exists() else []
    return [(int(step), int(ranks), float(loss)) for step, ranks, loss in map(str.split, lines)]


def check_run(program: autopar.ParallelProgram, home: Path, run: Path, losses: Path, steps: int) -> None:
    """Every step that was made, however often and on whatever ranks, has the loss of the fixed run."""
    wanted = [loss.item() for loss in program.run(batches(home, steps)).losses]
    assert {step for step, *_ in told(losses)} == set(range(1, steps + 1))
    for step, ranks, loss in told(losses):
        assert math.isclose(loss, wanted[step - 1], rel_tol=1e-9), (step, ranks)
    assert RunDirectory(run).read(steps).position == steps


def train_on(out: Path, home: Path, folder: Path, parts: list[tuple[int, int]]) -> None:
    """One run, on so many ranks up to such a step each."""
    for ranks, steps in parts:
        launcher = ["--standalone", f"--nproc-per-node={ranks}"]
        line = command(home, folder / "run", steps, *launcher, executable=python())
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=250, env=environment(out, folder / "losses"), check=False
        )
        assert done.returncode == 0, done.stderr
        used = max(size for size in (1, 2, 3, 4) if size <= ranks)
        assert {r for step, r, _ in told(folder / "losses") if step > steps - 2} == {used}
        if ranks > used:
            assert f"rank {used} is a spare: this run has a plan for {used} ranks" in done.stdout


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_fewer_ranks_and_with_more(program, saved, home, tmp_path):
    train_on(saved, home, tmp_path, [(3, 4), (5, 8)])
    check_run(program, home, tmp_path / "run", tmp_path / "losses", 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [{"mesh": {"dp": 2, "tp": 2}}, {"strategy": "zero3"}, {"pp": 2, "microbatches": 4}, {"pp": 4, "microbatches": 2}],
)
def test_four_two_three_four_ranks_in_one_run(home, tmp_path, options):
    program = compiled(**options)
    out = program.save(tmp_path / "out", also=[2, 3])
    train_on(out, home, tmp_path, [(4, 4), (2, 8), (3, 13), (4, 16)])
    check_run(program, home, tmp_path / "run", tmp_path / "losses", 16)


class Machines:
    """torchruns with two ranks each on this machine, which come and go."""

    def __init__(self, out: Path, home: Path, folder: Path, steps: int, port: int) -> None:
        self._losses, self._folder, self._port = folder / "losses", folder, port
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={folder.name}"]
        launcher = ["--nnodes=1:2", "--nproc-per-node=2", *rendezvous, "--rdzv-conf=last_call_timeout=3"]
        self._command = command(home, folder / "run", steps, *launcher, "--max-restarts=9")
        self._environment = environment(out, self._losses, sleep_s=0.2)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"machine_{len(self.started)}.log").open("w") as log:
            one = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        self.started.append(one)
        return one

    def wait_for_store(self) -> None:
        """Wait until the first machine has the store where all meet: that machine stays."""
        end = time.monotonic() + 100
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", self._port)) and time.monotonic() < end:
                time.sleep(0.1)

    def wait_for(self, step: int, ranks: int) -> int:
        """Wait until a step from this one on was made on so many ranks; which it is."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            last = told(self._losses)[-1:]
            if last and last[0][0] >= step and last[0][1] == ranks:
                return last[0][0]
            time.sleep(0.1)
        raise AssertionError("\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log")))

    def end(self) -> None:
        for one in self.started:
            for pid in family(one):
                os.kill(pid, signal.SIGKILL)


def family(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """A torchrun that runs, and its workers."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield from (*map(int, children), process.pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_machines_that_leave_and_come_back(program, saved, home, tmp_path, how):
    """The one that is asked to go loses no step; after one that dies the last saved step is taken."""
    machines = Machines(saved, home, tmp_path, 80, 29700 + os.getpid() % 200)
    try:
        first = machines.start()
        machines.wait_for_store()
        other = machines.start()
        machines.wait_for(4, 4)
        for pid in list(family(other)) if how == signal.SIGKILL else [other.pid]:
            os.kill(pid, how)
        left = machines.wait_for(1, 2)
        machines.wait_for(left + 5, 2)
        machines.start()
        machines.wait_for(left + 6, 4)
        assert first.wait(400) == 0
        assert machines.started[-1].wait(60) == 0
    finally:
        machines.end()
    check_run(program, home, tmp_path / "run", tmp_path / "losses", 80)
    made = [step for step, *_ in told(tmp_path / "losses")]
    assert how == signal.SIGKILL or made == sorted(set(made))
