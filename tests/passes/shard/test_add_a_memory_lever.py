"""Adding a memory lever is adding its row to `autopar/ir/memory_levers.py`: here a recompute policy and an offload kind."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import InputError
from autopar.ir.memory_levers import OFFLOAD_KINDS, RECOMPUTE_POLICIES, OffloadKind, RecomputePolicy
from tests.proof.test_offload import assert_kept
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

ZOO = BY_NAME["llama"]
ATTENTION = RecomputePolicy("attention", again=frozenset({"attention"}))
WEIGHTS = OffloadKind("weights", moves=frozenset({"parameters"}))


def compiled(cluster: autopar.ClusterSpec, **options: str) -> autopar.ParallelProgram:
    wanted = autopar.Options(pp=1, microbatches=2, strategy="zero3", **options)
    return compiled_zoo(ZOO, cluster, options=wanted)


def assert_right(program: autopar.ParallelProgram) -> None:
    found = autopar.verify(program, ZOO.make(), ZOO.batch(1))
    assert found.ok
    assert found.max_error <= 1e-9


def test_a_recompute_policy_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention is made again: its values are no longer held for backward, everything else is."""
    with pytest.raises(InputError, match="must be one of auto, none, selective, full"):
        autopar.Options(recompute="attention")
    monkeypatch.setitem(RECOMPUTE_POLICIES, "attention", ATTENTION)
    cluster = autopar.ClusterSpec.local(2)
    kept, program = compiled(cluster, recompute="none"), compiled(cluster, recompute="attention")
    made_again = [
        (program.ir.templates[name].op_calls, value)
        for name, template in program.plan.stages[0].templates.items()
        for value in template.recompute
    ]
    assert made_again
    assert all(calls[value].op.startswith("autopar.attention") for calls, value in made_again if value in calls)
    held, held_of_all = (one.account.stages[0].memory.actions["F"].after for one in (program, kept))
    assert held < held_of_all
    assert program.account.peak_bytes <= kept.account.peak_bytes
    assert_right(program)


def test_an_offload_kind_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters rest in host memory with their gradients; the optimizer's state, which no kind so far leaves, stays."""
    with pytest.raises(InputError, match="must be one of none, optimizer, activations, parameters, all, auto"):
        autopar.Options(offload="weights")
    monkeypatch.setitem(OFFLOAD_KINDS, "weights", WEIGHTS)
    cluster = autopar.ClusterSpec.local(2).with_tiers()
    program = compiled(cluster, offload="weights")
    parameters = program.stages[0].parameters.values()
    assert {(p.tier, p.optimizer_tier) for p in parameters} == {("ddr", "")}
    assert program.account.resting_bytes["parameters"] == 0
    assert program.account.resting_bytes["optimizer"] > 0
    assert_right(program)
    assert_kept(program, ZOO.batch(1))
