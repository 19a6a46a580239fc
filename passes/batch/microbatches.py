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
from autopar.ir.program import Join, Microbatched, Program, ValueRef
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
            beside = (
                "If it is for what loss_fn returns beside the loss, leave that out. " if self.program.extras else ""
            )
            raise CoupledError(
                f"{microbatches} microbatches would not add up to the batch: {reason}, which couples "
                f"the samples of a batch. {beside}Leave "
                "Options.microbatches at 1, or, to train on each microbatch as a batch of its own, whose losses are averaged "
                '(as gradient accumulation by hand does), set Options(coupled="per-microbatch")'
            ) from reason
        captured = self.separate(microbatches)
        program, whole = captured.program, self.program
        outputs = tuple(
            _join(whole, k, program.type_of(one).shape) if whole.gives(k) else Join("sum")
            for k, one in enumerate(program.outputs)
        )
        hangs = Microbatched(outputs, dict.fromkeys(program.buffer_updates, "each"), separate=True)
        program = replace(program, microbatched=hangs, fingerprint=whole.fingerprint)
        self._separate[microbatches] = Captured(program, captured.exported)
        return program


def _join(whole: Program, number: int, part: tuple[int, ...]) -> Join:
    """How an output of batches of their own, of this shape, is joined: along the dim that is larger in the whole batch. Raises
    InputError where it has none, or several."""
    ref = whole.outputs[number]
    shape = whole.type_of(ref).shape
    larger = [d for d, (n, m) in enumerate(zip(part, shape, strict=False)) if n != m]
    if len(part) == len(shape) and len(larger) == 1:
        return Join("cat", larger[0])
    if part == shape and not _depends_on_batch(whole, ref):
        return Join("same")
    what = f"value {number} of those that loss_fn gives beside the loss" if whole.training else f"output {number}"
    raise InputError(
        f"{what} has shape {part} for a microbatch and {shape} for the batch, and each microbatch is a batch of its own "
        '(Options.coupled="per-microbatch"), so that they cannot be joined; give something for each sample, or leave it out'
    )


def _depends_on_batch(program: Program, ref: ValueRef) -> bool:
    """Whether a value is made of inputs that have a batch dim."""
    of_batch: set[ValueRef] = {ValueRef("input", i) for i, dim in enumerate(program.batch_dims) if dim is not None}
    for number, call in enumerate(program.calls):
        if not of_batch.isdisjoint(call.inputs):
            of_batch |= {ValueRef("call", number, o) for o in range(len(program.template_of(call).outputs))}
    return ref in of_batch
