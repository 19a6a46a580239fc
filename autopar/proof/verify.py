"""`verify`: every rank in this process against the eager model on one device.

The emitted files run as they are, with float dtypes replaced by the verification dtype (float64 by default), and so
does the eager model, casts inside it included: what is left of a difference is a mistake, not rounding. Compared are
the loss of each step with what is given beside it, every gradient of the first step, and every parameter and buffer after the
last one.

Dropout draws from positions, not from torch's generator, so with dropout active the reference is the same program on
one rank; that one is compared with the eager model with dropout switched off on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.examples.default_device import with_cpu_as_default
from autopar.capture.examples.trees import rebuild
from autopar.capture.known.promoted import cast
from autopar.errors import InputError
from autopar.ir.program import op_name
from autopar.ops.registry import find
from autopar.program import ParallelProgram, model_tensors
from autopar.proof.casts import no_dropout
from autopar.proof.compare import TOLERANCE, Values, compare, nudged
from autopar.proof.ranks import one_rank, uncompressed, values_on_ranks, without_dropout
from autopar.proof.reference import eager_values, names_in_program

_NUDGES = (1, 2, 3)


@dataclass(frozen=True)
class Verification:
    """errors: per tensor ("loss/0", "grad/…", "param/…", "buffer/…", "output/…"), relative to its scale
    (`autopar.proof.compare`). notes: what of the program was left out."""

    errors: dict[str, float]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest relative error (NaN where anything is NaN)."""
        worst = 0.0
        for e in self.errors.values():
            if e != e:
                return float("nan")
            worst = max(worst, e)
        return worst

    @property
    def ok(self) -> bool:
        return bool(self.errors) and self.max_error <= self.tolerance


@with_cpu_as_default
def verify(
    program: ParallelProgram, model: nn.Module, batch: Any, *, steps: int = 2, dtype: torch.dtype = torch.float64
) -> Verification:
    """Compare `program` on all its ranks with `model` run eagerly over `steps` steps on one global batch, of any bucket, padded
    up to it. Gradients that are compressed travel as they are."""
    if not isinstance(model, nn.Module):
        raise InputError(f"verify needs the eager model, an nn.Module, not {type(model).__name__}")
    program, given = program.for_batch(batch)
    batch = rebuild(program.captured.exported.input_structure, given)
    leaves = [cast(t, dtype) for t in given]
    weights = {k: cast(v, dtype) for k, v in _weights(program, model).items()}

    def judge(ours: Values, reference: Callable[[int], Values]) -> dict[str, float]:
        """Errors; where there are any above the tolerance, rounding is told from mistakes by a nudged reference."""
        resting = _resting(program, ours, weights)
        expected = resting | reference(0)
        errors = compare(ours, expected, weights, dtype=dtype)
        if Verification(errors, TOLERANCE[dtype]).ok:
            return errors
        return compare(ours, expected, weights, [resting | reference(nudge) for nudge in _NUDGES], dtype)

    def on_one_rank(nudge: int) -> Values:
        nearby = weights | {name: nudged(weights[name], dtype, nudge) for name in program.ir.parameters}
        return values_on_ranks(program, one, leaves, nearby, steps, dtype)

    compression = program.plan.gradient_compression
    notes = (
        (f"gradient_compression={compression!r} is left out: it rounds, and changes training",) if compression else ()
    )
    ours = values_on_ranks(program, uncompressed(program.lowered), leaves, weights, steps, dtype)
    if not _random(program):
        errors = judge(ours, lambda nudge: eager_values(program, model, batch, steps, dtype, nudge))
        return Verification(errors, TOLERANCE[dtype], notes)
    one = one_rank(program)
    errors = judge(ours, on_one_rank)
    if _only_dropout(program):
        still = values_on_ranks(program, without_dropout(one), leaves, weights, steps, dtype)
        with no_dropout(model) as quiet:
            against = judge(still, lambda nudge: eager_values(program, quiet, batch, steps, dtype, nudge))
        errors |= {f"without dropout/{k}": v for k, v in against.items()}
    return Verification(errors, TOLERANCE[dtype], notes)


def _weights(program: ParallelProgram, model: nn.Module) -> Values:
    """The model's own, and what only the program has (captured constants)."""
    names = names_in_program(program)
    tensors = {names.get(name, name): tensor for name, tensor in model_tensors(model).items()}
    return {name: tensors.get(name, value).detach() for name, value in program.weights().items()}


def _resting(program: ParallelProgram, ours: Values, weights: Values) -> Values:
    """State of the first program that the module of an entry need not have, and which is to stay as it is."""
    if program.request.held is None:
        return {}
    state = {f"{kind}/{name}": value for kind in ("param", "buffer") for name, value in weights.items()}
    return {name: state[name] for name in ours if name in state}


def _random(program: ParallelProgram) -> bool:
    return any(t.random for t in program.ir.templates.values())


def _only_dropout(program: ParallelProgram) -> bool:
    definitions = [find(op_name(n.target)) for t in program.ir.templates.values() for n in t.ops]
    return not any(d is not None and d.random and d.factory for d in definitions)
