"""Joules of a step: devices one by one, busy and waiting, beside the account's own sum over runs of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import ClusterSpec, Options
from autopar.cluster.device import device_from_dict, device_names, device_preset
from autopar.errors import ClusterError
from autopar.passes.account.energy import least_energy_J, step_energy_J
from autopar.runtime.data.fields import to_data
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

ZOO = BY_NAME["mlp"]
FAST = replace(device_preset("h100"), idle_watts=90.0)
SLOW = device_preset("a100")


def mixed(*devices: object) -> ClusterSpec:
    cluster = ClusterSpec.homogeneous(devices=4, device="h100", devices_per_node=4)
    return replace(cluster, devices=tuple((2, device) for device in devices))


def one_by_one(program: autopar.Program) -> float:
    """Joules, rank by rank."""
    joules = 0.0
    for rank in range(program.plan.ranks):
        device, busy_s = program.cluster.device(rank), program.account.busy_s[program.group_of(rank)]
        assert device.busy_watts
        waits_s = program.predicted.step_time_s - busy_s
        joules += busy_s * device.busy_watts + waits_s * (device.idle_watts or device.busy_watts)
    return joules


@pytest.fixture(scope="module")
def pipeline() -> autopar.Program:
    return compiled_zoo(ZOO, mixed(FAST, SLOW), options=Options(pp=2, microbatches=4))


def test_every_device_counts_with_its_own_watts_while_it_computes_and_while_it_waits(pipeline: autopar.Program) -> None:
    assert pipeline.predicted.energy_J == pytest.approx(one_by_one(pipeline), rel=1e-12)
    assert pipeline.plan.predicted["energy_J"] == pipeline.predicted.energy_J
    least = least_energy_J(pipeline.plan, pipeline.predicted.step_time_s, pipeline.cluster)
    assert least is not None
    assert 0 < least < pipeline.predicted.energy_J


def test_what_is_not_known_is_not_zero(pipeline: autopar.Program) -> None:
    unknown = mixed(FAST, replace(SLOW, busy_watts=None))
    assert step_energy_J(pipeline.plan, pipeline.account, unknown) is None
    assert least_energy_J(pipeline.plan, 1.0, unknown) is None
    program = compiled_zoo(ZOO, 2)
    assert program.predicted.energy_J is None
    assert "energy_J" not in program.plan.predicted
    assert "energy:" not in program.report()


def test_the_report_says_joules_and_what_they_are_counted_by(pipeline: autopar.Program) -> None:
    (line,) = (line for line in pipeline.report().split("\n") if line.startswith("energy:"))
    assert line.startswith("energy: at most ")
    assert "h100 700 W, waiting 90 W" in line
    assert "a100 400 W" in line


def test_watts_are_figures_of_a_device_on_which_no_plan_depends() -> None:
    device = device_from_dict({"preset": "h100", "busy_watts": 650, "idle_watts": 80})
    assert device_from_dict(to_data(device)) == device
    assert {name for name in device_names() if device_preset(name).busy_watts is None} == {"b300", "cpu"}
    with pytest.raises(ClusterError, match="busy_watts"):
        device_from_dict({"preset": "h100", "busy_watts": -1})
    assert mixed(FAST, SLOW).fingerprint() == mixed(replace(FAST, busy_watts=None, idle_watts=None), SLOW).fingerprint()
