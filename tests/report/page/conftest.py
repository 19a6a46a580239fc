"""Programs whose pages tests look at."""

from __future__ import annotations

import pytest

import autopar
from tests.report.page.pages import compiled


@pytest.fixture(scope="module")
def pipeline() -> autopar.ParallelProgram:
    return compiled(pp=2, microbatches=4, schedule="zb-h1", mesh={"dp": 2})


@pytest.fixture(scope="module")
def sharded() -> autopar.ParallelProgram:
    return compiled(cluster=autopar.ClusterSpec.preset("dgx-h100", nodes=1), mesh={"dp": 2, "tp": 4}, strategy="zero3")


@pytest.fixture(params=["pipeline", "sharded"])
def program(request: pytest.FixtureRequest) -> autopar.ParallelProgram:
    return request.getfixturevalue(request.param)
