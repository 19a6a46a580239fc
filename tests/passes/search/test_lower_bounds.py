"""No plan takes less than the lower bounds say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.build import capture_program
from autopar.cluster import ClusterSpec
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.lower_bounds import least_busy_s
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import Task

MESHES = [Mesh.of(dp=1), Mesh.of(dp=4), Mesh.of(dp=2, tp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("width", [16, 4096], ids=["launches decide", "products decide"])
def test_no_rank_is_busy_for_less_than_the_bound(width: int, mesh: Mesh) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), torch.zeros(2 * width, width)
    captured, rules = capture_program(model, (x, x), nn.functional.mse_loss, 1), RuleBook()
    batches = Microbatches(captured, rules)
    task = Task(captured.program, ClusterSpec.preset("dgx-h100"), rules, Setting(2), Options(microbatches=2), batches)
    plan = SubmeshPlans(TasksByCount(task, 2 * width)).on(2, mesh)
    assert plan is not None
    units, least_s = plan.units, least_busy_s(task, mesh)
    busy_s = float(sum(seconds.sum() for seconds in (units.forward_s, units.backward_s, units.weights_s)))
    assert 0.2 * busy_s < least_s <= busy_s * (1 + 1e-9)
