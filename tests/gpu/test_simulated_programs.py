"""Emitted programs of the zoo on simulated GPUs: no races, no memory given back early, every message met."""

from __future__ import annotations

import pytest

import autopar
from tests.gpu.simulated import simulated
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_data_parallel_steps_are_in_order(name: str) -> None:
    zoo = BY_NAME[name]
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100")
    program = compiled_zoo(zoo, cluster, options=autopar.Options(strategy="dp"))
    found = simulated(program, zoo.batch())
    assert not found.findings, found
