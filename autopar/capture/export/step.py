"""One step, captured the first way that gives a program for every batch, or for as many as can be.

as it is            no branch asks the data, and no mask selects rows in a model that may have experts
experts as mixture  loops over experts that are understood are traced as mixtures
the example's way   branches that repair go either way, others that of the example batch, under guards; every expert is given all
                    rows
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.export.example_way import along_the_example
from autopar.capture.export.export import export_once
from autopar.capture.exported import Exported, Gives
from autopar.capture.known.known_blocks import Known, known_forwards, prove
from autopar.capture.known.loops.expert_loops import LOOPS, has_experts
from autopar.capture.while_traced.autocast import check_outside
from autopar.capture.while_traced.classes_without_module import classes_named
from autopar.errors import CaptureError


def export_step(
    model: nn.Module,
    inputs: Any,
    loss_fn: Any,
    targets: int,
    mode: FakeTensorMode,
    pieces: int = 1,
    branches: str = "select",
    guards: bool = True,
    to_train: bool = False,
    gives: Gives = "step",
) -> Exported:
    """Capture one step; the loss is divided by `pieces`. branches, guards: see Options; to_train: see `capture_program`.
    Where a trace asks what only data says, the step is traced again along the example's way. A loop over experts becomes a
    mixture where the step would else go one batch's way, or give every expert all rows.

    Raises CaptureError, InputError."""
    check_outside()
    export = functools.partial(
        export_once, model, inputs, loss_fn, targets, mode, pieces, to_train=to_train, gives=gives
    )
    if not any(map(has_experts, model.modules())):
        return _with_known(model, lambda: along_the_example(export, branches, guards))
    all_rows: Exported | None = None
    with suppress(CaptureError):
        all_rows = _with_known(model, lambda: along_the_example(export, "refuse", guards))
        if not all_rows.selects:
            return all_rows
    with suppress(Exception):  # code of the user's that runs on numbers of ours
        return _with_known(model, lambda: along_the_example(export, branches, guards), LOOPS)
    return all_rows or _with_known(model, lambda: along_the_example(export, branches, guards))


def _with_known(model: nn.Module, export: Callable[[], Exported], others: Sequence[Known] = ()) -> Exported:
    """The step in which known forwards, and those of `others`, stand for modules that have such."""
    with classes_named(model), known_forwards(model, others) as uses:
        exported = export()
    known_blocks, sometimes = prove(uses)
    return replace(exported, known_blocks=known_blocks, sometimes=sometimes)
