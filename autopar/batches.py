"""The batches that a program takes: built like its example inputs, and of the shapes of one of its buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec

from autopar.capture.examples.trees import check_like
from autopar.codegen.pipeline import batch_shapes
from autopar.compiled import Compiled
from autopar.errors import InputError
from autopar.runtime.errors import GuardError
from autopar.runtime.guards import InputLike
from autopar.runtime.program.shapes import Shapes


class Bucketed(NamedTuple):
    """A batch as a program takes it. bucket: its place among the program's buckets; leaves: its tensors as they are; padded: as
    the bucket takes them."""

    bucket: int
    leaves: list[torch.Tensor]
    padded: list[torch.Tensor]


def listed(batches: Any) -> Iterable[Any]:
    """Batches one by one; one alone is a list of one. Raises InputError for what has none."""
    if isinstance(batches, (torch.Tensor, dict)):
        return [batches]
    if isinstance(batches, tuple) and batches and isinstance(batches[0], torch.Tensor):
        return [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"run needs batches built like the example inputs, not {type(batches).__name__}")
    return list(batches)


def shapes_of(buckets: Sequence[Compiled], pad_values: Mapping[str, float]) -> Shapes:
    """The shapes of a program's buckets, by which the bucket of a batch is told."""
    return Shapes([_inputs(program) for program in buckets], pad_values)


def bucketed(batch: Any, structure: TreeSpec, shapes: Shapes) -> Bucketed:
    """A batch in the bucket that it belongs to. structure: of the example inputs. Raises InputError where it is built otherwise,
    or fits in no bucket."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, list):
        batch = tuple(batch)
    leaves = check_like(batch, structure, "the batch")
    try:
        place, padded = shapes.of(leaves)
    except GuardError as error:
        raise InputError(str(error)) from None
    for leaf, like in zip(padded, shapes.buckets[place], strict=True):
        if tuple(leaf.shape) != like.shape:
            raise InputError(
                f"the batch: input {like.name} has shape {tuple(leaf.shape)}, the program was compiled for {like.shape}; "
                "pass batches of that shape, or compile again with an example of the new one"
            )
    return Bucketed(place, leaves, list(padded))


def _inputs(program: Compiled) -> list[InputLike]:
    """The demands on a program's inputs, of the whole batch."""
    ir, shapes = program.ir, batch_shapes(program.ir, program.plan.microbatches)
    return [
        InputLike(name, shape, (type_.dtype,), dim)
        for (name, type_), dim, shape in zip(ir.inputs, ir.batch_dims, shapes, strict=True)
    ]
