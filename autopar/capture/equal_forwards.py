"""Whether a function computes what a module's own forward does: values and gradients, in float64, on random numbers.

The module is copied with random weights, so one on the meta device is as good as any, and it is given random tensors of the
shapes that it was given in the model, or fewer rows of them. Where weights are large, every large size is divided by the
same number (4096, 14336 and 28672 by 512): what is computed is the same, and the ratios of the sizes are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.promoted import AnyDtype, Promote
from autopar.capture.trees import flatten, rebuild

Integers = Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
"""(module, shape, generator) → integers that the module may be given."""
Forward = Callable[..., Any]
Values = dict[str, Tensor]
MOST_ROWS = 256
MANY_ELEMENTS = 1 << 24
ROUNDING = 10.0
"""How much more the casts of a forward may round than those of the module's own."""
LARGE, LEAST = 512, 8
"""Sizes from which on they may be divided, and what is left of them at least."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a module was given: a structure of tensors, of which only shapes and dtypes count."""

    tensors: tuple[Tensor, ...]
    structure: Any


def largest_difference(
    module: nn.Module, known: Forward, given: Given, integers: Integers, steps: int | None = None
) -> tuple[float, str]:
    """The largest difference between the forward of the module's class and `known`, relative to the largest entry of a
    tensor, and in which; infinity where one has a tensor that the other has not. steps: of the second dim of what it was
    given, a sequence, no more than so many. Raises whatever a forward raises."""
    own: Forward = type(module).forward
    try:
        proof = _Proof(module, _shortened(given, steps), integers, _divisor(module))
        expected = proof.values(own)
    except Exception:  # a forward that computes with sizes known to others than its module
        proof = _Proof(module, _shortened(given, steps), integers, 1)
        expected = proof.values(own)
    values, own_rounded, rounded = proof.values(known), proof.rounded(own), proof.rounded(known)
    differences = [(_difference(expected.get(n), values.get(n)), n) for n in {**expected, **values}]
    differences += [(math.inf, n) for n in own_rounded if n in rounded and own_rounded[n].dtype != rounded[n].dtype]
    rounding = [max(_difference(x[n], y[n]) for n in y) for x, y in ((expected, own_rounded), (values, rounded)) if y]
    if rounding and rounding[1] > ROUNDING * rounding[0]:
        differences.append((rounding[1], "what its casts round"))
    return max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0]))


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)) if one.numel() else 0.0


class _Proof:
    """A copy of a module with random weights and inputs, sizes divided by `divisor`."""

    def __init__(self, module: nn.Module, given: Given, integers: Integers, divisor: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.structure = given.structure
        self.module = _copied(module, divisor, generator)
        shapes = _fewer_rows([tuple(t.shape) for t in given.tensors])
        self.tensors = []
        for tensor, (rows, *rest) in zip(given.tensors, (shape or (None,) for shape in shapes), strict=True):
            shape = () if rows is None else (rows, *(_divided(n, divisor) for n in rest))
            if tensor.is_floating_point():
                drawn = _random(shape, generator)
            elif tensor.dtype == torch.bool:
                drawn = torch.rand(shape, generator=generator) < 0.5
            else:
                drawn = integers(self.module, shape, generator).to(tensor.dtype)
            self.tensors.append(drawn)

    def values(self, forward: Forward) -> Values:
        """Results, and gradients of a random linear function of them, by name. Casts inside the forward do not round."""
        module = copy.deepcopy(self.module)  # a forward may note something in it
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in self.tensors]
        args, kwargs = rebuild(self.structure, list(leaves))
        with torch.enable_grad(), _by_default(torch.float64), Promote(torch.float64):
            results, _, _ = flatten(forward(module, *args, **kwargs))
            values = {f"result {i}": t.detach() for i, t in enumerate(results)}
            return values | self._gradients(module, leaves, [t for t in results if t.requires_grad])

    def rounded(self, forward: Forward) -> Values:
        """Results in float64 with the casts inside of the forward."""
        module = copy.deepcopy(self.module)
        args, kwargs = rebuild(self.structure, list(self.tensors))
        with torch.no_grad(), _by_default(torch.float64), AnyDtype():
            results, _, _ = flatten(forward(module, *args, **kwargs))
        return {f"result {i}": t for i, t in enumerate(results)}

    def _gradients(self, module: nn.Module, leaves: Sequence[Tensor], heads: Sequence[Tensor]) -> Values:
        """Zeros where there is none: an expert that no row chose has none."""
        wanted = {f"the gradient of input {i}": t for i, t in enumerate(leaves) if t.requires_grad}
        wanted |= {f"the gradient of {name}": p for name, p in module.named_parameters() if p.requires_grad}
        if not heads or not wanted:
            return {}
        generator = torch.Generator().manual_seed(1)
        pulls = [_random(t.shape, generator) for t in heads]
        grads = torch.autograd.grad(heads, list(wanted.values()), pulls, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(wanted.items(), grads, strict=True)
        }


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _shortened(given: Given, steps: int | None) -> Given:
    """With no more than so many steps of a sequence, the second dim of the first tensor and of all that share it."""
    length = next((t.shape[1] for t in given.tensors if t.ndim > 1), 0)
    if steps is None or length <= steps:
        return given
    tensors = (t[:, :steps] if t.ndim > 1 and t.shape[1] == length else t for t in given.tensors)
    return Given(tuple(tensors), given.structure)


def _copied(module: nn.Module, divisor: int, generator: torch.Generator) -> nn.Module:
    """With random weights in float64, and without dropout."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        shape = [_divided(n, divisor) for n in p.shape]
        memo[id(p)] = nn.Parameter(_random(shape, generator), requires_grad=p.requires_grad)
    for b in module.buffers():
        shape = [_divided(n, divisor) for n in b.shape]
        memo[id(b)] = (
            _random(shape, generator)
            if b.is_floating_point()
            else torch.zeros(shape, dtype=b.dtype)
            if b.is_meta
            else b
        )
    other = copy.deepcopy(module, memo)
    for part in other.modules():
        for name, value in vars(part).items():
            if type(value) is int:
                vars(part)[name] = _divided(value, divisor)
            elif type(value) is tuple and all(type(n) is int for n in value):
                vars(part)[name] = tuple(_divided(n, divisor) for n in value)
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
    return other


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5


def _divisor(module: nn.Module) -> int:
    """What large sizes of its weights can be divided by, 1 where they are few."""
    weights = [*module.parameters(), *module.buffers()]
    sizes = {n for t in weights for n in t.shape if n > LARGE}
    if sum(t.numel() for t in weights) <= MANY_ELEMENTS or not sizes:
        return 1
    common = math.gcd(*sizes)
    return next((n for n in range(common, 1, -1) if common % n == 0 and min(sizes) // n >= LEAST), 1)


def _divided(n: int, divisor: int) -> int:
    return n // divisor if n > LARGE and n % divisor == 0 else n


def _fewer_rows(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first dim of all shapes divided by one number, so that no more than so many rows are left."""
    rows = [shape[0] for shape in shapes if shape]
    common, most = math.gcd(*rows), max(rows, default=0)
    parts = next((n for n in range(1, common + 1) if common % n == 0 and most // n <= MOST_ROWS), max(common, 1))
    return [(shape[0] // parts, *shape[1:]) if shape else () for shape in shapes]
