"""A run whose rows move keeps what it measured: the next start, of any ranks, begins with these shares."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.doctor import main as doctor
from autopar.runtime.run.learned_speeds import LEARNED, read_learned, slowness_of
from tests.runtime.staged import run as run_ranks
from tests.runtime.step.test_rebalance_stages import compiled

ROWS, STEPS = 21, 32
DATA = """import os, sys, time
import torch

SLOW = {"0": 2e-3, "1": 2e-3, "2": 6e-3}[os.environ["RANK"]]

def batches():
    session = sys.modules["autopar_runtime.step.session"].Session
    compute = session._compute

    def slow(self, *args):
        time.sleep(SLOW * self.comm.block_size(21, "dp"))
        return compute(self, *args)

    session._compute = slow
    for n in range(200):
        draw = torch.Generator().manual_seed(n)
        yield tuple(torch.randn(21, 8, dtype=torch.float64, generator=draw) for _ in range(2))
"""


def saved(out: Path) -> Path:
    """A program of three ranks, and its data."""
    torch.manual_seed(0)
    batch = tuple(torch.randn(ROWS, 8, dtype=torch.float64) for _ in range(2))
    adamw, loss = functools.partial(torch.optim.AdamW, lr=1e-2), nn.functional.mse_loss
    options = autopar.Options(rebalance=True, strategy="zero1")
    model, cluster = nn.Sequential(nn.Linear(8, 42), nn.ReLU(), nn.Linear(42, 8)).double(), autopar.ClusterSpec.local(3)
    program = autopar.compile(model, cluster, batch, loss_fn=loss, optimizer=adamw, options=options)
    program.save(out)
    (out / "data.py").write_text(DATA)
    return out


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_moves_rows_keeps_the_speeds_and_begins_with_them(tmp_path, capsys):
    out, run = saved(tmp_path / "out"), tmp_path / "run"
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"rebalance": False}))
    argv = ["--run-dir", run, "--backend", "gloo", "--data", f"{out / 'data.py'}:batches", "--save-every", 16]
    argv.append("--rebalance")
    status, said = run_ranks(out, [*argv, "--steps", STEPS], 3, tmp_path / "first")
    assert status == [0, 0, 0], said
    assert "rows move along dp, 7:7:7 becomes" in said
    assert "rank 2 is busy" in said
    learned = read_learned(run)
    assert learned is not None
    (machine,) = learned.machines.values()
    assert learned.rows[0].shares[2] <= 4
    assert machine[2] > 2 * max(machine[:2])
    status, again = run_ranks(out, [*argv, "--steps", STEPS + 4], 3, tmp_path / "again")
    assert status == [0, 0, 0], again
    assert f"step {STEPS}: rows move along dp, 7:7:7 becomes" in again
    assert LEARNED in again
    assert doctor([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rows are shared ")
    assert "rows move along dp, 7:7:7 becomes" in shown


def test_a_damaged_file_is_named(tmp_path, capsys):
    (tmp_path / LEARNED).write_text(
        json.dumps({"rows": [{"axis": "dp", "shares": [1, 2]}], "machines": {"a": ["fast"]}, "moves": []})
    )
    assert doctor([str(tmp_path)]) == 2
    assert "machines" in capsys.readouterr().err


def test_ranks_are_as_fast_as_their_machines_were():
    learned = {"a": (1.0, 2.0), "b": (4.0,)}
    assert slowness_of(learned, ["a", "b", "a"]) == [1.0, 4.0, 2.0]
    assert slowness_of(learned, ["a", "a", "a", "new"]) == [1.0, 2.0, 2.0, 2.0]


STAGED = """import os, sys, time
import torch

SLOW = 6e-3 if os.environ["RANK"] == "3" else 1e-3

def batches():
    session = sys.modules["autopar_runtime.step.session"].Session
    compute = session._compute

    def slow(self, *args):
        time.sleep(SLOW * next(iter(self.stages.values())).comm.block_size(12, "dp"))
        return compute(self, *args)

    session._compute = slow
    for n in range(200):
        draw = torch.Generator().manual_seed(n)
        yield tuple(torch.randn(24, 24, dtype=torch.float64, generator=draw) for _ in range(2))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rows_of_a_stage_move_and_the_next_start_begins_with_them(tmp_path):
    program, out, run = compiled(4, pp=2, schedule="1f1b", strategy="dp", tied=True), tmp_path / "out", tmp_path / "run"
    program.save(out)
    (out / "data.py").write_text(STAGED)
    argv = ["--run-dir", run, "--backend", "gloo", "--data", f"{out / 'data.py'}:batches", "--save-every", 12]
    status, said = run_ranks(out, [*argv, "--steps", 24], 4, tmp_path / "first")
    assert status == [0] * 4, said
    assert "rows of stage 1 move along dp, 6:6 becomes" in said
    learned = read_learned(run)
    assert learned is not None
    first, second = learned.rows
    assert (first.stages, second.stages) == ((0,), (1,))
    assert second.shares[1] <= 4
    status, again = run_ranks(out, [*argv, "--steps", 28], 4, tmp_path / "again")
    assert status == [0] * 4, again
    assert "step 24: rows of stage 1 move along dp, 6:6 becomes" in again
    batches = [
        tuple(torch.randn(24, 24, dtype=torch.float64, generator=draw) for _ in range(2))
        for draw in (torch.Generator().manual_seed(n) for n in range(28))
    ]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line["loss"] for line in lines}
    even = program.run(batches).losses
    assert [found[step + 1] for step in range(28)] == pytest.approx([loss.item() for loss in even], rel=1e-9)
