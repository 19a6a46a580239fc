"""Compressed gradients from the option to the step: what a plan says, sends, costs and holds, and what training makes of it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.lowered import StoredParameter
from autopar.runtime.gradients.compression import CODECS
from tests.proof.test_memory_measured import WIDE, assert_kept
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

FASTER = 0.1
SGD = functools.partial(torch.optim.SGD, lr=FASTER)
BYTES = {"bf16": 0.5, "int8": 257 / 1024}


class Linear(nn.Module):
    """A layer whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ self.w + self.b) * weight).sum()


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 16, generator=make), torch.randn(rows, 32, generator=make)


@functools.cache
def linear(compression: str | None, strategy: str = "auto", ranks: int = 4) -> tuple[autopar.ParallelProgram, Linear]:
    torch.manual_seed(0)
    model, options = Linear(), autopar.Options(gradient_compression=compression, strategy=strategy, pp=1)
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(model, cluster, batch_of(8), optimizer=SGD, options=options), model


def trained(program: autopar.ParallelProgram) -> list[StoredParameter]:
    return [p for stage in program.lowered.stages for p in stage.parameters.values() if p.contributions]


@pytest.mark.parametrize("name", CODECS)
def test_a_plan_says_it_and_is_replayed(name: str) -> None:
    program, model = linear(name, "dp")
    data = json.loads(program.plan.to_json())
    assert data["gradient_compression"] == name
    assert [p.compression for p in trained(program)] == [name] * 2
    assert f"compression='{name}'" in program.sources[0]
    assert f"2 of 2 gradients travel as {name}" in program.report()
    again = autopar.compile(model, program.cluster, batch_of(8), optimizer=SGD, plan=program.plan)
    assert again.sources == program.sources
    plain = replace(program.plan, gradient_compression="")
    assert plain != program.plan
    assert not any(p.compression for p in trained(autopar.compile(model, program.cluster, batch_of(8), plan=plain)))
    with pytest.raises(autopar.PlanError, match="this plan has gradient_compression=''"):
        autopar.compile(model, program.cluster, batch_of(8), options=program.options, plan=plain)


def test_nothing_is_compressed_unasked() -> None:
    program, _ = linear(None, "dp")
    assert "gradient_compression" not in program.plan.to_json()
    assert "compression" not in "".join(program.sources) + program.report()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_messages_are_priced_as_they_are_sent(name: str, strategy: str) -> None:
    """An exchange for every sum, a gather more for those that are wanted whole, of so many bytes; w is 2048 bytes."""
    program, _ = linear(name, strategy)
    sent = {c.kind: c.nbytes for c in program.account.stages[0].collectives if c.what == "gradient w"}
    kinds = ["all_to_all", "all_gather"] if strategy == "dp" else ["all_to_all"]
    assert sent == pytest.approx(dict.fromkeys(kinds, 2048 * BYTES[name]))


def test_compression_pays_where_links_are_slow_and_costs_where_they_are_fast() -> None:
    zoo = WIDE[0]

    def step_s(bandwidth: float, name: str | None) -> float:
        cluster = autopar.ClusterSpec.local(4)
        levels = tuple(replace(level, bandwidth_Bps=bandwidth) for level in cluster.levels)
        options = autopar.Options(strategy="dp", gradient_compression=name)
        program = compiled_zoo(zoo, replace(cluster, levels=levels), optimizer=SGD, options=options)
        return program.predicted.step_time_s

    slow, fast = ([step_s(b, name) for name in (None, "bf16", "int8")] for b in (1e7, 1e11))
    assert slow[2] < 0.6 * slow[1] < 0.6 * 0.6 * slow[0]
    assert fast[0] < fast[1] < fast[2]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_programs_hold_what_was_predicted(name: str, strategy: str) -> None:
    zoo = WIDE[0]
    options = autopar.Options(strategy=strategy, gradient_compression=name, microbatches=2)
    program = compiled_zoo(zoo, 2, options=options)
    assert_kept(program, zoo.batch(1))
    kept = program.account.stages[0].memory.resting.get("unsent gradients", 0.0)
    assert kept == (sum(p.type.nbytes for p in trained(program)) if name == "int8" else 0.0)


def test_verify_leaves_it_out_and_says_so() -> None:
    program, model = linear("int8", "dp")
    verification = autopar.verify(program, model, batch_of(8))
    assert verification.ok
    assert verification.notes == ("gradient_compression='int8' is left out: it rounds, and changes training",)
    program, model = linear(None, "dp")
    assert not autopar.verify(program, model, batch_of(8)).notes


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
def test_what_feedback_holds_back_does_not_grow(seed: int) -> None:
    """Random plans: after many steps of one gradient parameters are where eager's are, but for what is unsent now."""
    program, model = linear("int8")
    program = program.with_plan(autopar.random_plan(program, seed))
    assert program.plan.gradient_compression == "int8"
    steps, batch = 60, batch_of(8)
    model.zero_grad()
    model(*batch).backward()

    def body(session):  # type: ignore[no-untyped-def]
        for _ in range(steps):
            session.train_step(list(batch))
        return {name: session.gather_full(name) for name in ("w", "b")}

    for values in program.on_ranks(body):
        for name, p in model.named_parameters():
            assert p.grad is not None
            unsent = (values[name] - (p - steps * FASTER * p.grad)).abs().max() / FASTER
            largest = 4 * max(p.grad.abs().max(), 8.0)  # of one rank's gradient, 8 times that of a sample
            assert unsent <= 4 * 2 * largest / 127 + 1e-3, (name, unsent)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CODECS)
def test_training_goes_as_without(name: str) -> None:
    zoo = BY_NAME["mlp"]

    def losses(compression: str | None) -> list[float]:
        torch.manual_seed(0)
        options = autopar.Options(strategy="zero1", gradient_compression=compression)
        program = compiled_zoo(zoo, 2, optimizer=SGD, options=options)
        return [loss.item() for loss in program.run([zoo.batch()], 60).losses]

    plain, low = losses(None), losses(name)
    assert low[-1] < 0.8 * low[0]
    assert low[-1] == pytest.approx(plain[-1], rel=0.02)
    assert low != plain


def test_what_does_not_go_together_is_refused() -> None:
    compiled = functools.partial(autopar.compile, Linear(), autopar.ClusterSpec.local(2), batch_of(8), optimizer=SGD)
    int8, bf16 = (autopar.Options(gradient_compression=name) for name in ("int8", "bf16"))
    with pytest.raises(autopar.InputError, match="in units of a loss scale that moves; use 'bf16'"):
        compiled(loss_scaling=True, options=int8)
    with pytest.raises(autopar.InputError, match="may reduce gradients in other ways; use 'bf16'"):
        compiled(buckets={"0": {0: (8, 4)}, "1": {0: (8, 4)}}, options=int8)
    with pytest.raises(autopar.InputError, match=r"Options.gradient_compression must be one of bf16, int8, got 'int4'"):
        autopar.Options(gradient_compression="int4")
    compiled(loss_scaling=True, options=bf16)


def test_gradients_of_16_bits_travel_as_they_are() -> None:
    model = Linear().bfloat16()
    batch = tuple(t.bfloat16() for t in batch_of(8))
    options = autopar.Options(gradient_compression="int8", strategy="dp")
    program = autopar.compile(model, autopar.ClusterSpec.local(2), batch, optimizer=SGD, options=options)
    assert not any(p.compression for p in trained(program))
    assert "0 of 2 gradients travel as int8" in program.report()
