"""Programs whose plans are exported: what is written, lost, and what it costs; and FSDP2 code that trains as the plans do."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.export import main
from autopar.errors import InputError
from autopar.exchange.exported import exchangeable, write_plan
from autopar.exchange.formats import FORMATS
from autopar.exchange.from_plan import layout_of
from autopar.exchange.layout import StageUnits
from tests.exchange.cases import STACKS, STEPS, batch_of, program_of
from tests.exchange.megatron_table import faults
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

ROOT = Path(__file__).parent.parent.parent
LLAMA = BY_NAME["llama"]


@pytest.fixture(scope="module")
def llama() -> autopar.Program:
    options = autopar.Options(
        mesh={"dp": 2, "tp": 2},
        strategy="megatron-zero1",
        microbatches=2,
        recompute="none",
        offload="none",
        overlap=False,
    )
    return compiled_zoo(LLAMA, 4, options=options)


def test_a_plan_is_a_layout(llama: autopar.Program) -> None:
    layout, _ = layout_of(llama)
    assert (layout.dp, layout.tp, layout.pp, layout.zero, layout.recompute) == (2, 2, 1, 1, "none")
    assert (layout.micro_batch, layout.global_batch, layout.sequence_parallel) == (2, 8, True)
    styles = {name.rpartition(".")[2]: style for name, style in layout.modules.items()}
    products = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}
    assert styles == products | {"gate": "colwise", "up": "colwise", "down": "rowwise"} | {
        "embed": "vocab",
        "head": "colwise_gather",
    }


def test_a_pipeline_is_a_layout() -> None:
    options = autopar.Options(pp=2, microbatches=4, schedule="zb-h1", stage_boundaries=["blocks.2"], idle_ranks=False)
    layout, _ = layout_of(compiled_zoo(LLAMA, 2, options=options))
    assert (layout.dp, layout.pp, layout.virtual_stages, layout.schedule) == (1, 2, 1, "zb-h1")
    assert layout.stages == (StageUnits(2, embedding=True), StageUnits(1, loss=True))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_it_loses_and_costs(name: str, llama: autopar.Program, tmp_path: Path) -> None:
    exported = llama.export(name, tmp_path, price=name == "fsdp2")
    lost = {one.what.partition(" = ")[0] for one in exported.not_carried}
    loss = "a loss that is divided by a count over the whole batch"
    expected = {
        "fsdp2": {"zero", "sequence_parallel"},
        "tp_plan": {"zero", "sequence_parallel"},
        "accelerate": {"zero", "sequence_parallel"},
        "megatron": {"styles of single modules"},
        "torchtitan": {"zero", "styles of single modules"},
        "deepspeed": {"sequence_parallel", "styles of single modules"},
    }
    assert lost == expected[name] | {loss}
    assert all(path.stat().st_size for path in exported.files)
    if name == "fsdp2":
        assert exported.exported is not None
        assert exported.exported.step_time_s > exported.plan.step_time_s  # parameters are gathered
        ast.parse(exported.files[0].read_text())
    else:
        assert exported.unpriced in str(exported)
    if name == "megatron":
        assert faults(exported.files[0].read_text()) == []


def test_a_saved_program_is_exported_as_it_was_when_it_was_compiled(
    llama: autopar.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama.save(tmp_path / "saved")
    for name in FORMATS:
        own = llama.export(name, tmp_path / "own" / name, price=False)
        assert main([str(tmp_path / "saved"), "--plan", name, str(tmp_path / "again" / name)]) == 0
        for path in own.files:
            assert (tmp_path / "again" / name / path.name).read_text() == path.read_text()
        said = capsys.readouterr().out
        assert all(f"not carried: {one}" in said for one in own.not_carried)
        assert "the model is not in the directory" in said


def test_a_plan_alone_is_no_program_to_export(
    llama: autopar.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama.plan.save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--plan", "megatron", str(tmp_path)]) == 2
    assert "autopar plan MODEL" in capsys.readouterr().err


def test_an_exported_layout_that_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    """Shards of 24 large products fit where the copies that a tp_plan leaves do not."""
    cluster = autopar.ClusterSpec.homogeneous(devices=8, device="h100", devices_per_node=8)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(24)))
        x = torch.zeros(8, 16384)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    options = autopar.Options(mesh={"dp": 8}, strategy="zero3", microbatches=1, recompute="none", offload="none")
    loss_fn = nn.functional.mse_loss
    program = autopar.compile(model, cluster, (x, x), loss_fn=loss_fn, optimizer=optimizer, options=options)
    exported = program.export("tp_plan", tmp_path)
    assert exported.exported is not None
    assert exported.over_bytes > exported.exported.peak_bytes - cluster.device(0).memory_bytes > 0
    assert "the exported layout does not fit: " in str(exported)
    assert program.export("accelerate", tmp_path).over_bytes == 0


def test_a_layout_that_says_the_plan_costs_what_the_plan_does(tmp_path: Path) -> None:
    options = autopar.Options(mesh={"dp": 4}, strategy="zero3", microbatches=1, recompute="none", offload="none")
    exported = compiled_zoo(BY_NAME["mlp"], 4, options=options).export("accelerate", tmp_path / "a.yaml")
    assert exported.files == (tmp_path / "a.yaml",)
    assert exported.exported is not None
    assert exported.exported.step_time_s == pytest.approx(exported.plan.step_time_s)
    assert exported.exported.peak_bytes == pytest.approx(exported.plan.peak_bytes)


def test_stages_on_other_numbers_of_ranks_are_refused_by_formats_that_have_stages(tmp_path: Path) -> None:
    options = autopar.Options(pp=2, microbatches=4, stage_boundaries=["blocks.2"], idle_ranks=False)
    plan = exchangeable(compiled_zoo(LLAMA, 2, options=options))
    unequal = dataclasses.replace(plan, facts=dataclasses.replace(plan.facts, ranks=3))
    with pytest.raises(InputError, match=r"one mesh for all stages.*Options\(pp=1\)"):
        write_plan(unequal, "megatron", tmp_path, "")
    assert write_plan(unequal, "fsdp2", tmp_path, "").layout.ranks == 3


def test_an_unknown_format_is_refused(llama: autopar.Program, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="known: fsdp2"):
        llama.export("nemo", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "package", "cases"), STACKS, ids=lambda one: one if isinstance(one, str) else "")
def test_zoo_plans_train_elsewhere_as_they_do_here(
    name: str, package: str, cases: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    expected = {}
    for case in cases:
        zoo = BY_NAME[case.partition("_")[0]]
        program = program_of(zoo, case)
        layout = program.export(name, tmp_path / case, price=False).layout
        said = {"dp": layout.dp, "tp": layout.tp, "micro_batch": layout.micro_batch}
        (tmp_path / case / "layout.json").write_text(json.dumps(said))
        expected[case] = [float(one) for one in program.run([batch_of(zoo, seed) for seed in range(STEPS)]).losses]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    worker = str(Path(__file__).with_name("worker.py"))
    done = subprocess.run(
        [*torchrun, worker, name, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = {case: json.loads((tmp_path / case / "losses.json").read_text()) for case in cases}
    assert found == {case: pytest.approx(losses, rel=1e-9) for case, losses in expected.items()}
