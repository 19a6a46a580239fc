"""Blocks that a host launches more slowly than a device computes them: the solver's bill is the account's."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.passes.price.pricer import Pricers
from autopar.passes.shard.evaluate import evaluate
from autopar.passes.shard.factors.launching import host_is_slower
from autopar.passes.shard.factors.problem import Problem
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

SMALL = [zoo for zoo in MODELS if zoo.name in ("mlp", "gpt2", "bert")]


def compiled(zoo: ZooModel, cluster: autopar.ClusterSpec) -> autopar.ParallelProgram:
    return compiled_zoo(zoo, cluster, options=autopar.Options(mesh={"dp": cluster.size}))


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", SMALL, ids=str)
def test_where_the_host_is_slower_it_is_what_the_solver_counts(zoo: ZooModel) -> None:
    program = compiled(zoo, autopar.ClusterSpec.homogeneous(devices=1, device="h100"))
    pricers = Pricers(program.cluster)
    pricer = pricers[program.plan.stages[0].mesh]
    assert all(host_is_slower(t, pricer, program.rules) for t in program.ir.templates.values() if t.op_calls)
    counted_s = evaluate(program.ir, program.plan, pricers, program.rules, program.setting).cost
    (stage,) = program.account.stages
    updated_s = stage.bill.optimizer_s + stage.bill.rest_s
    counted_s += pricer.software.constants.once_host_s - updated_s  # which the host takes too, whatever the plan
    assert pricers.least_step_s(counted_s) == pytest.approx(program.predicted.step_time_s, rel=1e-3)


@pytest.mark.slow
def test_a_host_that_launches_nothing_is_never_slower() -> None:
    program = compiled(SMALL[0], autopar.ClusterSpec.local(1))
    pricer = Pricers(program.cluster)[program.plan.stages[0].mesh]
    assert not any(host_is_slower(t, pricer, program.rules) for t in program.ir.templates.values())


def test_nothing_is_sent_to_save_what_does_not_show() -> None:
    """Small blocks on 8 ranks: one message a gradient bucket, and none between ops."""
    program = compiled_zoo(SMALL[0], autopar.ClusterSpec.preset("dgx-h100"), options=autopar.Options(pp=1))
    assert not [c for c in program.account.collectives if not c.what.startswith(("gradient", "regather", "loss"))]


@pytest.mark.parametrize("choices", [[], ["sharded"]])
def test_an_op_that_is_left_without_strategies_is_refused(choices: list[str]) -> None:
    """Along the axes of a finer mesh ops take what they took elsewhere, which may be nothing or divide nothing there."""
    program = compiled(SMALL[0], autopar.ClusterSpec.homogeneous(devices=7, device="h100"))
    calls = [call for template in program.ir.templates.values() for call in template.op_calls.values()]
    of_ops = {call.signature: [c for c in program.rules.rule(call).choices() if c] if choices else [] for call in calls}
    pricer = Pricers(program.cluster)[Mesh((("dp", 7),))].narrowed(of_ops)
    with pytest.raises(InfeasibleError, match=r"no strategy of .* is left on mesh dp=7"):
        Problem(program.ir, pricer, program.rules, replace(program.setting, microbatches=2))
