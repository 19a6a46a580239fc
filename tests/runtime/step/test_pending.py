"""Gradients of several batches that one update takes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.errors import CheckpointError, RuntimeProgramError
from tests.runs_worker import ADAMW, batch, compiled, model

CLIPPED = {"clip_grad_norm": 0.1}


def eager(updates: int, each: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop of torch's: so many batches before an update."""
    own, losses = model(), []
    optimizer = ADAMW(own.parameters())
    for n in range(updates * each):
        loss = own(*batch(seed=n))
        loss.backward()
        losses.append(loss.item())
        if n % each == each - 1:
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(own.state_dict())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["dp", "zero2", "zero3"])
@pytest.mark.parametrize("each", [1, 3])
def test_batches_before_an_update_add_up_as_in_a_loop_of_torch(strategy: str, each: int) -> None:
    program = compiled(2, strategy=strategy, microbatches=2, update=CLIPPED)

    def body(session: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        calls = range(2 * each)
        losses = [session.train_step(list(batch(seed=n)), update=n % each == each - 1).item() for n in calls]
        return losses, {name: session.gather_full(name) for name in program.weights()}

    losses, state = eager(2, each)
    for told, full in program.on_ranks(body):
        torch.testing.assert_close(told, losses, rtol=1e-9, atol=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)


def test_no_state_is_read_while_gradients_wait() -> None:
    program = compiled(2)

    def body(session: Any) -> None:
        session.train_step(list(batch()), update=False)
        with pytest.raises(CheckpointError, match="gradients of 1 batches wait"):
            session.state_entries()
        session.train_step(list(batch()))
        session.state_entries()

    program.on_ranks(body)


def test_gradients_in_a_tier_are_not_added_up() -> None:
    cluster = autopar.ClusterSpec.local(2).with_tiers()
    program = compiled(cluster, offload="parameters")
    take = functools.partial(lambda session: session.train_step(list(batch()), update=False))
    with pytest.raises(RuntimeProgramError, match="memory tier"):
        program.on_ranks(take)
