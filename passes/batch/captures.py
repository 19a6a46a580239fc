"""The programs of one request: its step captured for one of so many microbatches, each count the first time it is asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autopar.capture import capture_program
from autopar.capture.build import fingerprint
from autopar.capture.export import Exported
from autopar.capture.inputs import microbatch
from autopar.ir.program import Program
from autopar.passes.batch.microbatch import in_microbatches
from autopar.passes.rules.book import RuleBook
from autopar.request import Request


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured step: the program that is planned, and the export that it was made of."""

    program: Program
    exported: Exported


class Captures:
    """Captured steps by microbatch count. seconds: spent on capturing so far."""

    def __init__(self, request: Request, rules: RuleBook) -> None:
        self.request = request
        self.rules = rules
        self.seconds = 0.0
        self._by_count: dict[int, Captured] = {}

    def at(self, microbatches: int) -> Captured:
        """The step of one of so many microbatches. Raises CaptureError, InputError."""
        if microbatches not in self._by_count:
            started = time.perf_counter()
            self._by_count[microbatches] = self._summed_up(microbatches)
            self.seconds += time.perf_counter() - started
        return self._by_count[microbatches]

    def _summed_up(self, microbatches: int) -> Captured:
        """The step whose microbatches add up to the loss of the whole batch, where that is possible."""
        captured = self._traced(microbatches)
        if microbatches == 1 or not captured.program.training:
            return captured
        program = in_microbatches(captured.program, self.rules, self._larger_batch(microbatches))
        return replace(captured, program=replace(program, fingerprint=fingerprint(program)))

    def _larger_batch(self, microbatches: int) -> Program | None:
        """The program for a batch of more samples, where it was captured before, or where a microbatch has one sample only
        (`in_microbatches`)."""
        if 1 in self._by_count:
            return self._by_count[1].program
        if self.request.batch == microbatches:
            return self._traced(microbatches // 2 if microbatches % 2 == 0 else 1).program
        return None

    def _traced(self, microbatches: int) -> Captured:
        request, options = self.request, self.request.options
        return Captured(
            *capture_program(
                request.model,
                microbatch(request.inputs, options.batch_dims, microbatches),
                request.loss_fn,
                request.targets,
                options.batch_dims,
                options.stage_boundaries or (),
                options.precision,
                options.guards,
                options.branches == "as-example",
            )
        )
