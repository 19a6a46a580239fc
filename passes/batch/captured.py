"""A request's step as a program: captured for the whole batch, and by number of microbatches."""

from __future__ import annotations

import functools

from autopar.capture import capture_program
from autopar.capture.examples.inputs import microbatch
from autopar.passes.batch.microbatches import Captured, Microbatches
from autopar.passes.rules.book import RuleBook
from autopar.request import Request


def capture(request: Request, pieces: int = 1) -> Captured:
    """The step of the whole batch; or of one of so many pieces of it that are batches of their own, the loss divided by
    their number. Raises CaptureError, InputError."""
    options = request.options
    return Captured(
        *capture_program(
            request.model,
            microbatch(request.inputs, options.batch_dims, pieces),
            request.loss_fn,
            request.targets,
            options.batch_dims,
            options.stage_boundaries or (),
            options.precision,
            pieces,
            options.guards,
            options.branches == "as-example",
            {"expert_imbalance": options.expert_imbalance, "on_overflow": options.on_overflow},
        )
    )


def in_microbatches(request: Request, rules: RuleBook) -> Microbatches:
    """The captured step by number of microbatches. Raises CaptureError, InputError."""
    whole = capture(request)
    if whole.exported.no_loss is not None and (asked := request.asked_of_training):
        raise whole.exported.no_loss.error(asked)
    apart = functools.partial(capture, request) if request.options.coupled == "per-microbatch" else None
    return Microbatches(whole, rules, apart)
