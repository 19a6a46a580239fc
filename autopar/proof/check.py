"""`check`: a short `verify`, one line for users.

The plan and the ranks stay as they are, and the batch is made as small as the plan's shards allow: a few samples per rank
tell a wrong program from a right one as well as thousands do. The captured graph of the smaller batch has the same values,
so that the plan says everything about it too. A batch is not shrunk where the plan does not fit the smaller one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.capture.examples.default_device import with_cpu_as_default
from autopar.capture.examples.inputs import batch_size, microbatch
from autopar.capture.examples.trees import flatten
from autopar.errors import AutoparError, InputError
from autopar.ops.registry import find
from autopar.program import ParallelProgram
from autopar.proof.verify import Verification, verify

SLOWER_THAN_PRODUCTS = 3.0
"""How many times longer a step takes than its matrix products alone: a rough figure, as the limit is one."""


@dataclass(frozen=True)
class Check:
    """The findings of `check`; `str` is one line.

    outcome: "equal", "not equal", or "too long" where the check would have taken longer than its limit. batch: samples
    that were compared, of `whole_batch`. error: the largest relative error, in the tensor `where` of so many `tensors`
    (loss, gradients, parameters after the steps, or outputs). seconds: what the check took, or would have taken.
    """

    outcome: str
    batch: int
    whole_batch: int
    seconds: float
    error: float = math.nan
    where: str = ""
    tensors: int = 0

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"

    def __str__(self) -> str:
        of = f"a batch of {self.batch}" + (f" (of {self.whole_batch})" if self.batch != self.whole_batch else "")
        if self.outcome == "too long":
            return f"check: left out, as {of} would take about {self.seconds:.0f} s; raise time_limit_s to run it"
        return (
            f"check: {self.outcome} to one device in float64 on {of}: {self.tensors} tensors compared, largest relative "
            f"error {self.error:.1e} in {self.where}, {self.seconds:.1f} s"
        )


@with_cpu_as_default
def check(program: ParallelProgram, *, time_limit_s: float = 60.0, steps: int = 2) -> Check:
    """Compare all ranks with the eager model on a small part of the example batch. Raises InputError where model or
    example inputs hold no values."""
    started = time.perf_counter()
    _check_values(program)
    small = shrunken(program)
    batch, whole = _samples(small), _samples(program)
    expected_s = _expected_s(small, steps)
    if expected_s > time_limit_s:
        return Check("too long", batch, whole, expected_s)
    found = verify(small, program.model, small.request.inputs, steps=steps)
    where = _worst(found)
    outcome = "equal" if found.ok else "not equal"
    seconds = time.perf_counter() - started
    return Check(outcome, batch, whole, seconds, found.max_error, where, len(found.errors))


def shrunken(program: ParallelProgram) -> ParallelProgram:
    """The program under its plan for the smallest batch that the plan fits, at worst for its own. What few samples choose of
    experts is more uneven than what many do, and is not held against the program."""
    request, whole = program.request, _samples(program)
    for batch in _batches(program):
        try:
            inputs = microbatch(request.inputs, request.options.batch_dims, whole // batch)
            return program.on_batch(inputs, on_overflow="chunk")
        except AutoparError:
            continue
    return program


def _batches(program: ParallelProgram) -> Iterator[int]:
    """Smaller batches to try: in every microbatch a sample per rank, which most plans can divide, then fewer; so many times more
    where blocks are cut in pieces, which they would not be otherwise."""
    whole, ranks, shards = _samples(program), 1, 1
    pieces = math.lcm(*(t.pieces for stage in program.plan.stages for t in stage.templates.values()))
    for stage in program.stages:
        ranks = math.lcm(ranks, stage.mesh.size)
        for row in stage.inputs:
            if row.batch_dim is not None:
                shards = math.lcm(shards, stage.mesh.product(row.spec.dims[row.batch_dim]))
    for per_microbatch in dict.fromkeys((ranks, 2 * ranks, 2 * shards, 4 * shards)):
        batch = per_microbatch * pieces * program.plan.microbatches
        if batch < whole and whole % batch == 0:
            yield batch


def _samples(program: ParallelProgram) -> int:
    return batch_size(program.request.inputs, program.options.batch_dims)


def _expected_s(program: ParallelProgram, steps: int) -> float:
    """Seconds of so many steps, on one device and once more on all ranks together, by their matrix products."""
    flops = 0.0
    for name, template in program.ir.templates.items():
        for call in template.op_calls.values():
            definition = find(call.op)
            if definition is not None and definition.work is not None:
                flops += definition.work(call, program.rules.rule(call))[0] * program.ir.multiplicity.get(name, 0)
    return 2 * steps * program.plan.microbatches * flops / _flops_per_s() * SLOWER_THAN_PRODUCTS


def _flops_per_s(size: int = 256) -> float:
    """FLOPs per second of a product of matrices in float64 on this machine."""
    x = torch.ones(size, size, dtype=torch.float64)
    torch.mm(x, x)
    started = time.perf_counter()
    torch.mm(x, x)
    return float(2 * size**3 / max(time.perf_counter() - started, 1e-9))


def _worst(found: Verification) -> str:
    """The tensor with the largest error, one that is not a number before all others."""
    return max(found.errors, key=lambda name: math.inf if math.isnan(found.errors[name]) else found.errors[name])


def _check_values(program: ParallelProgram) -> None:
    tensors = {**program.weights(), **{f"input {i}": leaf for i, leaf in enumerate(flatten(program.request.inputs)[0])}}
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, "fake_mode"):
            raise InputError(
                f"check compares numbers, and {name} holds none (a meta or fake tensor); compile the model with weights and an "
                "example batch with values"
            )
