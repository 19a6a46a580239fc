"""A sharding rule by experiment (EasyDist's idea): run the op on halves and see how the results recombine.

For every result dim, and every choice of operand dims of the same size, split those operands in two, run the op on each
half, and compare the concatenation with the whole result; for no result dim, compare the sum. What holds on random
data becomes a factor; everything else stays whole. Ops whose other arguments name sizes usually fail on halves and so
stay whole: the experiment can miss a factor, but it does not invent one.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ir.types import TensorType
from autopar.ops.registry import Maker

_MOST_ELEMENTS = 1 << 22
Choice = tuple[int | None, ...]


def target_of(op: str) -> Any:
    """The operator called `aten.sum.dim_IntList`."""
    parts = op.split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1])
    return getattr(packet, parts[2] if len(parts) > 2 else "default")


def run_call(call: OpCall, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Run the op of `call` on real tensors in place of its operands."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, Operand):
            return tensors[arg.index]
        if isinstance(arg, list):
            return [fill(a) for a in arg]
        return arg

    out = target_of(call.op)(**{k: fill(v) for k, v in call.arguments.items()})
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    return [o if isinstance(o, torch.Tensor) else None for o in outs]


def random_operand(type_: TensorType, generator: torch.Generator, high: int = 2) -> torch.Tensor:
    """Random data of a type; integers stay small so that they are valid indices."""
    if type_.dtype == torch.bool:
        return torch.rand(type_.shape, generator=generator) < 0.5
    if type_.dtype.is_floating_point:
        return torch.rand(type_.shape, generator=generator, dtype=torch.float64).to(type_.dtype) + 0.1
    if type_.dtype.is_complex:
        return torch.randn(type_.shape, generator=generator, dtype=type_.dtype)
    return torch.randint(0, high, type_.shape, generator=generator, dtype=type_.dtype)


def discover(call: OpCall) -> Rule | None:
    """The rule that experiments support, or None when the op cannot be run here."""
    if not call.operands or sum(t.numel for t in call.operands) > _MOST_ELEMENTS:
        return None
    generator = torch.Generator().manual_seed(0)
    operands = [random_operand(t, generator) for t in call.operands]
    with torch.no_grad():
        try:
            whole = run_call(call, operands)
            if not _same(whole, run_call(call, operands)):
                return None  # random or stateful
        except Exception:
            return None
        return _build(call, operands, whole)


def _build(call: OpCall, operands: list[torch.Tensor], whole: list[torch.Tensor | None]) -> Rule:
    make = Maker()
    dims: list[list[tuple[str, ...]]] = [[()] * len(t.shape) for t in call.operands]
    outs: list[list[tuple[str, ...]]] = [[()] * (t.ndim if t is not None else 0) for t in whole]
    count = 0
    for choice, places in _hypotheses(call, whole):
        if any(d is not None and dims[i][d] for i, d in enumerate(choice)):
            continue
        if any(p is not None and outs[i][p] for i, p in enumerate(places)):
            continue
        if not _holds(call, operands, whole, choice, places):
            continue
        size = next(call.shapes[i][d] for i, d in enumerate(choice) if d is not None)
        name = f"f{count}"
        count += 1
        for i, d in enumerate(choice):
            if d is not None:
                dims[i][d] = make.add(name, size)
        for i, p in enumerate(places):
            if p is not None:
                outs[i][p] = (name,)
    results: list[Labels | None] = [tuple(o) if t is not None else None for o, t in zip(outs, whole, strict=True)]
    return make.rule([tuple(d) for d in dims], results)


def _hypotheses(call: OpCall, whole: list[torch.Tensor | None]) -> list[tuple[Choice, Choice]]:
    """(operand dims, result dims) worth testing: more operands first, kept results before contractions."""
    sizes = sorted({n for s in call.shapes for n in s if n % 2 == 0})
    found: list[tuple[Choice, Choice]] = []
    for size in sizes:
        per_operand = [[*(d for d, n in enumerate(s) if n == size), None] for s in call.shapes]
        per_result = [
            [*(d for d, n in enumerate(t.shape) if n == size), None] if t is not None else [None] for t in whole
        ]
        if math.prod(map(len, per_operand)) * math.prod(map(len, per_result)) > 512:
            continue
        for choice in itertools.product(*per_operand):
            if any(d is not None for d in choice):
                found += [(choice, places) for places in itertools.product(*per_result)]
    return sorted(found, key=lambda h: (sum(d is None for d in h[0]), sum(p is None for p in h[1])))


def _holds(
    call: OpCall, operands: list[torch.Tensor], whole: list[torch.Tensor | None], choice: Choice, places: Choice
) -> bool:
    halves = []
    try:
        for half in range(2):
            parts = [
                t if d is None else t.chunk(2, d)[half].contiguous() for t, d in zip(operands, choice, strict=True)
            ]
            halves.append(run_call(call, parts))
    except Exception:
        return False
    for i, (place, expected) in enumerate(zip(places, whole, strict=True)):
        if expected is None:
            continue
        a, b = halves[0][i], halves[1][i]
        if a is None or b is None:
            return False
        if place is None and not expected.dtype.is_floating_point:
            return False
        try:
            joined = a + b if place is None else torch.cat([a, b], place)
        except RuntimeError:
            return False
        if not _same([joined], [expected]):
            return False
    return True


def _same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        elif x.shape != y.shape or x.dtype != y.dtype:
            return False
        elif not torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True
