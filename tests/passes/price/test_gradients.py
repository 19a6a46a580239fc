"""Gradients that are packed into messages and those that are reduced where they lie: what the price says, the runtime does."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir import lines as ir
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.played.gradients import PlayedStore, sent_buckets, sent_in_place
from autopar.passes.price.lines import stored_s
from autopar.passes.rules.memo import Memo
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.gradients.buckets import Buckets

from .test_parameter_clock import ALL_REDUCE, MIB, ON_DP, SCATTER, of_mib, pricer, staged

PASSES = pricer(passes=True)
LARGE = of_mib("large", 32)


def stage_of(*parameters: StoredParameter, owned: bool = True) -> LoweredStage:
    return staged([], [ir.AddGradient("g", p.name, owned) for p in parameters], *parameters)


def copied_bytes(p: StoredParameter, stage: LoweredStage, owned: bool = True) -> float:
    """Bytes that a rank reads and writes for all contributions to a gradient in a step."""
    times = p.contributions * stage.microbatches
    return times * stored_s(ir.AddGradient("g", p.name, owned), {}, stage, PASSES) / PASSES.copy_s


def test_a_large_gradient_that_nobody_else_holds_is_not_copied_into_a_message() -> None:
    assert copied_bytes(LARGE, stage_of(LARGE)) == 0
    assert copied_bytes(LARGE, stage_of(LARGE, owned=False)) == pytest.approx(2 * 32 * MIB)
    scattered = of_mib("large", 32, ON_DP, SCATTER)
    assert copied_bytes(scattered, stage_of(scattered, owned=False)) == 0


def test_a_sum_over_microbatches_is_the_stores_own() -> None:
    stage = replace(stage_of(LARGE, owned=False), microbatches=4)
    assert copied_bytes(LARGE, stage) == pytest.approx(3 * 3 * 32 * MIB)


def test_how_large_depends_on_what_was_sent_before() -> None:
    """The first message is small, so that it is early; later ones have half of what is left of the step, up to a bucket."""
    first, second = of_mib("first", 2), of_mib("second", 10)
    assert sent_in_place(stage_of(first, second), Memo()) == {"first", "second"}
    assert sent_in_place(stage_of(first, second, of_mib("rest", 64)), Memo()) == {"first", "rest"}


def test_when_gradients_are_reduced_does_not_change_the_last_messages_which_are_played_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last microbatch sends what it sends, whatever those before it have sent."""
    played, play = [0], PlayedStore.drain

    def counted(store: PlayedStore) -> None:
        played[0] += 1
        play(store)

    monkeypatch.setattr(PlayedStore, "drain", counted)
    parameters = [of_mib("first", 2), of_mib("second", 10), of_mib("rest", 64)]
    early = [replace(p, by_microbatch=True) for p in parameters]
    memo, stages = Memo(), [replace(stage_of(*of), microbatches=4) for of in (parameters, early)]
    late, soon = (sent_buckets(stage, memo) for stage in stages)
    assert late == soon == sent_buckets(replace(stages[1]), Memo())
    assert played == [2]


def test_a_compressed_gradient_is_packed() -> None:
    assert sent_in_place(stage_of(replace(LARGE, compression="int8")), Memo()) == frozenset()


def test_a_gradient_whose_parts_are_exchanged_first_is_nobody_elses() -> None:
    exchange = RuntimeStep("all_to_all", ("dp",), (1, 0))
    type_ = TensorType((16 * MIB // 4, 2), torch.float32)
    exchanged = replace(LARGE, type=type_, optimizer=Spec(((), ("dp",))), reduce=(exchange, ALL_REDUCE))
    assert sent_in_place(stage_of(exchanged, owned=False), Memo()) == {"large"}


# --- against the runtime


class Layers(nn.Module):
    """Weights of 8, 16 and 2 MiB, and biases; the second is used twice, so its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 2048)
        self.again = nn.Linear(2048, 2048, bias=False)
        self.out = nn.Linear(2048, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(torch.relu(self.again(self.wide(x)))))


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_what_is_sent_in_place_is_what_the_runtime_sends_so(
    monkeypatch: pytest.MonkeyPatch, strategy: str, microbatches: int
) -> None:
    options = autopar.Options(strategy=strategy, microbatches=microbatches, mesh={"dp": 2})
    batch = (torch.randn(8, 1024), torch.randn(8, 256))
    program = autopar.compile(
        Layers(),
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=options,
    )
    launched: list[tuple[tuple[str, ...], bool]] = []
    launch = Buckets._launch

    def noted(buckets: Buckets, kind: str, axes: Any, items: list[Any], packed: bool) -> None:
        if buckets.comm.rank == 0:
            launched.append((tuple(item.name for item in items), packed))
        launch(buckets, kind, axes, items, packed)

    monkeypatch.setattr(Buckets, "_launch", noted)

    def rank(comm: Comm) -> None:
        session = program.in_process.session(comm, program.request.update, program.options.seed)
        session.load_weights(program.weights())
        session.train_step(list(batch))

    run_threads(2, program.plan.stages[0].mesh.sizes, rank)
    (stage,) = program.lowered.stages
    alone = {names[0] for names, packed in launched if not packed}
    assert alone
    assert alone < set(stage.parameters)
    assert sent_in_place(stage, Memo()) == alone
