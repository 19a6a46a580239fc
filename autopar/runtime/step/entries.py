"""Entries: the steps that a session runs over one set of parameters, each with a form for every shape of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ..comm.comm import Comm
from ..errors import RuntimeProgramError
from ..program.shapes import PadValues
from ..program.tables import Modules
from .own_rows import OwnRows, Taking, agree_on_form
from .shape_variants import Form

FIRST = ""
"""The name of a program's own step."""


@dataclass(frozen=True)
class EntryModules:
    """The modules of an entry: pipeline.py and stages of every shape of its batches, and what inputs are padded with."""

    forms: Sequence[tuple[Any, Modules]]
    pad: PadValues = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """A batch as a form takes it. inputs: a leaf for each of the program's inputs; place: the form's among those of its entry;
    rows: None where the batch is global."""

    form: Form
    place: int
    inputs: Sequence[Tensor]
    rows: OwnRows | None


class EntryForms:
    """The forms of an entry. Raises RuntimeProgramError where some train and some do not."""

    def __init__(self, forms: Sequence[Form], pad: PadValues, comm: Comm) -> None:
        """comm: of all ranks."""
        self.forms, self._pad, self._comm = tuple(forms), pad, comm
        self.training = forms[0].pipeline.training
        if any(form.pipeline.training != self.training for form in forms):
            raise RuntimeProgramError(
                "some shapes of a step train, and some do not; were its files mixed? Emit it again"
            )
        self.whole_batches = Taking(self.forms, pad)

    @cached_property
    def own_rows(self) -> Taking:
        """How batches are taken that have this rank's rows alone. Raises RuntimeProgramError where there are no such."""
        return Taking(self.forms, self._pad, self._comm.rank)

    def of(self, batch: Sequence[Tensor], taking: Taking, step: int) -> Taken:
        """The form of a batch, and what that takes. step: that it is for. Raises GuardError, and RankError where ranks that
        were given their own rows would run several forms."""
        place, inputs = taking.of(batch)
        if taking.readers is not None and len(self.forms) > 1:
            agree_on_form(self._comm, place, step)
        return Taken(self.forms[place], place, inputs, taking.rows[place])
