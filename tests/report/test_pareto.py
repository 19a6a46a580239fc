"""Plans that no other plan beats, beside a filter that compares every plan with every other one."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import ClusterSpec, Options, Plan
from autopar.cli.main import main
from autopar.errors import InfeasibleError, InputError
from autopar.passes.search.frontier import Costs, Option, comparable, not_beaten, whole_parts
from autopar.report.pareto import Pareto
from autopar.request import Request

LOCAL = ClusterSpec.local(2)
CLUSTER = replace(LOCAL, devices=((2, replace(LOCAL.device(0), busy_watts=65.0, idle_watts=15.0)),))
STEP: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3)}
Four = tuple[float, float, int, float]


def model() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return layers, (torch.empty(4096, 64), torch.empty(4096, 64))


def found(cluster: ClusterSpec = CLUSTER, **asked: Any) -> Pareto:
    layers, batch = model()
    return autopar.pareto(layers, cluster, batch, **STEP, **asked)


def compiled(cluster: ClusterSpec, **asked: Any) -> autopar.Program:
    layers, batch = model()
    return autopar.compile(layers, cluster, batch, **STEP, **asked)


@pytest.fixture(scope="module")
def pareto() -> Pareto:
    with mock.patch.object(Request, "capture", autospec=True, side_effect=Request.capture) as capture:
        result = found()
    assert capture.call_count == 1
    return result


def four(costs: Any, devices: int) -> Four:
    joules = costs.energy_J
    assert joules is not None
    return getattr(costs, "step_s", None) or costs.step_time_s, costs.peak_bytes, devices, joules


def is_beaten(one: Four, by: Four) -> bool:
    return one != by and all(b <= a for a, b in zip(one, by, strict=True))


def test_rows_are_what_no_plan_beats_and_every_other_plan_is_beaten_by_the_row_it_names(pareto: Pareto) -> None:
    rows = [four(row.predicted, row.devices) for row in pareto.rows]
    others = [four(one.costs, one.costs.devices) for one in pareto.beaten]
    assert len(others) > 0
    assert len(rows) > 2
    assert [one for one, by in product(rows, [*rows, *others]) if is_beaten(one, by)] == []
    assert all(is_beaten(own, rows[one.by]) for own, one in zip(others, pareto.beaten, strict=True))
    assert {row.devices for row in pareto.rows} == {1, 2}
    for name, index in {"seconds": 0, "bytes": 1, "devices": 2, "energy": 3}.items():
        least = min(row[index] for row in rows)
        assert [name in row.best_in for row in pareto.rows] == [row[index] == least for row in rows]


def test_the_plan_of_every_row_compiled_alone_costs_the_same(pareto: Pareto) -> None:
    best = compiled(CLUSTER)
    assert pareto.rows[0].predicted.step_time_s <= best.predicted.step_time_s
    for row, data in zip(pareto.rows, pareto.to_dict()["rows"], strict=True):
        plan = Plan.from_dict(json.loads(json.dumps(data["plan"])))
        program = compiled(row.cluster, plan=plan)
        assert program.predicted == row.predicted
        assert program.plan.stages == row.plan.stages


def test_plans_within_less_memory_are_among_them(pareto: Pareto) -> None:
    fastest = pareto.rows[0]
    own = [row.predicted.peak_bytes for row in pareto.rows if row.devices == fastest.devices]
    assert min(own) <= fastest.predicted.peak_bytes / 2


costs = st.builds(Costs, *(st.integers(1, 4).map(float),) * 2, st.integers(1, 3), st.integers(1, 4).map(float))


@settings(max_examples=40)
@given(st.lists(costs, max_size=12))
def test_the_filter_is_that_of_all_pairs(several: list[Costs]) -> None:
    options = [Option(None, None, one, None) for one in several]  # type: ignore[arg-type]
    fours = {(c.step_s, c.peak_bytes, c.devices, c.energy_J) for c in several}
    kept = [(o.costs.step_s, o.costs.peak_bytes, o.costs.devices, o.costs.energy_J) for o in not_beaten(options)]
    assert len(kept) == len(set(kept))
    assert {*kept} == {one for one in fours if not any(is_beaten(one, by) for by in fours)}  # type: ignore[arg-type]


def test_joules_of_nobody_count_where_those_of_one_are_not_known() -> None:
    known, unknown = Costs(1.0, 1.0, 1, 5.0), Costs(2.0, 1.0, 1, None)
    options = [Option(None, None, one, None) for one in (known, unknown)]  # type: ignore[arg-type]
    assert [one.costs.energy_J for one in comparable(options)] == [None, None]
    assert len(not_beaten(comparable(options))) == 1


def test_parts_are_nodes_or_devices_of_one_node() -> None:
    assert whole_parts(ClusterSpec.local(6)) == [1, 2, 4, 6]
    assert whole_parts(ClusterSpec.preset("dgx-h100", nodes=5)) == [8, 16, 32, 40]


def test_what_fits_nowhere_is_refused_as_by_compile() -> None:
    with pytest.raises(InfeasibleError):
        found(options=Options(memory_bytes=64, explain_s=0))
    with pytest.raises(InputError, match="halvings"):
        found(halvings=-1)


def test_a_plot_is_svg_or_png(pareto: Pareto, tmp_path: Path) -> None:
    svg = pareto.plot(tmp_path / "plans.svg").read_text()
    assert svg.count("<title>") == len(pareto.rows)
    assert pareto.plot(tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"\.svg or \.png"):
        pareto.plot(tmp_path / "plans.pdf")


def test_the_command_gives_the_same_rows(
    pareto: Pareto, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.api.pareto", lambda **asked: asked["halvings"] == 1 and pareto)
    command = ["plan", "tests.cli.test_plan:mlp", "--cluster", "dgx-h100"]
    assert main([*command, "--pareto", "--json", "--plot", str(tmp_path / "plans.svg")]) == 0
    assert json.loads(capsys.readouterr().out) == pareto.to_dict()
    assert (tmp_path / "plans.svg").exists()
    assert main([*command, "--pareto"]) == 0
    shown = capsys.readouterr().out
    assert "plans that no other plan beats" in shown
    assert all(one.reason(pareto.rows[one.by]) in shown for one in pareto.beaten)
    assert main([*command, "--plot", "x.svg"]) == 2
    assert "--pareto" in capsys.readouterr().err
    assert main([*command, "--pareto", "--out", "plan.json"]) == 2
