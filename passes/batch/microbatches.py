"""The program of a request by number of microbatches: captured once, divided for each number that is asked for.

A program whose batch couples has no microbatches, unless the user says that each microbatch is to be a batch of its own,
as gradient accumulation by hand has it; its loss is then the mean of theirs, and it is captured for such a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property

from autopar.capture.exported import Captured
from autopar.errors import CoupledError, InputError
from autopar.ir.program import Join, Microbatched, Program
from autopar.passes.batch.divided import divided, divides
from autopar.passes.batch.states import Batched, batched
from autopar.passes.rules.book import RuleBook


class Microbatches:
    """whole: the captured step of the whole batch. separate(M): captures the step of one of M microbatches, its loss divided
    by M; None unless the user said that microbatches are batches of their own."""

    def __init__(self, whole: Captured, rules: RuleBook, separate: Callable[[int], Captured] | None = None) -> None:
        self.whole, self.program = whole, whole.program
        self.rules, self.separate = rules, separate
        self._smaller = 1
        self._programs: dict[int, Program] = {1: self.program}
        self._separate: dict[int, Captured] = {}

    def of_smaller_batch(self, times: int) -> Microbatches:
        """The same for a batch that is so many times smaller: its microbatches are those of the larger one in more."""
        batches = copy(self)
        batches._smaller = self._smaller * times
        return batches

    @cached_property
    def batched(self) -> Batched | CoupledError:
        """How the batch goes through the program, or why it cannot be divided."""
        try:
            return batched(self.program, self.rules)
        except CoupledError as error:
            return error

    def may_be(self, microbatches: int) -> bool:
        """Whether so many microbatches make the step of the whole batch."""
        if microbatches == 1:
            return True
        if isinstance(self.batched, CoupledError) or not divides(self.batched, microbatches * self._smaller):
            return False
        try:
            self.at(microbatches)
        except CoupledError:
            return False
        return True

    def at(self, microbatches: int) -> Program:
        """The program of one of so many. Raises CoupledError, which names the op, InputError, CaptureError."""
        microbatches *= self._smaller
        if microbatches in self._programs:
            return self._programs[microbatches]
        if isinstance(self.batched, CoupledError):
            program = self._apart(microbatches, self.batched)
        else:
            try:
                program = divided(self.program, self.batched, microbatches, self.rules)
            except CoupledError as error:
                program = self._apart(microbatches, error)
        self._programs[microbatches] = program
        return program

    def captured(self, microbatches: int) -> Captured:
        """The program of one of so many, with the export that it was made of. Raises as `at`."""
        program = self.at(microbatches)
        return Captured(program, self._separate.get(microbatches, self.whole).exported)

    def _apart(self, microbatches: int, reason: CoupledError) -> Program:
        """A program whose microbatches are batches of their own. Raises CoupledError unless the user wants that."""
        if self.separate is None:
            raise CoupledError(
                f"{microbatches} microbatches would not add up to the batch: {reason}, which couples "
                "the samples of a batch. Leave "
                "Options.microbatches at 1, or, to train on each microbatch as a batch of its own, whose losses are averaged "
                '(as gradient accumulation by hand does), set Options(coupled="per-microbatch")'
            ) from reason
        captured = self.separate(microbatches)
        program, whole = captured.program, self.program
        outputs = tuple(
            _join(program.type_of(one).shape, whole.type_of(other).shape, program.training and k == 0)
            for k, (one, other) in enumerate(zip(program.outputs, whole.outputs, strict=True))
        )
        hangs = Microbatched(outputs, dict.fromkeys(program.buffer_updates, "each"), separate=True)
        program = replace(program, microbatched=hangs, fingerprint=whole.fingerprint)
        self._separate[microbatches] = Captured(program, captured.exported)
        return program


def _join(part: tuple[int, ...], whole: tuple[int, ...], is_loss: bool) -> Join:
    """How an output of batches of their own is joined: along the dim that is larger in the whole batch."""
    if is_loss:
        return Join("sum")
    if len(part) != len(whole):
        raise InputError(
            f"an output has shape {part} for a microbatch and {whole} for the batch; they cannot be joined"
        )
    larger = [d for d, (n, m) in enumerate(zip(part, whole, strict=True)) if n != m]
    return Join("cat", larger[0]) if larger else Join("same")
