"""The way of a step through its branches on data: no branch asks, branches that repair go either way, and through all others the
program goes the way of the example batch.

Which branches repair is seen by tracing the step once more with one answer turned round (`graph/either_way.py`). Of several
questions every combination of answers is traced, so that the program is proven for each of them. The model is run on the
example's values only where a trace has met a question that only data answers, so that a model without such branches pays
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress

from autopar.capture.exported import Exported
from autopar.capture.graph.conditions import guarded
from autopar.capture.graph.either_way import either_way
from autopar.capture.while_traced.compiling import noted_questions
from autopar.capture.while_traced.data_numbers import Answer
from autopar.errors import CaptureError, DataError, InputError

MOST_TURNED = 3
"""Questions of a step that are tried the other way: they have up to 2^3 traces."""
Export = Callable[[tuple[Answer, ...] | None], Exported]
"""The export of a step whose first answers are forced; with None it stops at questions."""


def along_the_example(export: Export, branches: str, guards: bool) -> Exported:
    """The export of a step: as it is where no branch depends on the data, and along the example's way where one does and is no
    repair. Of what a compiled model leaves out, the former has all that it can, and the latter nothing that it need not hold the
    data to.

    branches, guards: see Options. Raises CaptureError, InputError."""
    try:
        return guarded(_in_either_mode(lambda: export(None), as_in_eager=True), guards)
    except DataError as error:
        if branches == "refuse" or not guards:
            unchecked = "" if guards else " (and under Options(guards=False) nothing would check it)"
            raise DataError(
                f"{error}. A branch may go the way of the example, and be checked when the program runs: "
                f'Options(branches="guard"){unchecked}'
            ) from error
        follow = functools.partial(_either_way, export) if branches == "select" else export
        try:
            return guarded(_in_either_mode(lambda: follow(()), as_in_eager=False), guards)
        except InputError as other:
            raise type(other)(f"{error}. It may go the way of the example: {other}") from error


def _either_way(export: Export, forced: tuple[Answer, ...]) -> Exported:
    """The export whose first answers are forced, either way at later questions that repair, and along the example's way at
    others. A step that asks more, such as a loop that goes on, has guards."""
    exported = export(forced)
    truths = [h.question for h in exported.held if h.question is not None and _is_truth(exported, h.question)]
    if len(truths) > MOST_TURNED:
        return exported
    for question in reversed([q for q in truths if q >= len(forced)]):
        with suppress(CaptureError):
            other = _either_way(export, (*exported.answers[:question], not exported.answers[question]))
            exported = either_way(exported, other, question) or exported
    return exported


def _is_truth(exported: Exported, question: int) -> bool:
    return isinstance(exported.answers[question], bool)


def _in_either_mode(export: Callable[[], Exported], as_in_eager: bool) -> Exported:
    """The export of a model that is told that it runs in eager, or that it is compiled; and where that has none and the model
    asked, the other thing. Raises the last error, or the first that is of data."""
    try:
        with noted_questions(as_in_eager) as asked:
            return export()
    except CaptureError as error:
        if not asked:
            raise
        first = error
    try:
        with noted_questions(not as_in_eager):
            return export()
    except CaptureError as error:
        raise (first if isinstance(first, DataError) and not isinstance(error, DataError) else error) from None
