"""Entries: the steps that a session runs over one set of parameters, each with a form for every shape of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..errors import RuntimeProgramError
from ..program.layout import local_shape
from ..program.shapes import PadValues
from ..program.tables import Modules
from ..update.averaging import Averages, Averaging
from ..update.clipping import counts
from ..update.update import Updater
from ..update.update_rule import UpdateRule, check_sharded
from .own_rows import OwnRows, Taking, agree_on_form
from .pending import Pending
from .shape_variants import Form

FIRST = ""
"""The name of a program's own step."""


@dataclass(frozen=True)
class EntryModules:
    """The modules of an entry: pipeline.py and stages of every shape of its batches, what inputs are padded with, how
    parameters follow from gradients, and which of them it averages."""

    forms: Sequence[tuple[Any, Modules]]
    pad: PadValues = field(default_factory=dict)
    update: UpdateRule | None = None
    averaging: Averaging | None = None


@dataclass(frozen=True)
class Taken:
    """A batch as a form takes it. inputs: a leaf for each of the program's inputs; place: the form's among those of its entry;
    rows: None where the batch is global."""

    form: Form
    place: int
    inputs: Sequence[Tensor]
    rows: OwnRows | None


class EntryForms:
    """The forms of an entry, and what updates the parameters that it trains. pending: gradients that wait for an update. Raises
    RuntimeProgramError where its forms train others."""

    def __init__(
        self,
        forms: Sequence[Form],
        pad: PadValues,
        rule: UpdateRule,
        comm: Comm,
        averaging: Averaging | None = None,
        first: Form | None = None,
    ) -> None:
        """comm: of all ranks. averaging, first: of an entry that averages parameters of the session's first form."""
        self.forms, self._pad, self._comm = tuple(forms), pad, comm
        self.training = forms[0].pipeline.training
        self.stages = forms[0].stages
        self.pending = Pending()
        for index, stage in self.stages.items():
            for form in forms[1:]:
                if other := sorted(form.stages[index].tables.gradients.keys() ^ stage.tables.gradients.keys()):
                    raise RuntimeProgramError(
                        f"stage {index}: not every form makes a gradient of {', '.join(other)}; emit it again"
                    )
        self.trained: frozenset[str] = frozenset()
        self.averages: Averages | None = None
        self.averaging = averaging
        if averaging is not None and first is not None:
            pairs = {
                id(stage.rt.params[name]): (stage.rt.params[name], first.stages[index].rt.params[name])
                for index, stage in self.stages.items()
                for name in averaging.names
                if name in stage.rt.params
            }
            self.averages = Averages(averaging.decay, tuple(pairs.values()))
        self.opt_params = {n: p for stage in self.stages.values() for n, p in stage.opt_params.items()}
        self.updater = self._updater(rule, comm)
        for one in self.updater.optimizers:
            self._check_optimizer(one)
        if rule.loss_scaling is not None and any(stage.rt.grads.feeds_back for stage in self.stages.values()):
            raise RuntimeProgramError(
                "int8 gradients keep what they have not sent in units of the loss scale, which moves; train without loss "
                "scaling, or compile with gradient_compression='bf16'"
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

    def follow(self, names: frozenset[str]) -> None:
        """A step has updated these parameters: they are averaged, if this entry computes with averages of one of them."""
        if self.averages is not None and self.averaging is not None and names & {*self.averaging.names}:
            self.averages.update()

    def _updater(self, rule: UpdateRule, comm: Comm) -> Updater:
        """The updater of this rank's parameters; one of no parameters where the entry does not train."""
        if not self.training:
            return Updater(UpdateRule(), {}, {}, (), comm)
        pipeline = self.forms[0].pipeline
        every = {row.name: (len(row.shape), row.dtype) for row in pipeline.trained()}
        self.trained = frozenset(every)
        counted = {
            name
            for stage in self.stages.values()
            for name in stage.opt_params
            if counts(stage.tables.parameters[name].opt_spec, stage.comm)
        }
        return Updater(rule, self.opt_params, every, counted, comm)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        taken, cut = {id(p) for group in optimizer.param_groups for p in group["params"]}, []
        for stage in self.stages.values():
            for name in (name for name, parameter in stage.opt_params.items() if id(parameter) in taken):
                info = stage.tables.parameters[name]
                if local_shape(info.shape, info.opt_spec, stage.comm) != info.shape:
                    cut.append(name)
        check_sharded(optimizer, cut)
