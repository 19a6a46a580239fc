"""`torch.compiler.is_compiling()` in a model, which is true while it is traced.

Models leave out checks and defaults where it is true, which may be branches on data, or what they need further on. The way
that a model goes in eager is the one that a program is to compute; the other one is traced where that cannot be. Whichever it
is told, it is told everywhere: also where it runs on the example, so that it asks the data there what it asks while traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from autopar.capture.explain import is_user_file

_QUESTIONS = {"is_compiling": True, "is_dynamo_compiling": False, "is_exporting": True}
"""Functions of torch.compiler, and what they say while torch.export traces."""


@contextmanager
def noted_questions(as_in_eager: bool) -> Iterator[list[str]]:
    """Within the context the model is told that it is exported, or that it runs in eager. Yields the files that have asked."""
    asked: list[str] = []

    def answering(question: str) -> mock._patch[object]:
        truth = getattr(torch.compiler, question)

        def answer() -> bool:
            file = sys._getframe(1).f_code.co_filename
            if not is_user_file(file):
                return bool(truth())
            asked.append(file)
            return not as_in_eager and _QUESTIONS[question]

        return mock.patch.object(torch.compiler, question, answer)

    patches = [answering(question) for question in _QUESTIONS if hasattr(torch.compiler, question)]
    for patch in patches:
        patch.start()
    try:
        yield asked
    finally:
        for patch in patches:
            patch.stop()
