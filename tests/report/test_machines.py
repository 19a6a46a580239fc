"""The manifest's facts about machines: rates of their links, and what a step's products are and take at the peak."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.device import device_preset
from autopar.report.machines import has_known_peak, machine_facts, step_work
from autopar.runtime.program.manifest import Manifest


def compiled(cluster: autopar.ClusterSpec, layers: int = 3, microbatches: int = 1) -> autopar.ParallelProgram:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
    batch = (torch.zeros(16, 32), torch.zeros(16, 32))
    return autopar.compile(
        model,
        cluster,
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        options=autopar.Options(mesh={"dp": 2}, microbatches=microbatches),
    )


def test_products_are_those_of_forward_and_of_both_gradients():
    """2 · 16 · 32 · 32 forward and for each gradient; the first layer's input has none."""
    program = compiled(autopar.ClusterSpec.homogeneous(devices=2, device="h100", devices_per_node=1))
    flops, seconds = step_work(program)
    assert flops == 2 * 16 * 32 * 32 * (3 * 3 - 1)
    assert seconds == pytest.approx(flops / device_preset("h100").peak("float32"))


def test_a_step_in_microbatches_has_the_work_of_the_whole_batch():
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100", devices_per_node=1)
    assert step_work(compiled(cluster, microbatches=4)) == pytest.approx(step_work(compiled(cluster)))


def test_the_manifest_has_them(tmp_path):
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100", devices_per_node=1, inter_bandwidth_Bps=1e10)
    out = compiled(cluster).save(tmp_path / "out")
    machines = Manifest.read(out).machines
    assert machines is not None
    assert (machines.ranks_per_node, machines.device, machines.gpu) == (1, "h100", True)
    assert [link.group_size for link in machines.links] == [1, 2]
    assert machines.links[1].bytes_per_s == cluster.levels[1].rate_Bps()
    assert machines.peak_s == pytest.approx(machines.step_flops / 2 / device_preset("h100").peak("float32"))
    assert machines.state_bytes >= 3 * 32 * 32 * 4
    data = json.loads((out / "manifest.json").read_text())
    data["machines"]["links"][0]["bytes_per_s"] = 0
    (out / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(autopar.runtime.RuntimeProgramError, match="bytes_per_s"):
        Manifest.read(out)


def test_nobody_invents_a_peak_for_a_cpu():
    assert not has_known_peak(device_preset("cpu"))
    assert machine_facts(compiled(autopar.ClusterSpec.local(2))).peak_s is None
