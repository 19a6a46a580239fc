"""Training in 16 bits rounds no worse than eager's: distances to float64, over batches."""

from __future__ import annotations

import pytest
import torch

import autopar
from tests.proof.precise import LOW, eager, emitted, errors, rounded, without_dropout
from tests.proof.test_precision import RUNS, compiled
from tests.zoo.models import BY_NAME, MODELS, ZooModel

BATCHES = {"mlp": 16, "partly-frozen": 16}
"""Batches of models whose loss is a mean of few numbers: it takes more to tell rounding from luck."""


def assert_rounds_like_eager(
    zoo: ZooModel, plan: str, ranks: int, precision: str, seeds: int = 4, steps: int = 3
) -> None:
    """Root mean squares over batches. Parameters are held against autocast, which keeps activations that are only added
    in float32; losses, single numbers, against the worse of autocast and training in 16 bits with master weights."""
    program = compiled(zoo, plan, ranks, precision, 4 if plan == "1f1b" else None)
    model, low = without_dropout(zoo.make()), LOW[precision]
    start = {n: p.detach().double() for n, p in model.named_parameters()}
    sums = {who: torch.zeros(2) for who in ("emitted", "autocast", "rounded")}
    for seed in range(seeds):
        batch = zoo.batch(seed)
        truth = eager(program, model, batch, steps, torch.float64)
        sums["emitted"] += torch.tensor(errors(emitted(program, batch, steps), truth, start))
        sums["autocast"] += torch.tensor(errors(eager(program, model, batch, steps, torch.float32, low), truth, start))
        sums["rounded"] += torch.tensor(errors(rounded(program, model, batch, steps, low), truth, start))
    found = {who: (total / seeds).sqrt().tolist() for who, total in sums.items()}
    assert found["emitted"][0] <= 1.5 * max(found["autocast"][0], found["rounded"][0]), found
    assert found["emitted"][1] <= 1.5 * found["autocast"][1], found
    assert found["emitted"][1] > 1e-4, "nothing was rounded"


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ranks"), [("dp", 1), ("dp", 2), ("zero3", 2), ("megatron", 4), ("1f1b", 2)])
@pytest.mark.parametrize("name", ["llama", "bert", "mlp"])
def test_bf16_training_errs_no_more_than_eager_bf16(name: str, plan: str, ranks: int) -> None:
    assert_rounds_like_eager(BY_NAME[name], plan, ranks, "bf16", BATCHES.get(name, 3))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gru"])
def test_fp16_training_errs_no_more_than_eager_fp16(name: str) -> None:
    assert_rounds_like_eager(BY_NAME[name], "dp", 2, "fp16", seeds=3)


CASES = [(z, p) for z in MODELS for p in LOW if z.name != "resnet" and (z.name, p) != ("lstm", "fp16")]
"""All but the one whose batch norm couples the batch, and what torch's CPU kernels lack."""


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ranks"), [("dp", 1), *((plan, ranks) for plan in RUNS for ranks in (2, 4))])
@pytest.mark.parametrize(("zoo", "precision"), CASES, ids=str)
def test_every_model_errs_no_more_than_eager(zoo: ZooModel, plan: str, ranks: int, precision: str) -> None:
    try:
        assert_rounds_like_eager(zoo, plan, ranks, precision, BATCHES.get(zoo.name, 6))
    except autopar.InputError as error:  # a batch too small for so many ranks and microbatches
        pytest.skip(str(error))
