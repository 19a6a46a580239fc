"""Batches that have a rank's rows alone, instead of the global batch.

Where a stage takes a part of these rows, it is cut out of them. An input that lines read beyond that, such as targets that every
rank counts, is put together from the ranks that share the rows between them: right before it is used, when all ranks of the stage
are at the same action. Nothing else of a step knows of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..data.schema import integer
from ..errors import RankError, RuntimeProgramError
from ..guards import InputLike
from ..program.layout import TensorInfo, gather_dim, local_slices
from ..program.rows import batch_rows, input_rows, rank_rows, reader_groups
from ..program.shapes import PadValues, Shapes
from ..program.tables import Pipeline
from .same_data import odd_ranks
from .shape_variants import Form
from .stage import Cut, Inputs, Stage


@dataclass(frozen=True)
class _Taken:
    """An input as a stage takes it from the rank's rows. cuts: by microbatch, where in the leaf; over: the axes whose ranks are
    asked for the rows beside these (none: nobody is); box: where the stage's part lies then in the microbatch."""

    cuts: Sequence[Cut]
    over: tuple[str, ...] = ()
    box: Cut = ()


class OwnRows:
    """How one rank's stages of a pipeline take their inputs from this rank's rows. likes: the demands on each input, by index, of
    those that the rank takes."""

    def __init__(self, pipeline: Pipeline, stages: Mapping[int, Stage], rank: int) -> None:
        """rank: whose rows they are. Raises RuntimeProgramError where inputs disagree about rows."""
        self._rows, self._microbatches = batch_rows(pipeline) // pipeline.microbatches, pipeline.microbatches
        held, _ = rank_rows(pipeline, rank)
        self._held = held or (0, 0)
        taken = sorted({info.index for stage in stages.values() for info in stage.tables.inputs})
        self.likes = {index: self._like(pipeline.inputs[index]) for index in taken}
        self._stages = {
            index: [self._taken(stage, info, place) for place, info in enumerate(stage.tables.inputs)]
            for index, stage in stages.items()
        }
        self.cuts = {index: [one.cuts for one in inputs] for index, inputs in self._stages.items()}

    def batch(self, leaves: Sequence[Tensor], inputs: Sequence[InputLike]) -> list[Tensor]:
        """One leaf for each of the program's inputs, of those that this rank does not take one without numbers. leaves: of the
        others, in input order."""
        own = dict(zip(self.likes, leaves, strict=True))
        return [
            own[index] if index in own else torch.empty(like.shape, dtype=like.dtypes[0], device="meta")
            for index, like in enumerate(inputs)
        ]

    def inputs_of(self, batch: Sequence[Tensor]) -> Inputs:
        """The stages' parts of a batch."""
        return self.completed(lambda stage, microbatch: stage.inputs(batch, microbatch, self.cuts[stage.index]))

    def completed(self, parts: Inputs) -> Inputs:
        """The stages' inputs. parts: those that are cut out of the rank's rows."""

        def inputs(stage: Stage, microbatch: int) -> list[Tensor]:
            rows = zip(stage.tables.inputs, self._stages[stage.index], parts(stage, microbatch), strict=True)
            return [self._complete(stage, info, taken, part) for info, taken, part in rows]

        return inputs

    def _complete(self, stage: Stage, info: TensorInfo, taken: _Taken, part: Tensor) -> Tensor:
        if not taken.over:
            return part
        dim = info.batch_dim
        assert dim is not None
        site = f"rows of input {info.name}"
        return gather_dim(part.contiguous(), dim, taken.over, stage.comm, site, info.shape[dim])[taken.box]

    def _like(self, like: InputLike) -> InputLike:
        dim = like.batch_dim
        if dim is None:
            return like
        rows = self._held[1] - self._held[0]
        size = like.shape[dim] // (self._rows * self._microbatches) * rows * self._microbatches
        return replace(like, shape=(*like.shape[:dim], size, *like.shape[dim + 1 :]))

    def _taken(self, stage: Stage, info: TensorInfo, place: int) -> _Taken:
        dim, comm = info.batch_dim, stage.comm
        if dim is None:
            return _Taken(stage.cuts[place])
        box = local_slices(info.shape, info.spec, comm, f"input {info.name}")
        finer = info.spec[dim][: len(info.row_axes)] == info.row_axes
        within = box if finer else tuple(slice(0, n) for n in info.shape)
        own = box[dim] if finer else _block(info, input_rows(info, self._rows, comm.mesh, comm.position), self._rows)
        entries = info.shape[dim] // self._rows
        first, length = self._held[0] * entries, (self._held[1] - self._held[0]) * entries
        cuts = [
            (*within[:dim], slice(own.start - first + m * length, own.stop - first + m * length), *within[dim + 1 :])
            for m in range(self._microbatches)
        ]
        return _Taken(cuts) if finer else _Taken(cuts, info.row_axes, box)


def _block(info: TensorInfo, rows: tuple[int, int], of: int) -> slice:
    assert info.batch_dim is not None
    entries = info.shape[info.batch_dim] // of
    return slice(rows[0] * entries, rows[1] * entries)


class Taking:
    """How a session takes batches: global ones, or such as have this rank's rows alone. rows: of every form, None for global
    batches; inputs: the demands on each input, by form; taken: the inputs that a batch has, by index; readers: of every rank the
    number of the group that takes the same rows, None where all take the same batch."""

    def __init__(self, forms: Sequence[Form], pad: PadValues | None, rank: int | None = None) -> None:
        """rank: whose rows they are; None: batches are global. Raises RuntimeProgramError."""
        whole = [form.pipeline.inputs for form in forms]
        self.rows = [None if rank is None else OwnRows(form.pipeline, form.stages, rank) for form in forms]
        self.taken = tuple(range(len(whole[0]))) if self.rows[0] is None else tuple(self.rows[0].likes)
        self.readers = None if rank is None else reader_groups(forms[0].pipeline)
        self.inputs = [
            [like if rows is None else rows.likes.get(i, like) for i, like in enumerate(inputs)]
            for inputs, rows in zip(whole, self.rows, strict=True)
        ]
        if len(forms) > 1 and not self.taken:
            raise RuntimeProgramError(
                "a rank that takes no input cannot see which shapes a batch of own rows has; give all ranks global batches, or "
                "compile without pipeline"
            )
        self._shapes = Shapes([[inputs[i] for i in self.taken] for inputs in self.inputs], pad)

    def of(self, leaves: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
        """The number of the form that a batch is for, and a leaf for each of the program's inputs, in the form's shapes.
        leaves: of the inputs that a batch has. Raises GuardError."""
        place, shaped = self._shapes.of(leaves)
        rows = self.rows[place]
        if rows is None or len(shaped) != len(self.taken):
            return place, list(shaped)
        return place, rows.batch(shaped, self.inputs[place])


def agree_on_form(comm: Comm, place: int, step: int) -> None:
    """See that ranks that were given their own rows run the same form. Raises RankError."""
    if odd := odd_ranks(comm.share(place, integer(0, 1 << 53))):
        raise RankError(
            f"step {step}: ranks {', '.join(map(str, odd[:8]))} were given rows of the shapes of another bucket than the "
            f"others; pad "
            "the rows of a global batch alike on all ranks, or give every rank global batches",
            odd,
        )
