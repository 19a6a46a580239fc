"""A run whose machines are slower than described goes on under another plan from a save on, with the losses of an even run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cli.doctor import main as doctor
from autopar.errors import InputError
from autopar.report.candidates import slower_cases
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.learned_speeds import read_learned
from autopar.runtime.run.other_plans import Costs
from autopar.runtime.run.spares import START_AGAIN
from tests.runtime.staged import run as run_ranks
from tests.runtime.step.test_rebalance_stages import ROWS, WIDTH, compiled

MOVED_AT, STEPS = 30, 36
DATA = f"""import os, sys, time
import torch

def batches():
    session = sys.modules["autopar_runtime.step.session"].Session
    compute = session._compute

    def slow(self, *args):
        each_s = 4e-3 if os.environ["RANK"] == "0" else 1e-3
        time.sleep(each_s * sum(len(stage.rt.params) for stage in self.stages.values()))
        return compute(self, *args)

    session._compute = slow
    for n in range(200):
        draw = torch.Generator().manual_seed(n)
        yield tuple(torch.randn({ROWS}, {WIDTH}, dtype=torch.float64, generator=draw) for _ in range(2))
"""


def losses_of(run: Path) -> dict[int, float]:
    """The losses of a run by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_on_under_another_plan_from_a_save_on(tmp_path, capsys, monkeypatch):
    program, out, run = compiled(2, blocks=4, pp=2, schedule="1f1b"), tmp_path / "out", tmp_path / "run"
    program.save(out, slower=[3.0])
    (out / "data.py").write_text(DATA)
    manifest = Manifest.read(out)
    assert manifest.slower >= 1
    argv = ["--run-dir", run, "--backend", "gloo", "--data", f"{out / 'data.py'}:batches", "--save-every", 10]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    status, said = run_ranks(out, [*argv, "--steps", 100_000], 2, tmp_path / "first")
    assert status == [START_AGAIN] * 2, said
    assert f"step {MOVED_AT}: the run goes on under the plan in slower/" in said
    learned = read_learned(run)
    assert learned is not None
    (change,) = learned.changes
    assert (change.step, change.before, learned.plan) == (MOVED_AT, 0, change.after)
    assert change.after_s * 1.05 < change.before_s
    assert change.saved_s > 2 * change.cost_s
    status, again = run_ranks(out, [*argv, "--steps", STEPS], 2, tmp_path / "again")
    assert status == [0, 0], again
    assert f"steps {MOVED_AT + 1} to {STEPS}" in again
    plan = manifest.under(learned.plan)
    assert RunDirectory(run).read(STEPS).plan == plan.plan_hash
    assert plan.plan_hash != manifest.plan_hash
    batches = [
        tuple(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
        for draw in (torch.Generator().manual_seed(n) for n in range(STEPS))
    ]
    found, even = losses_of(run), program.run(batches).losses
    assert [found[step + 1] for step in range(STEPS)] == pytest.approx([loss.item() for loss in even], rel=1e-9)
    assert doctor([str(run)]) == 0
    assert f"step {MOVED_AT}: the run goes on under the plan in slower/{learned.plan}" in capsys.readouterr().out


def test_a_plan_pays_where_what_is_left_saves_more_than_a_start_costs():
    costs = Costs([3.0, 2.0, 1.5], 0, step_s=6.0, left=100, start_s=149.0)
    assert costs.best() == (2, pytest.approx(300.0))
    assert replace(costs, start_s=151.0).best() == (0, 0.0)
    assert replace(costs, left=99).best() == (0, 0.0)
    assert replace(costs, present=2, start_s=0.0).best() == (2, 0.0)
    assert Costs([1.04, 1.0], 0, step_s=6.0, left=10**6, start_s=1.0).best() == (0, 0.0)


def test_a_plan_that_was_left_takes_what_it_took_until_speeds_change():
    costs = Costs([1.0, 2.0], 1, step_s=4.0, left=1000, start_s=10.0, tried={0: 5.0}, changed=False)
    assert costs.best() == (1, 0.0)
    assert replace(costs, changed=True).best() == (0, pytest.approx(2000.0))
    assert replace(costs, seconds=[2.0, 1.0], tried={0: 3.0}).best() == (
        0,
        pytest.approx(1000.0),
    )  # the new one is worse


def test_stages_or_machines_are_slower_one_at_a_time():
    program = compiled(4, pp=2, schedule="1f1b")
    cluster = program.request.cluster
    cases = list(slower_cases(cluster, program.plan, [1.5, 3.0]))
    assert [slowness for _, slowness in cases] == [
        [1.5, 1.5, 1.0, 1.0],
        [3.0, 3.0, 1.0, 1.0],
        [1.0, 1.0, 1.5, 1.5],
        [1.0, 1.0, 3.0, 3.0],
    ]
    for one, slowness in cases:
        for place, slow in enumerate(slowness):
            peak = cluster.device(place).peak_flops["float32"] / slow
            assert one.device(place).peak_flops["float32"] == pytest.approx(peak)
    assert not list(slower_cases(cluster, compiled(4, mesh={"dp": 4}).plan, [2.0]))


def test_factors_that_are_none_are_refused(tmp_path):
    program = compiled(2, pp=2)
    for slower in ([1.0], [0.5], 2.0, ["2"], [True]):
        with pytest.raises(InputError, match="slower is a list of factors above 1"):
            program.save(tmp_path, slower=slower)


def test_a_program_whose_speeds_nobody_measures_has_no_plans_for_slower_machines(tmp_path):
    with pytest.raises(InputError, match="rebalance=True"):
        compiled(2, pp=2, rebalance=False).save(tmp_path, slower=[2.0])
