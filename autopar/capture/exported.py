"""The graph that `torch.export` gives of a step, as the passes over the captured graph read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from autopar.capture.before.conditional_gradients import Sometimes
from autopar.capture.while_traced.data_numbers import Answer
from autopar.capture.while_traced.scalar_outputs import NoLoss
from autopar.ir.program import Program

Gives = Literal["step", "loss", "loss and outputs"]
"""Captures are of one of these: the model's own step (the loss that it is trained on, or in inference its outputs); or, with
nothing differentiated, the loss alone, or the pair of loss and outputs, None where the model has no loss."""


@dataclass(frozen=True)
class Held:
    """A condition under which a graph is the step: the output that has its truth, and the value that this must have. asked: the
    line that asks, as in a traceback. question: its number among what Python asked of data; None for one that raises in eager."""

    output: str
    value: bool
    asked: str
    question: int | None = None


@dataclass(frozen=True, eq=False)
class Exported:
    """`kinds[placeholder]` = ("param" | "buffer" | "constant" | "input", name or index). known_blocks: modules that were
    traced by another forward than their own, in words; sometimes: which of their tensors have a gradient in some steps only, by
    the modules' numbers. no_loss: what the model returned, where it is for inference. extras: of outputs after the loss, which
    loss_fn gave beside it; output_structure is then theirs. loss_path: where the loss was found among other outputs, such as
    `out[1]`. followed: lines that ask what only data says, where the program goes the example's way. selects: whether
    a mask of the data selected rows. answers: the example's, to what Python asked of data. held: conditions among the outputs
    that are no guards yet."""

    graph: fx.Graph
    kinds: dict[str, tuple[str, Any]]
    updates: dict[str, str]
    outputs: tuple[str, ...]
    output_structure: Any
    input_structure: Any
    input_names: tuple[str, ...]
    training: bool
    constants: dict[str, torch.Tensor]
    eager_grads: frozenset[str]
    parameter_names: dict[str, str]
    output_names: tuple[str, ...]
    known_blocks: tuple[str, ...] = ()
    sometimes: Mapping[int, Sometimes] = field(default_factory=dict)
    no_loss: NoLoss | None = None
    extras: int = 0
    loss_path: str = ""
    followed: tuple[str, ...] = ()
    selects: bool = False
    answers: tuple[Answer, ...] = ()
    held: tuple[Held, ...] = ()


class Captured(NamedTuple):
    """A captured step: the program that is planned, and the export that it was made of."""

    program: Program
    exported: Exported
