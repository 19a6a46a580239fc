"""A run whose ranks read their own rows goes on, after it was killed and on other numbers of ranks, where it was in the data."""

from __future__ import annotations

import itertools
import math
import subprocess
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime.run.loaded import local_rows
from tests.test_other_ranks import NOTED, command, compiled, environment, told
from tests.warm import python, torchrun

SAMPLES = 45
"""Five global batches of 8, and 5 samples that fill none."""
DATA = """import os, signal, torch
from pathlib import Path

def sample(i):
    draw = torch.Generator().manual_seed(i)
    return [torch.randn(24, generator=draw, dtype=torch.float64) for _ in range(2)]

def batch_of(rows):
    return tuple(torch.stack(column) for column in zip(*map(sample, rows)))

def batches(shard, start):
    for k, rows in enumerate(shard.sampler(45, seed=3, start=start), start):
        with open(os.environ["LOSSES"] + f".read.{shard.rank}", "a") as file:
            file.write(f"{k} {os.environ['WORLD_SIZE']} {','.join(map(str, rows))}\\n")
        killed = Path(os.environ["LOSSES"] + ".killed")
        if k == 5 and shard.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch_of(rows)
"""


def samples(steps: int) -> list[list[int]]:
    """The samples of the first global batches, as one device takes them."""
    sampler = autopar.DataShard.whole(8).sampler(SAMPLES, seed=3)
    return list(itertools.islice(itertools.chain.from_iterable(sampler for _ in range(9)), steps))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{"mesh": {"dp": 2, "tp": 2}, "microbatches": 2}, {"pp": 2, "microbatches": 2}])
def test_every_sample_is_read_once_an_epoch_whatever_happens_on_the_way(tmp_path: Path, options: dict[str, object]):
    program = compiled(dropout=0.0, **options)
    out = program.save(tmp_path / "out", also=[3, 2])
    (tmp_path / "noted.py").write_text(NOTED)
    (tmp_path / "data.py").write_text(DATA)
    losses = tmp_path / "losses"
    for ranks, steps in ((4, 7), (3, 12), (2, 17)):
        launcher = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=2"]
        line = command(tmp_path, tmp_path / "run", steps, *launcher, executable=python())
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=250, env=environment(out, losses), check=False
        )
        assert done.returncode == 0, done.stderr
    assert Path(f"{losses}.killed").exists()
    wanted = samples(17)
    draw = {"DATA": DATA}
    exec(DATA, draw)
    reference = [loss.item() for loss in program.run([draw["batch_of"](rows) for rows in wanted]).losses]  # type: ignore[operator]
    assert {step for step, *_ in told(losses)} == set(range(1, 18))
    for step, ranks, loss in told(losses):
        assert math.isclose(loss, reference[step - 1], rel_tol=1e-9), (step, ranks)
    for epoch in (wanted[:5], wanted[5:10]):
        assert len({i for batch in epoch for i in batch}) == 40
    check_reads(out, losses, wanted)


def check_reads(out: Path, losses: Path, wanted: list[list[int]]) -> None:
    """Each rank read the rows that it takes of every batch, however often."""
    seen = set()
    for ranks in (4, 3, 2):
        for shard in local_rows(out, ranks):
            path = Path(f"{losses}.read.{shard.rank}")
            lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            for k, world, rows in lines:
                if int(world) == ranks:
                    seen.add((int(k), shard.rank if shard.rows else -1))
                    assert [*map(int, rows.split(","))] == [wanted[int(k)][row] for row in shard.indices]
    assert {k for k, _ in seen} == set(range(17))


OWN_LOOP = """import os, sys, torch
sys.path.insert(0, sys.argv[1])
from autopar_runtime.run.launch import load
program, how = load(sys.argv[1], timeout_s=60.0, rows="local"), sys.argv[2]
draw = torch.Generator().manual_seed(0)
data = [tuple(torch.randn(8, 24, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(5)]
for step, batch in enumerate(data):
    own = [leaf[program.shard.indices] for leaf in batch]
    if how == "other" and program.shard.rank == 3 and step == 4:
        own[0] += 1
    loss = program(*own).item()
    if program.shard.rank == 0:
        sys.stdout.write(f"loss {loss!r}\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_loop_of_ones_own_is_given_rows_and_what_nobody_compared_is_compared_at_its_end(tmp_path: Path):
    program = compiled(dropout=0.0, mesh={"dp": 2, "tp": 2})
    out = program.save(tmp_path / "out")
    (tmp_path / "own_loop.py").write_text(OWN_LOOP)
    well = torchrun(4, tmp_path / "own_loop.py", out, "alike")
    assert well.returncode == 0, well.stderr
    draw = torch.Generator().manual_seed(0)
    data = [tuple(torch.randn(8, 24, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(5)]
    losses = [float(line.split()[1]) for line in well.stdout.splitlines() if line.startswith("loss ")]
    assert losses == pytest.approx([loss.item() for loss in program.run(data).losses], rel=1e-9)
    ill = torchrun(4, tmp_path / "own_loop.py", out, "other")
    assert ill.returncode == 1
    assert "got other rows than the ranks that take the same ones" in ill.stderr
