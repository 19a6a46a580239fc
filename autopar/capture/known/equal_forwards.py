"""Whether a function computes what a module's own forward does: values and gradients, in float64, on random numbers.

The module is copied with random weights, so one on the meta device is as good as any, and it is given random tensors of the
shapes that it was given in the model, or fewer rows of them. Where weights are large, every large size is divided by the
same number (4096, 14336 and 28672 by 512): what is computed is the same, and the ratios of the sizes are.

No gradient (None) is not a gradient of zeros. Beside random rows both forwards get rows that are all alike, so that parts of the
module (experts) are left out. A tensor that then has no gradient must have none of the other forward, or zeros where it is
known when it has one (`conditional_gradients.py`), since a program can leave these zeros out.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.before.conditional_gradients import Draw, Sometimes, Way, doubtful, learned, named, varying
from autopar.capture.examples.trees import flatten, rebuild
from autopar.capture.known.promoted import AnyDtype, Promote

Integers = Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
"""(module, shape, generator) → integers that the module may be given."""
Forward = Callable[..., Any]
Chosen = Callable[..., Tensor]
"""A function of a module and of what its forward is given: integers that say which of its parts each row takes."""
Values = dict[str, Tensor | None]
"""Results, and gradients (None: there is none)."""
GRADIENT = "the gradient of "
MOST_ROWS = 256
MANY_ELEMENTS = 1 << 24
POOL, MOST_DRAWS, OFTEN = 2048, 400, 2
"""The draws that leave parts of a module out: from how many rows theirs are taken, how many draws there are at most,
and how many of them name a number."""
ROUNDING = 10.0
"""How much more the casts of a forward may round than those of the module's own."""
LARGE, LEAST = 512, 8
"""Sizes from which on they may be divided, and what is left of them at least."""


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments that a module was given: a structure of tensors, of which only shapes and dtypes count."""

    tensors: tuple[Tensor, ...]
    structure: Any


@dataclass(frozen=True, eq=False)
class Proof:
    """The largest difference of two forwards, relative to the largest entry of a tensor, and in which; infinity where one has a
    tensor, or a gradient, that the other has not. sometimes: which tensors have a gradient in some steps only."""

    difference: float
    tensor: str
    sometimes: Sometimes


def largest_difference(
    module: nn.Module, known: Forward, given: Given, integers: Integers, steps: int | None = None
) -> tuple[float, str]:
    """The largest difference of the forward of the module's class and `known`, and in which tensor, as `compared` finds it."""
    proof = compared(module, known, given, integers, steps)
    return proof.difference, proof.tensor


def compared(
    module: nn.Module,
    known: Forward,
    given: Given,
    integers: Integers,
    steps: int | None = None,
    chosen: Chosen | None = None,
) -> Proof:
    """The forward of the module's class and `known`. steps: of the second dim of what it was given, a sequence, no more than so
    many. chosen: says which parts rows take (None: an integer tensor among what it was given). Raises whatever a forward
    raises."""
    own: Forward = type(module).forward
    given = _shortened(given, steps)
    try:
        random = RandomModule(module, given, integers, divisor_of(module))
        expected = random.values(own, random.first)
    except Exception:  # a forward that computes with sizes known to others than its module
        random = RandomModule(module, given, integers, 1)
        expected = random.values(own, random.first)
    tried: list[tuple[list[Tensor], Values]] = []
    draws: list[Draw] = []

    def note(tensors: list[Tensor], values: Values) -> None:
        tried.append((tensors, values))
        draws.append(random.told(tensors, values, chosen))

    note(random.first, expected)
    for tensors in random.alike():
        values = random.values(own, tensors)
        if _finite(values):  # else of rows that are all alike a module makes no numbers
            note(tensors, values)
    sometimes: Sometimes | None = Sometimes()
    if varying(draws) and draws[0].named:
        for tensors in random.covering(draws, chosen):
            note(tensors, random.values(own, tensors))
        sometimes = learned(draws)
        if sometimes is not None and doubtful(draws, sometimes):
            sometimes = None
    left_out = frozenset(sometimes.numbers) if sometimes is not None else frozenset[str]()
    differences = [(0.0, "")]
    for number, (tensors, wanted) in enumerate(tried):
        values = random.values(known, tensors)
        differences += _differences(wanted, values, left_out)
        if number == 0:
            differences += _roundings(random, own, known, expected, values)
    worst, tensor = max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return Proof(worst, tensor, sometimes or Sometimes())


def _differences(wanted: Values, values: Values, left_out: frozenset[str]) -> list[tuple[float, str]]:
    """How far every tensor differs. left_out: tensors whose zeros a program leaves out where there is no gradient."""
    found = []
    for name in {**wanted, **values}:
        one, other = wanted.get(name), values.get(name)
        if name not in wanted or name not in values or (one is None) != (other is None):
            zeros = name in wanted and name in values and one is None and other is not None and not other.any()
            found.append((0.0 if zeros and name.removeprefix(GRADIENT) in left_out else math.inf, name))
        elif one is not None and other is not None:
            found.append((_difference(one, other), name))
    return found


def _finite(values: Values) -> bool:
    return all(value is None or bool(value.isfinite().all()) for value in values.values())


def _roundings(
    random: RandomModule, own: Forward, known: Forward, expected: Values, values: Values
) -> list[tuple[float, str]]:
    """The rounding of a forward's casts beyond that of the module's own, and results of other dtypes."""
    own_rounded, rounded = random.rounded(own), random.rounded(known)
    found = [(math.inf, n) for n in own_rounded if n in rounded and own_rounded[n].dtype != rounded[n].dtype]
    pairs = ((expected, own_rounded), (values, rounded))
    rounding = [max(_difference(x[n], y[n]) for n in y) for x, y in pairs if y]
    if rounding and rounding[1] > ROUNDING * rounding[0]:
        found.append((rounding[1], "what its casts round"))
    return found


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)) if one.numel() else 0.0


class RandomModule:
    """A copy of a module with random weights and inputs, sizes divided by `divisor`. first: its inputs, to begin with, of no
    more than `most_rows` rows."""

    def __init__(
        self, module: nn.Module, given: Given, integers: Integers, divisor: int, most_rows: int = MOST_ROWS
    ) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.structure = given.structure
        self.module = _copied(module, divisor, self._generator)
        self._given, self._integers, self._divisor, self._most_rows = given, integers, divisor, most_rows
        self.first = self._draw()

    def _draw(self) -> list[Tensor]:
        shapes = _fewer_rows([tuple(t.shape) for t in self._given.tensors], self._most_rows)
        tensors = []
        for tensor, (rows, *rest) in zip(self._given.tensors, (shape or (None,) for shape in shapes), strict=True):
            shape = () if rows is None else (rows, *(_divided(n, self._divisor) for n in rest))
            if tensor.is_floating_point():
                drawn = _random(shape, self._generator)
            elif tensor.dtype == torch.bool:
                drawn = torch.rand(shape, generator=self._generator) < 0.5
            else:
                drawn = self._integers(self.module, shape, self._generator).to(tensor.dtype)
            tensors.append(drawn)
        return tensors

    def alike(self) -> list[list[Tensor]]:
        """Rows that are all one of the first inputs': the first two, and those whose integers are the least and the largest."""
        rows = {0, 1}
        for t in self.first:
            if not t.is_floating_point() and t.ndim and t.numel():
                sums = t.reshape(len(t), -1).long().sum(1)
                rows |= {int(sums.argmin()), int(sums.argmax())}
        return [_all_alike(self.first, row) for row in sorted(rows)]

    def covering(self, draws: Sequence[Draw], chosen: Chosen | None) -> Iterator[list[Tensor]]:
        """Rows that are all alike, until it is certain which numbers each tensor's gradient depends on. draws: those so far, to
        which the caller adds."""
        seen = {tuple(draw.named.items()) for draw in draws}
        often = Counter(pair for draw in draws[1:] for pair in _numbers(draw))
        most = max((len(t) for t in self.first if t.ndim), default=0)
        for _ in range(-(-POOL // max(most, 1))):
            found = learned(draws)
            if found is None or len(draws) > MOST_DRAWS:
                return
            doubted, tensors = doubtful(draws, found), self._draw()
            always = set(_numbers(draws[1])).intersection(*map(_numbers, draws[2:])) if draws[1:] else set()
            alone = {pair for draw in draws[1:] for pair in _numbers(draw) if len(draw.named[pair[0]]) == 1}
            together = set(_numbers(self.told(tensors, {}, chosen)))  # what rows name one by one is among it
            known = all(pair in alone or often[pair] >= OFTEN for pair in together)
            if known and not always and not doubted & {n for _, n in together}:
                continue
            for row in range(most):
                rows = _all_alike(tensors, row)
                told = self.told(rows, {}, chosen)
                numbers = set(_numbers(told))
                rare = any(often[pair] < OFTEN for pair in numbers)
                if tuple(told.named.items()) not in seen and (
                    rare or always - numbers or doubted & {n for _, n in numbers}
                ):
                    seen.add(tuple(told.named.items()))
                    often.update(numbers)
                    always &= numbers
                    yield rows

    def told(self, tensors: Sequence[Tensor], values: Values, chosen: Chosen | None) -> Draw:
        """The draw of these inputs: the numbers that they name, and which gradients there were then."""
        args, kwargs = rebuild(self.structure, list(tensors))
        present = {
            name.removeprefix(GRADIENT): v is not None for name, v in values.items() if name.startswith(GRADIENT)
        }
        with torch.no_grad(), _by_default(torch.float64), Promote(torch.float64):
            return Draw(present, named(choices(chosen, self.module, args, kwargs)))

    def values(self, forward: Forward, tensors: Sequence[Tensor]) -> Values:
        """Results, and gradients of a random linear function of them, by name. Casts inside the forward do not round."""
        module = copy.deepcopy(self.module)  # a forward may note something in it
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        args, kwargs = rebuild(self.structure, list(leaves))
        with torch.enable_grad(), _by_default(torch.float64), Promote(torch.float64):
            results, _, _ = flatten(forward(module, *args, **kwargs))
            values: Values = {f"result {i}": t.detach() for i, t in enumerate(results)}
            return values | self._gradients(module, leaves, results)

    def on_numbers(
        self, forward: Forward, tensors: Sequence[Tensor]
    ) -> tuple[nn.Module, list[Tensor], Callable[[Any], Any]]:
        """The module and inputs anew, and what runs a forward on them within a context, in float64 and without gradients."""
        module, given = copy.deepcopy(self.module), [t.clone() for t in tensors]
        args, kwargs = rebuild(self.structure, list(given))

        def run(context: Any) -> Any:
            with torch.no_grad(), _by_default(torch.float64), Promote(torch.float64), context:
                return forward(module, *args, **kwargs)

        return module, given, run

    def rounded(self, forward: Forward) -> dict[str, Tensor]:
        """Results in float64 with the casts inside of the forward."""
        module = copy.deepcopy(self.module)
        args, kwargs = rebuild(self.structure, list(self.first))
        with torch.no_grad(), _by_default(torch.float64), AnyDtype():
            results, _, _ = flatten(forward(module, *args, **kwargs))
        return {f"result {i}": t for i, t in enumerate(results)}

    def _gradients(self, module: nn.Module, leaves: Sequence[Tensor], results: Sequence[Tensor]) -> Values:
        """The gradients by tensor; None where there is none, as of an expert that no row chose."""
        wanted = {input_slot(i): t for i, t in enumerate(leaves) if t.requires_grad}
        wanted |= {name: p for name, p in module.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(1)
        pulls = [(t, _random(t.shape, generator)) for t in results if t.is_floating_point() or t.is_complex()]
        heads, tangents = [t for t, _ in pulls if t.requires_grad], [pull for t, pull in pulls if t.requires_grad]
        if not heads or not wanted:
            return dict.fromkeys(f"{GRADIENT}{slot}" for slot in wanted)
        grads = torch.autograd.grad(heads, list(wanted.values()), tangents, allow_unused=True)
        return {f"{GRADIENT}{slot}": grad for slot, grad in zip(wanted, grads, strict=True)}


def input_slot(i: int) -> str:
    """The name of the tensor number i that a module is given beside its parameters."""
    return f"input {i}"


def choices(chosen: Chosen | None, module: nn.Module, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The integers that say which of its parts rows take: those of `chosen`, else all that it is given."""
    if chosen is not None:
        return [chosen(module, *args, **kwargs)]
    return [t for t in flatten((args, kwargs))[0] if not (t.is_floating_point() or t.is_complex())]


def _numbers(draw: Draw) -> Iterator[tuple[Way, int]]:
    return ((way, number) for way, numbers in draw.named.items() for number in numbers)


def _all_alike(tensors: Sequence[Tensor], row: int) -> list[Tensor]:
    """Every row of every tensor the same one of them; a permutation stays one."""
    return [t if not t.ndim or not len(t) or _permutes(t) else t[row % len(t)].expand_as(t).clone() for t in tensors]


def _permutes(t: Tensor) -> bool:
    whole = t.ndim == 1 and len(t) > 1 and not t.is_floating_point() and t.dtype != torch.bool
    return whole and torch.equal(t.sort().values, torch.arange(len(t), dtype=t.dtype))


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _shortened(given: Given, steps: int | None) -> Given:
    """The arguments with no more than so many steps of a sequence, the second dim of the first tensor and of all that
    share it."""
    length = next((t.shape[1] for t in given.tensors if t.ndim > 1), 0)
    if steps is None or length <= steps:
        return given
    tensors = (t[:, :steps] if t.ndim > 1 and t.shape[1] == length else t for t in given.tensors)
    return Given(tuple(tensors), given.structure)


def _copied(module: nn.Module, divisor: int, generator: torch.Generator) -> nn.Module:
    """A copy of the module with random weights in float64, and without dropout."""
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


def divisor_of(module: nn.Module) -> int:
    """A divisor of the large sizes of its weights, 1 where they are few."""
    weights = [*module.parameters(), *module.buffers()]
    sizes = {n for t in weights for n in t.shape if n > LARGE}
    if sum(t.numel() for t in weights) <= MANY_ELEMENTS or not sizes:
        return 1
    common = math.gcd(*sizes)
    return next((n for n in range(common, 1, -1) if common % n == 0 and min(sizes) // n >= LEAST), 1)


def _divided(n: int, divisor: int) -> int:
    return n // divisor if n > LARGE and n % divisor == 0 else n


def _fewer_rows(shapes: Sequence[tuple[int, ...]], most_rows: int) -> list[tuple[int, ...]]:
    """The first dim of all shapes divided by one number, so that no more than so many rows are left."""
    rows = [shape[0] for shape in shapes if shape]
    common, most = math.gcd(*rows), max(rows, default=0)
    parts = next((n for n in range(1, common + 1) if common % n == 0 and most // n <= most_rows), max(common, 1))
    return [(shape[0] // parts, *shape[1:]) if shape else () for shape in shapes]
