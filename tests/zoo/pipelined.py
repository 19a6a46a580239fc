"""Zoo models compiled for microbatches: batches of any size, and programs to lay random pipelines over."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

import autopar
from tests.zoo.models import BY_NAME, Batch, ZooModel

SAMPLES = 2
"""Samples of a microbatch."""


def batch_of(zoo: ZooModel, samples: int, seed: int = 0, training: bool = True) -> Batch:
    """A batch of so many samples: zoo batches joined, the surplus cut off."""
    parts: list[Any] = []
    count = 0
    while count < samples:
        at = seed + 1000 * len(parts)
        parts.append(zoo.batch(at) if training else zoo.inference_batch(at))
        count += len(pytree.tree_leaves(parts[-1])[0])
    leaves = zip(*(pytree.tree_leaves(part) for part in parts), strict=True)
    joined = [torch.cat(rows)[:samples] for rows in leaves]
    return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))


@functools.cache
def captured(name: str, microbatches: int, samples: int, training: bool) -> autopar.Program:
    """A zoo model on one rank, where there is nothing to search for."""
    zoo = BY_NAME[name]
    model = zoo.make() if training else zoo.make().eval()
    batch = batch_of(zoo, microbatches * samples, training=training)
    options = autopar.Options(microbatches=microbatches, coupled="per-microbatch")
    cluster = autopar.ClusterSpec.local(1)
    if not training:
        return autopar.compile(model, cluster, batch, options=options)
    return autopar.compile(model, cluster, batch, loss_fn=zoo.loss_fn, optimizer=zoo.optimizer, options=options)


def on_ranks(
    name: str, ranks: int, microbatches: int, samples: int = SAMPLES, training: bool = True
) -> autopar.Program:
    """A zoo model to lay plans for `ranks` ranks over (`with_plan(random_plan(…))`)."""
    program = captured(name, microbatches, samples, training)
    request = dataclasses.replace(program.request, cluster=autopar.ClusterSpec.local(ranks))
    return dataclasses.replace(program, request=request)


def assert_right(program: autopar.Program, name: str, tolerance: float = 1e-9) -> None:
    """The program computes on all its ranks what the eager model does on one device."""
    zoo, training, m = BY_NAME[name], program.training, program.plan.microbatches
    samples = next(t.shape[0] for (_, t), dim in zip(program.ir.inputs, program.ir.batch_dims, strict=True) if dim == 0)
    batch = batch_of(zoo, samples * m, seed=1, training=training)
    result = autopar.verify(program, zoo.make() if training else zoo.make().eval(), batch)
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:5]
    assert result.ok, f"{name}: {worst}\n{program.report()}"
    assert result.max_error <= tolerance, f"{name}: {worst}\n{program.report()}"
