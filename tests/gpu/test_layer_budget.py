"""Budgets of one bf16 Llama layer, forward and backward, on a simulated GPU: kernels that are launched, and bytes that they move.

A layer is what a model of three has more than a model of two, without the update of its parameters.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

import autopar
from tests.gpu.simulated import simulated
from tests.gpu.simulation.budgets import LAUNCH, Asked
from tests.zoo.models import ADAMW, BY_NAME
from tests.zoo.programs import compiled_zoo

LLAMA = BY_NAME["llama"]
EAGER_LAUNCHES = 90


@functools.cache
def model_of(layers: int, microbatches: int) -> autopar.ParallelProgram:
    """A step of a Llama of so many layers on one GPU."""
    model = LLAMA.make()
    model.blocks = model.blocks[:layers]
    options = autopar.Options(precision="bf16", pp=1, microbatches=microbatches, guards=False)
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device="h100")
    return compiled_zoo(LLAMA, cluster, model=model, optimizer=ADAMW, options=options)


def launched(layers: int, microbatches: int) -> list[Asked]:
    """The kernels of a step before the update."""
    (budget,) = simulated(model_of(layers, microbatches), LLAMA.batch()).budgets
    return [one for one in budget.of(LAUNCH, 2) if one.action != "update"]


def by_op(kernels: list[Asked]) -> tuple[Counter[str], Counter[str]]:
    """How often each op is launched, and the bytes that it moves."""
    times, moved = Counter[str](), Counter[str]()
    for one in kernels:
        times[one.op] += 1
        moved[one.op] += one.nbytes
    return times, moved


@functools.cache
def layer(microbatches: int) -> tuple[Counter[str], Counter[str]]:
    """Launches and bytes of a layer by op."""
    less, more = (by_op(launched(layers, microbatches)) for layers in (2, 3))
    return more[0] - less[0], more[1] - less[1]


def table(microbatches: int) -> str:
    """Launches and bytes of a layer, an op a line."""
    times, moved = layer(microbatches)
    lines = [f"{times[op]:5} {moved[op]:10,}  {op}" for op in sorted(moved, key=lambda op: -moved[op])]
    return "\n".join([*lines, f"{sum(times.values()):5} {sum(moved.values()):10,}  in all"])


def test_a_layer_written_out_launches_few_kernels() -> None:
    times, _ = layer(1)
    assert sum(times.values()) <= EAGER_LAUNCHES, table(1)
    assert times["mm"] == 7 + 14
    assert times["_scaled_dot_product_cudnn_attention"] == times["_scaled_dot_product_cudnn_attention_backward"] == 1


def test_a_microbatch_more_casts_no_parameter_and_no_gradient() -> None:
    """Norms, the results of rotary embeddings, and nothing else: 16 casts. Gradients are added to their sums in float32 as they
    come."""
    more = layer(4)[0] - layer(2)[0]
    assert more["_to_copy"] == 2 * 16, table(4)
    assert more["add_"] == 2 * 9, table(4)
    assert sum(more.values()) <= 2 * EAGER_LAUNCHES, table(4)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_parameters_are_cast_by_one_kernel_a_step(microbatches: int) -> None:
    times = by_op(launched(3, microbatches))[0]
    assert times["_foreach_copy_"] == 1


if __name__ == "__main__":
    print(table(1))
