"""Copies of parameters in lower precision, made once a step: the same numbers as casts at every use, counted, where they fit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.plan import Plan
from autopar.runtime.run.sdc_check import recompute
from autopar.runtime.step.session import Session
from tests.proof.test_memory_measured import assert_kept
from tests.zoo.models import ADAMW, BY_NAME
from tests.zoo.programs import compiled_zoo

LLAMA = BY_NAME["llama"]
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "dp", "microbatches": 2},
    "zero3": {"strategy": "zero3", "microbatches": 2},
    "tp": {"strategy": "megatron"},
    "1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 4},
    "parameters offloaded": {"strategy": "zero3", "offload": "parameters"},
}


def with_copies(plan: Plan, narrow: bool = True) -> Plan:
    """The plan with copies of all parameters that calls read in lower precision, or with none."""
    stages = (
        replace(stage, parameters={n: replace(p, narrow=narrow) for n, p in stage.parameters.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


@functools.cache
def program(way: str) -> autopar.ParallelProgram:
    tiers = autopar.ClusterSpec.local(2).with_tiers() if "offload" in WAYS[way] else 2
    options = autopar.Options(precision="bf16", **WAYS[way])
    return compiled_zoo(LLAMA, tiers, optimizer=ADAMW, options=options)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_the_same_to_the_last_bit(way: str) -> None:
    plain, batch = program(way), LLAMA.batch()
    copies = plain.with_plan(with_copies(plain.plan))
    assert all(map(torch.equal, copies.run(batch, steps=3).losses, plain.run(batch, steps=3).losses))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_hold_what_was_predicted(way: str) -> None:
    assert_kept(program(way).with_plan(with_copies(program(way).plan)), LLAMA.batch())


def test_verify_compares_a_program_with_copies() -> None:
    copies = program("dp").with_plan(with_copies(program("dp").plan))
    assert autopar.verify(copies, LLAMA.make(), LLAMA.batch()).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["dp", "zero3"])
def test_neighbours_recompute_with_copies_of_what_they_are_sent(way: str) -> None:
    copies = program(way).with_plan(with_copies(program(way).plan))
    leaves = copies.leaves(LLAMA.batch())

    def body(session: Session) -> None:
        session.train_step(leaves)
        recompute(session, leaves, 2, ["one", "other"])

    copies.in_process.run(copies.weights(), copies.request.update, copies.options.seed, body)


def on_gpus(**options: Any) -> autopar.ParallelProgram:
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100")
    return compiled_zoo(LLAMA, cluster, optimizer=ADAMW, options=autopar.Options(**({"strategy": "dp"} | options)))


def test_gpus_have_copies_where_they_fit() -> None:
    """Every weight of a product is cast once for forward, backward and all microbatches; norms read their weights as they are."""
    roomy = on_gpus(precision="bf16", microbatches=1)
    rows = roomy.plan.stages[0].parameters
    assert {name for name, p in rows.items() if not p.narrow} == {n for n in rows if "norm" in n}
    casting = roomy.with_plan(with_copies(roomy.plan, narrow=False))
    weights = sum(p.type.nbytes for name, p in roomy.ir.parameters.items() if "norm" not in name)
    resting = [one.account.resting_bytes["parameters"] for one in (roomy, casting)]
    assert resting[0] - resting[1] == weights / 2
    assert roomy.account.step_time_s < casting.account.step_time_s
    peaks = [max(one.account.peaks) for one in (roomy, casting)]
    short = on_gpus(precision="bf16", microbatches=1, memory_bytes=sum(peaks) / 2)
    assert not any(p.narrow for p in short.plan.stages[0].parameters.values())


def test_without_mixed_precision_there_are_none() -> None:
    assert not any(p.narrow for p in on_gpus().plan.stages[0].parameters.values())


def test_kernels_that_widen_what_they_read_give_the_same_bits() -> None:
    """Programs for GPUs leave casts to a wider dtype to the kernels that read them; here the same plan runs on a CPU."""
    gpus, cpus = on_gpus(precision="bf16", microbatches=2), program("dp")
    texts = [one.in_process.stages[0].__source__ for one in (gpus, cpus)]
    assert texts[0].count(".to(torch.float32)") < texts[1].count(".to(torch.float32)")
    batch = LLAMA.batch()
    assert all(map(torch.equal, gpus.run(batch, steps=3).losses, cpus.run(batch, steps=3).losses))


@pytest.mark.slow
def test_a_pipeline_has_copies_in_the_stages_that_have_room() -> None:
    def pipeline(**options: Any) -> autopar.ParallelProgram:
        return on_gpus(precision="bf16", strategy="auto", pp=2, schedule="1f1b", microbatches=4, **options)

    def copying(one: autopar.ParallelProgram) -> list[bool]:
        return [any(p.narrow for p in stage.parameters.values()) for stage in one.plan.stages]

    roomy = pipeline()
    assert copying(roomy) == [True, True]
    peaks = roomy.account.peaks
    assert peaks[0] != peaks[1]
    fewer = copying(pipeline(memory_bytes=max(peaks) - 256, stage_boundaries=[boundary(roomy)]))
    assert fewer == [peak < max(peaks) for peak in peaks]


def boundary(one: autopar.ParallelProgram) -> str:
    """The module at which the second of two stages begins."""
    return one.ir.calls[one.plan.stages[1].calls[0]].path
