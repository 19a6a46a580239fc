"""A cluster file that says how often devices fail: the report says how often to save and what is left."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.cluster.reliability import Reliability
from autopar.errors import ClusterError
from autopar.report.long_run import long_run, state_bytes
from autopar.runtime.run.saving import state_bytes as saved_by_all
from autopar.runtime.step.session import Session

FILE = {
    "preset": "dgx-h100",
    "nodes": 2,
    "reliability": {
        "device_mtbf_hours": 50000,
        "restart_s": 240,
        "storage_GBps": 3,
        "spare_nodes": 1,
        "repair_hours": 12,
    },
}


def test_a_cluster_file_says_how_often_devices_fail(tmp_path: Path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(FILE))
    cluster = ClusterSpec.from_file(path)
    assert cluster.reliability == Reliability(1.8e8, 60.0, 240.0, 3e9, 1, 43200.0)
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert cluster.fingerprint() == ClusterSpec.preset("dgx-h100", nodes=2).fingerprint()  # no plan depends on it
    with pytest.raises(ClusterError, match="device_mtbf_hours"):
        ClusterSpec.from_dict({**FILE, "reliability": {"device_mtbf_hours": 0}})
    with pytest.raises(ClusterError, match="spare_node"):
        ClusterSpec.from_dict({**FILE, "reliability": {"device_mtbf_hours": 5, "spare_node": 1}})


@pytest.mark.parametrize("spares", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_the_report_says_how_often_to_save_and_the_program_does(tmp_path: Path, spares: int | None):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    reliability = {**FILE["reliability"], "device_mtbf_hours": 2.0}
    if spares is None:
        del reliability["spare_nodes"]
    program = autopar.compile(
        model,
        ClusterSpec.from_dict({**FILE, "reliability": reliability}),
        (torch.randn(32, 512), torch.randn(32, 512)),
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        options=autopar.Options(mesh={"dp": 16}),
    )
    known = long_run(program)
    assert known is not None
    assert known.failures.mtbf_s == pytest.approx(2 * 3600 / 16)
    elements = sum(p.numel() for p in model.parameters())
    assert state_bytes(program) == pytest.approx(3 * 4 * elements)
    assert known.saving.write_s == pytest.approx(3 * 4 * elements / (2 * 3e9))
    assert 0 < known.goodput < 1
    assert f"saving every {known.save_every} steps" in program.report()
    manifest = json.loads((program.save(tmp_path / "out") / "manifest.json").read_text())
    assert manifest["save_every"] == known.save_every
    plain = ClusterSpec.preset("dgx-h100", nodes=2)
    assert long_run(program.with_plan(program.plan)) is not None
    assert "failures:" not in autopar.compile(model, plain, (torch.randn(32, 512),)).report()


def test_frozen_parameters_have_no_optimizer_state_to_save() -> None:
    """All is sharded, so that what ranks save together is what the report counts, and a number of steps per tensor."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    batch, options = (torch.randn(8, 64), torch.randn(8, 64)), autopar.Options(strategy="zero3", mesh={"dp": 2})
    cluster = ClusterSpec.local(2)
    program = autopar.compile(model, cluster, batch, loss_fn=nn.functional.mse_loss, optimizer=adam, options=options)
    assert state_bytes(program) == 4 * 64 * 64 * 4, "two matrices and Adam's two of the one that is trained"

    def saved_bytes(session: Session) -> int:
        session.train_step(program.leaves(batch))
        return saved_by_all(session)

    saved = program.on_ranks(saved_bytes)[0]
    assert state_bytes(program) <= saved <= state_bytes(program) + 64
