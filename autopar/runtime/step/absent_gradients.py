"""Parameters without a gradient in a step: of experts that no row of the whole batch chose. As in eager, optimizers leave them
alone: no decay, no momentum, no step counted.

The step counts what rows chose. These counts are outputs of its stages, added up over the microbatches and, in the message of the
loss and gradients, over the ranks. What they say of this rank's parameters is one read by the host. Only a pipeline in which
a condition speaks of a stage on other ranks than its parameter's owner (a parameter that stages share) sends a message for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ..comm.calls import Handle
from ..comm.comm import Comm
from ..program.tables import Pipeline
from .stage import Stage


class Absent:
    """The parameters whose gradient is absent, as a pipeline's CONDITIONS say. stages: this rank's."""

    def __init__(self, pipeline: Pipeline, comm: Comm, stages: Mapping[int, Stage]) -> None:
        self.conditions, self._pipeline = pipeline.conditions, pipeline
        self._comm, self._stages = comm, stages
        self._sizes: dict[int, int] = {}
        self._sent = False
        if not self.conditions:
            return
        group = {stage: number for number, held in enumerate(pipeline.groups) for stage in held}
        makers = {info.index: stage for stage, info in pipeline.outputs()}
        counts = {output for ways in self.conditions.values() for way in ways for output, _ in way}
        self._sizes = {info.index: math.prod(info.shape) for _, info in pipeline.outputs() if info.index in counts}
        self._sent = any(
            group[makers[output]] != group[pipeline.holders(name)[0]]
            for name, ways in self.conditions.items()
            for way in ways
            for output, _ in way
        )

    def counts(self, outputs: Mapping[int, Sequence[Sequence[Any]]]) -> Tensor | None:
        """The counts of what the batch chose, all outputs one after another; zeros of those that other ranks make.
        outputs: of this rank's stages, per microbatch. None where nothing is counted."""
        if not self._sizes:
            return None
        found = {output: torch.zeros(size, device=self._comm.device) for output, size in self._sizes.items()}
        for index, rows in outputs.items():
            for place, info in enumerate(self._stages[index].tables.outputs):
                if info.index in found:
                    values = [row[place].wait() if isinstance(row[place], Handle) else row[place] for row in rows]
                    found[info.index] = torch.stack(values).sum(0)
        counts = torch.cat([count.to(torch.float32) for count in found.values()])
        if self._sent:
            counts = self._comm.all_reduce(counts, tuple(self._comm.mesh), "max", "what rows chose")
        return counts

    def names(self, counts: Tensor | None) -> frozenset[str]:
        """The parameters of this rank without a gradient, and others."""
        if counts is None:
            return frozenset()
        numbers, start = {}, 0
        read = counts.tolist()
        for output, size in self._sizes.items():
            numbers[output] = read[start : start + size]
            start += size
        return frozenset(
            name
            for name, ways in self.conditions.items()
            if not any(all(any(numbers[output][n] for n in named) for output, named in way) for way in ways)
        )

    def everywhere(self, own: AbstractSet[str]) -> AbstractSet[str]:
        """The names of parameters that every rank gives of its own, together."""
        if not self.conditions or len(self._stages) == len(self._pipeline.stages):
            return own
        return frozenset(name for names in self._comm.share(sorted(own)) for name in names)
