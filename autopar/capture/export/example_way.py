"""The way of a step through its branches on data: no branch asks, or the program goes the way of the example batch.

The model is run on the example's values only where a trace has met a question that only data answers, so that a model without
such branches pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from autopar.capture.exported import Exported
from autopar.capture.while_traced.compiling import noted_questions
from autopar.errors import CaptureError, DataError, InputError


def along_the_example(export: Callable[..., Exported], branches: str, guards: bool) -> Exported:
    """The export of a step: as it is where no branch depends on the data, and along the example's way where one does. Of what a
    compiled model leaves out, the former has all that it can, and the latter nothing that it need not hold the data to.

    branches, guards: see Options. Raises CaptureError, InputError."""
    try:
        return _in_either_mode(functools.partial(export, follow=False), as_in_eager=True)
    except DataError as error:
        if branches == "refuse" or not guards:
            unchecked = "" if guards else " (and under Options(guards=False) nothing would check it)"
            raise DataError(
                f"{error}. A branch may go the way of the example, and be checked when the program runs: "
                f'Options(branches="guard"){unchecked}'
            ) from error
        try:
            return _in_either_mode(functools.partial(export, follow=True), as_in_eager=False)
        except InputError as other:
            raise type(other)(f"{error}. It may go the way of the example: {other}") from error


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
