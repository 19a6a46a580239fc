"""A model whose training needs three times the memory of a rank trains on four ranks, each held to that limit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import autopar
from tests.measure import measure_peak, train_within
from tests.zoo import transformers
from tests.zoo.models import ids

RANKS, TIMES, STEPS = 4, 3, 4
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.Llama(128, 32, 64, 4).to(dtype)


def batches() -> list[Any]:
    torch.manual_seed(1)
    return [(ids(8, 32, 128),) * 2 for _ in range(STEPS)]


def compiled(ranks: int, **options: Any) -> autopar.Program:
    return autopar.compile(
        make_model(),
        autopar.ClusterSpec.local(ranks),
        batches()[0],
        optimizer=ADAMW,
        options=autopar.Options(**options),
    )


@functools.cache
def needed() -> float:
    """Bytes that training takes on one rank, measured: nothing is made again, the batch is taken at once."""
    (peak,) = measure_peak(compiled(1, recompute="none", microbatches=1), batches()[0])
    return peak


def eager_losses() -> list[float]:
    model, losses = make_model(), []
    optimizer = ADAMW(model.parameters())
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_needs_more_than_parameters_gradients_and_adamw() -> None:
    held = 4 * sum(p.numel() * 8 for p in make_model().parameters())
    assert needed() > held


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 4}},
        pytest.param({"pp": 1}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"pp": 1, "microbatches": 1}, marks=pytest.mark.slow),
    ],
    ids=["one mesh", "spmd", "any", "one batch"],
)
def test_a_model_three_times_too_large_trains_under_the_limit(options: dict[str, Any]) -> None:
    limit = needed() / TIMES
    program = compiled(RANKS, memory_bytes=limit, **options)
    assert program.predicted.peak_bytes <= limit
    losses, peaks = train_within(program, batches(), limit)
    assert max(peaks) <= limit
    expected = eager_losses()
    assert expected[-1] != expected[0]
    for loss, eager in zip(losses, expected, strict=True):
        assert abs(loss - eager) <= 1e-9 * abs(eager)


def test_the_limit_stops_a_program_that_needs_more() -> None:
    """The same training with every rank holding everything: the counter ends it, and says who asked for what."""
    limit = needed() / TIMES
    program = compiled(RANKS, strategy="dp", recompute="none", microbatches=1, pp=1)
    assert program.predicted.peak_bytes > limit
    with pytest.raises(
        autopar.MemoryLimitError, match=r"rank \d: .* asked for [\d,]+ bytes with [\d,]+ in use, the limit is"
    ):
        train_within(program, batches(), limit)


def test_a_limit_just_below_the_peak_stops_and_at_the_peak_does_not() -> None:
    program = compiled(RANKS, strategy="zero3", pp=1, microbatches=1)
    given = batches()[:2]
    _, peaks = train_within(program, given, float("inf"))
    losses, again = train_within(program, given, max(peaks))
    assert again == peaks
    assert losses == pytest.approx(eager_losses()[:2], rel=1e-9)
    with pytest.raises(autopar.MemoryLimitError):
        train_within(program, given, max(peaks) - 1)


@pytest.mark.slow
def test_one_rank_alone_cannot() -> None:
    """The limit is real: without other ranks the model does not fit, and the compiler says so."""
    with pytest.raises(autopar.InfeasibleError):
        compiled(1, memory_bytes=needed() / TIMES)


@pytest.mark.slow
def test_float32_trains_under_a_third_too() -> None:
    given = batches()
    options = autopar.Options(recompute="none", microbatches=1)
    compile_on = functools.partial(autopar.compile, example_inputs=given[0], optimizer=ADAMW)
    alone = compile_on(make_model(torch.float32), autopar.ClusterSpec.local(1), options=options)
    limit = max(measure_peak(alone, given[0])) / TIMES
    options = dataclasses.replace(autopar.Options(), memory_bytes=limit)
    program = compile_on(make_model(torch.float32), autopar.ClusterSpec.local(RANKS), options=options)
    losses, peaks = train_within(program, given, limit)
    assert max(peaks) <= limit
    assert losses == pytest.approx(eager_losses(), rel=1e-4)
