"""One program for several shapes of batches: the program of the largest, and of every other bucket one for its parameters.

The largest batch needs the most memory and the most time, so its plan decides on which ranks and how every parameter is
stored, and with it meshes and stages. Each other bucket is captured and planned by itself with these given: its own
microbatches, shardings of values, recompute, messages and schedule. At run time all of them use one set of tensors
(`autopar.runtime.step.shape_variants`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import CaptureError
from autopar.ir.memory_levers import offload_name
from autopar.ir.program import Program
from autopar.passes.search.layout import Layout
from autopar.program import ParallelProgram
from autopar.request import Request


def bucket_request(first: ParallelProgram, inputs: Any) -> Request:
    """The request for a program on other example inputs than the first one's: its own plan on the same meshes."""
    given, stages = first.request.options, first.plan.stages
    options = replace(
        given,
        mesh=dict(stages[0].mesh.axes) if len(stages) == 1 else None,
        strategy="auto",
        pp=None,
        chunks=None,
        schedule="auto" if len(stages) == 1 else given.schedule,
        stage_boundaries=None,
        microbatches=None,
        offload=offload_name(first.setting.offload),
    )
    request = replace(first.request, inputs=inputs, options=options, plan=None, buckets=(), pad_values={})
    if given.microbatches and request.batch % given.microbatches == 0:
        return replace(request, options=replace(options, microbatches=given.microbatches))
    return request


def laid_out_as(first: ParallelProgram, program: Program) -> Layout:
    """Where the first program has the parameters that another bucket's is to compute with. Raises CaptureError where that has
    others."""
    for what, ours, theirs in (
        ("computes with", {*program.parameters}, {*first.ir.parameters}),
        ("trains", {*program.trained}, {*first.ir.trained}),
    ):
        if ours != theirs:
            raise CaptureError(
                f"each bucket of a program {what} the same parameters; this model {what} {', '.join(sorted(ours ^ theirs))} in "
                "one of them alone: use all of them whatever the shapes are, or compile these shapes as programs of their own"
            )
    return Layout.of(first.plan, first.ir)


def with_buckets(first: ParallelProgram, others: Sequence[ParallelProgram]) -> ParallelProgram:
    """The first program with the other buckets' programs beside it."""
    timings = {name: sum(one.timings[name] for one in (first, *others)) for name in first.timings}
    return replace(first, buckets=tuple(others), timings=timings)
