"""A sharding rule by experiment (EasyDist's idea): run the op on parts and see how the results recombine.

A hypothesis is a choice of operand dims of one size, and for every result the dim in which the parts' results are
joined, or none where they are to be added. It is tested on random data, positive and signed, for every number of parts
that divides the size; then factors are tested in pairs, as two mesh axes would combine them. What holds becomes a
factor, everything else stays whole. Random ops, and ops whose results on random data say nothing (constant, not
finite), get no rule; ops whose other arguments name sizes usually fail on parts and so stay whole: the experiment can
miss a factor, but it does not invent one. Kernels that trust their callers' sizes, as those of backward do, read past a part
whose hypothesis is wrong: behind each part there is room for as much as the whole holds, filled with what gives that away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ir.types import TensorType
from autopar.ops.labels import Maker

_MOST_ELEMENTS = 1 << 23
"""Elements of all that a call reads and makes up to which there are experiments, which take seconds there."""
_MANY_ELEMENTS = 1 << 18
_SAMPLED = 4
Tensor = torch.Tensor
Places = tuple[int | None, ...]


def target_of(op: str) -> Any:
    """The operator called `aten.sum.dim_IntList`."""
    parts = op.split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1])
    return getattr(packet, parts[2] if len(parts) > 2 else "default")


def run_call(call: OpCall, tensors: list[Tensor]) -> list[Tensor | None]:
    """Run the op of `call` on real tensors in place of its operands."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, Operand):
            return tensors[arg.index]
        if isinstance(arg, list):
            return [fill(a) for a in arg]
        return arg

    out = target_of(call.op)(**{k: fill(v) for k, v in call.arguments.items()})
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    return [o if isinstance(o, Tensor) else None for o in outs]


def random_operand(type_: TensorType, generator: torch.Generator, signed: bool = False, wide: bool = True) -> Tensor:
    """Random data of a type, floats as float64 if `wide`; integers stay small so that they are valid indices."""
    if type_.dtype == torch.bool:
        return torch.rand(type_.shape, generator=generator) < 0.5
    if type_.dtype.is_complex:
        return torch.randn(type_.shape, generator=generator, dtype=torch.complex128 if wide else type_.dtype)
    if type_.dtype.is_floating_point:
        draw = torch.randn if signed else torch.rand
        data = draw(type_.shape, generator=generator, dtype=torch.float64) + (0.0 if signed else 0.1)
        return data if wide else data.to(type_.dtype)
    return torch.randint(0, 2, type_.shape, generator=generator, dtype=type_.dtype)


@dataclass(frozen=True)
class _Split:
    """Dim `operands[i]` of operand i is cut into `parts`, results are joined in dim `results[i]` (None: added)."""

    size: int
    parts: int
    operands: Places
    results: Places


@dataclass(frozen=True)
class _Trial:
    """Random operands and what the whole op gives."""

    call: OpCall
    operands: list[Tensor]
    whole: list[Tensor | None]

    def recombines(self, splits: list[_Split]) -> bool:
        """Whether running on every combination of parts and joining gives the whole."""
        joined = [s for s in splits if None not in s.results]
        added = [s for s in splits if None in s.results]
        if any(
            s.results[i] is None and w is not None and not w.dtype.is_floating_point
            for s in added
            for i, w in enumerate(self.whole)
        ):
            return False
        # A join can be checked place by place; results that are sums in one place and joins in another need all parts.
        mixed = any(d is not None for s in added for d in s.results)
        for where in itertools.product(*(_places(s.parts) for s in joined)):
            blocks = list(zip(joined, where, strict=True))
            try:
                held = [
                    run_call(self.call, self._cut([*blocks, *zip(added, inner, strict=True)]))
                    for inner in itertools.product(*(range(s.parts) for s in added))
                ]
            except Exception:
                return False
            combined = self._combined(held, added) if mixed else [_sum(list(ts)) for ts in zip(*held, strict=True)]
            if not _same(combined, self._expected(blocks)):
                return False
        return True

    def _cut(self, blocks: list[tuple[_Split, int]]) -> list[Tensor]:
        cut = list(self.operands)
        for split, index in blocks:
            n = split.size // split.parts
            cut = [t if d is None else t.narrow(d, index * n, n) for t, d in zip(cut, split.operands, strict=True)]
        room = max(t.numel() for t in self.operands)
        return [_with_room(t, room) for t in cut]

    def _expected(self, blocks: list[tuple[_Split, int]]) -> list[Tensor | None]:
        expected = list(self.whole)
        for split, index in blocks:
            n = split.size // split.parts
            for i, d in enumerate(split.results):
                value = expected[i]
                if value is not None and d is not None:
                    expected[i] = value.narrow(d, index * n, n)
        return expected

    def _combined(self, held: list[list[Tensor | None]], added: list[_Split]) -> list[Tensor | None]:
        """Fold the innermost split first: join where it joins, add where it adds."""
        for split in reversed(added):
            groups = [held[i : i + split.parts] for i in range(0, len(held), split.parts)]
            held = [
                [
                    _sum(list(ts)) if d is None else _cat(list(ts), d)
                    for ts, d in zip(zip(*group, strict=True), split.results, strict=True)
                ]
                for group in groups
            ]
        return held[0]


def _with_room(part: Tensor, room: int) -> Tensor:
    """A copy of a part before `room` elements that are no numbers, or integers that no operand has."""
    behind = math.nan if part.is_floating_point() or part.is_complex() else 2
    storage = torch.full((part.numel() + room,), behind, dtype=part.dtype)
    return storage[: part.numel()].view(part.shape).copy_(part)


def _sum(terms: list[Tensor | None]) -> Tensor | None:
    total = terms[0]
    for term in terms[1:]:
        total = total + term if total is not None and term is not None and total.shape == term.shape else None
    return total


def _cat(terms: list[Tensor | None], dim: int) -> Tensor | None:
    present = [t for t in terms if t is not None]
    try:
        return torch.cat(present, dim) if len(present) == len(terms) else None
    except (RuntimeError, IndexError):
        return None


def _places(parts: int) -> list[int]:
    return list(range(parts)) if parts <= _SAMPLED else [0, 1, parts // 2, parts - 1]


def discover(call: OpCall) -> Rule | None:
    """The rule that experiments support, or None when they say nothing."""
    made = sum(t.numel for t in call.results if t is not None)
    if not call.operands or sum(t.numel for t in call.operands) + made > _MOST_ELEMENTS:
        return None
    with torch.no_grad():
        trials = _trials(call, wide=True) or _trials(call, wide=False)
        return _build(call, trials) if trials else None


def _trials(call: OpCall, wide: bool) -> list[_Trial]:
    trials = []
    many = sum(t.numel for t in call.operands) > _MANY_ELEMENTS
    for seed, signed in enumerate((False, True) if many else (False, True, True, True)):
        generator = torch.Generator().manual_seed(seed)
        operands = [random_operand(t, generator, signed, wide) for t in call.operands]
        try:
            whole = run_call(call, [t.clone() for t in operands])
            again = run_call(call, [t.clone() for t in operands])
        except Exception:
            continue  # the op does not take such data
        if not _same(whole, again):
            return []  # random or stateful
        trials.append(_Trial(call, operands, whole))
    telling = any(all(_telling(t) for t in trial.whole if t is not None) for trial in trials)
    return trials if telling else []


def _telling(result: Tensor) -> bool:
    """Whether a result could expose a wrong hypothesis."""
    if result.dtype.is_floating_point or result.dtype.is_complex:
        if result.isfinite().sum() * 2 <= result.numel():
            return False
    flat = result.reshape(-1)
    return bool((flat != flat[0]).any()) if flat.numel() > 1 else bool(flat.any())


def _build(call: OpCall, trials: list[_Trial]) -> Rule:
    make = Maker()
    whole = trials[0].whole
    dims: list[list[tuple[str, ...]]] = [[()] * len(t.shape) for t in call.operands]
    outs: list[list[tuple[str, ...]]] = [[()] * (t.ndim if t is not None else 0) for t in whole]
    kept: list[_Split] = []
    for split in _hypotheses(call, whole):
        if any(d is not None and dims[i][d] for i, d in enumerate(split.operands)):
            continue
        if any(d is not None and outs[i][d] for i, d in enumerate(split.results)):
            continue
        if not _holds(trials, split) or not all(_hold_together(trials, split, other) for other in kept):
            continue
        name = f"f{len(kept)}"
        kept.append(split)
        for i, d in enumerate(split.operands):
            if d is not None:
                dims[i][d] = make.add(name, split.size)
        for i, d in enumerate(split.results):
            if d is not None:
                outs[i][d] = (name,)
    results: list[Labels | None] = [tuple(o) if t is not None else None for o, t in zip(outs, whole, strict=True)]
    return make.rule([tuple(d) for d in dims], results)


def _hypotheses(call: OpCall, whole: list[Tensor | None]) -> list[_Split]:
    """The splits that are worth testing: more operands first, joined results before sums."""
    hypotheses: list[_Split] = []
    for size in sorted({n for s in call.shapes for n in s if n > 1}):
        per_operand = [[*(d for d, n in enumerate(s) if n == size), None] for s in call.shapes]
        per_result = [
            [*(d for d, n in enumerate(t.shape) if n == size), None] if t is not None else [None] for t in whole
        ]
        if math.prod(map(len, per_operand)) * math.prod(map(len, per_result)) > 512:
            continue
        for operands in itertools.product(*per_operand):
            if any(d is not None for d in operands):
                hypotheses += [
                    _Split(size, next(_divisors(size)), operands, results) for results in itertools.product(*per_result)
                ]
    return sorted(hypotheses, key=lambda h: (sum(d is None for d in h.operands), sum(d is None for d in h.results)))


def _divisors(size: int) -> Iterator[int]:
    """Numbers of parts from two up."""
    return (p for p in range(2, size + 1) if size % p == 0)


def _holds(trials: list[_Trial], split: _Split) -> bool:
    """Tested for every number of parts; sums, which need all parts, up to eight and for single elements."""
    added = None in split.results
    for parts in _divisors(split.size):
        if added and parts > 8 and (parts < split.size or parts > 64):
            continue
        finer = _Split(split.size, parts, split.operands, split.results)
        if not all(t.recombines([finer]) for t in trials):
            return False
    return True


def _hold_together(trials: list[_Trial], one: _Split, other: _Split) -> bool:
    return all(t.recombines([one, other]) for t in trials)


def _same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
            continue
        tolerance = _TOLERANCE.get(x.dtype, 1e-2)
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            return False
    return True


_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
