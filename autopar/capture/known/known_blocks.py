"""Modules that are traced by another forward than their own, which is known to compute the same.

A loop over the experts that a batch chose has no graph: how often it runs, and over how many rows, only the data decides.
What it computes has one, and whoever knows it says so:

    @autopar.forward_of(Experts)
    def experts(self, x, chosen, weights): ...

While a step is traced that function takes the place of `Experts.forward`; afterwards the module is as it was. Before a
program is made of it both are run in float64 on random numbers of the shapes that the module was given, and must agree in
values and gradients, and in which gradients there are: an expert that no row chose has none, which optimizers see. The proof
finds out which tensors that concerns; while a step is traced, what modules are given and their parameters pass `gradient_if`, so
that the graph says at which places. `autopar.capture.known.known_transformers` knows the experts of Hugging Face's transformers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.before.conditional_gradients import Sometimes
from autopar.capture.examples.trees import flatten, rebuild
from autopar.capture.explain import first_line
from autopar.capture.known.equal_forwards import Chosen, Forward, Given, Integers, choices, compared, input_slot
from autopar.errors import CaptureError, InputError
from autopar.ops.chosen import gradient_if
from autopar.runtime.data.origin import name_of

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Known:
    """A forward for the modules that `matches` names. passed_on: named arguments that it hands to the module's own code, and
    that are None in the proof (a cache, which either forward would fill). steps: as many steps of a
    sequence, the second dim of what it is given, are enough for the proof, as its own forward is slow in them; None: all.
    chosen: of what forward is given, which parts each row takes; None: an integer tensor among it says so, if any.
    applies: whether it may stand for a module's own forward of what that is given; None: always."""

    matches: Callable[[nn.Module], bool]
    forward: Forward
    integers: Integers
    passed_on: frozenset[str] = frozenset()
    steps: Callable[[nn.Module], int] | None = None
    chosen: Chosen | None = None
    applies: Callable[..., bool] | None = None


@dataclass(frozen=True, eq=False)
class Use:
    """A module that was traced by a known forward, and what it was given. number: of the module among those."""

    name: str
    module: nn.Module
    known: Known
    given: Given
    number: int = 0

    @property
    def what(self) -> str:
        """Module class and function, in words."""
        return f"{name_of(type(self.module))} by {name_of(self.known.forward)}"


@dataclass(frozen=True)
class _Proven:
    """key: what a proof depends on."""

    key: Any
    sometimes: Sometimes


_KNOWN: list[Known] = []
_PROVEN: set[_Proven] = set()


def below(n: int) -> Integers:
    """Numbers below n; along the last dim no number twice, where it is no longer than n."""

    def integers(module: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if shape and shape[-1] <= n:
            return torch.rand(*shape[:-1], n, generator=generator).argsort(-1)[..., : shape[-1]]
        return torch.randint(0, n, shape, generator=generator)

    return integers


def know(
    matches: Callable[[nn.Module], bool],
    forward: Forward,
    integers: Integers,
    passed_on: Sequence[str] = (),
    steps: Callable[[nn.Module], int] | None = None,
    chosen: Chosen | None = None,
) -> None:
    """Trace modules that match by `forward`; of several that match the last one counts."""
    _KNOWN.insert(0, Known(matches, forward, integers, frozenset(passed_on), steps, chosen))


def all_known() -> tuple[Known, ...]:
    """All that are known, those that count first."""
    return tuple(_KNOWN)


def forward_of(
    cls: type[nn.Module], *, integers: int | Integers = 2, chosen: Chosen | None = None
) -> Callable[[Forward], Forward]:
    """Decorate a function `forward(self, …)` that modules of class `cls` are traced by, instead of by their own forward.

    It must compute the same with torch ops of fixed shapes, which is proven before it is used. `autopar.grouped_mm`
    multiplies every row by the matrix of its group. integers: what integer tensors hold when it is proven: numbers below
    so many (no number twice along the last dim, as experts are chosen), or a function of module, shape and generator.
    chosen(self, …): integers that say which of the module's parts each row takes, where parts that no row takes have no
    gradient (None in eager), and none of the integer tensors that forward is given says which. Raises InputError.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"forward_of takes a class of modules, not {cls!r}")

    def add(forward: Forward) -> Forward:
        drawn = integers if callable(integers) else below(integers)
        know(lambda module: forward_class(module) is cls, forward, drawn, chosen=chosen)
        return forward

    return add


def forward_class(module: nn.Module) -> type[nn.Module]:
    """The class that the forward of a module comes from."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


@contextmanager
def known_forwards(model: nn.Module, others: Sequence[Known] = ()) -> Iterator[list[Use]]:
    """Within the context known modules of the model run by their known forward. others: known forwards for modules that none of
    those stands for. Yields their uses, once they have run."""
    uses: list[Use] = []
    replaced: list[nn.Module] = []
    for name, module in model.named_modules():
        known = next((one for one in (*_KNOWN, *others) if one.matches(module)), None)
        if known is not None and "forward" not in vars(module):
            vars(module)["forward"] = types.MethodType(_noting(name, known, uses, len(replaced)), module)
            replaced.append(module)
    try:
        yield uses
    finally:
        for module in replaced:
            del vars(module)["forward"]


def _noting(name: str, known: Known, uses: list[Use], number: int) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if known.applies is not None and not known.applies(self, *args, **kwargs):
            return forward_class(self).forward(self, *args, **kwargs)
        proven = {key: None if key in known.passed_on else value for key, value in kwargs.items()}
        tensors, _, structure = flatten((args, proven))
        likes = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors)
        uses.append(Use(name, self, known, Given(likes, structure), number))
        parts = choices(known.chosen, self, args, proven)
        if not parts:
            return known.forward(self, *args, **kwargs)

        def marked(t: Tensor, slot: str) -> Tensor:
            return gradient_if(t, parts, number, slot) if t.requires_grad else t

        args, passed = rebuild(structure, [marked(t, input_slot(i)) for i, t in enumerate(tensors)])
        passed |= {key: value for key, value in kwargs.items() if key in known.passed_on}
        with _parameters(self, marked):
            return known.forward(self, *args, **passed)

    return forward


@contextmanager
def _parameters(module: nn.Module, instead: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """Within the context a module has other tensors in the place of its parameters."""
    tables = [part._parameters for part in module.modules()]
    before = [dict(table) for table in tables]
    others = {id(p): instead(p, name) for name, p in module.named_parameters()}
    try:
        for table in tables:
            table.update({name: others[id(p)] for name, p in table.items() if p is not None})  # type: ignore[misc]
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)


# --- proof


def prove(uses: Sequence[Use]) -> tuple[tuple[str, ...], dict[int, Sometimes]]:
    """The known forwards that modules were traced by, in words, each proven, and which tensors of each module, by its
    number, have a gradient in some steps only. Raises CaptureError for the first that is not equal."""
    found: dict[int, Sometimes] = {}
    for use in uses:
        key = _key(use)
        sometimes = next((one.sometimes for one in _PROVEN if one.key == key), None)
        if sometimes is None:
            sometimes = _prove(use)
            _PROVEN.add(_Proven(key, sometimes))
        if not found.setdefault(use.number, sometimes).same(sometimes):
            raise CaptureError(
                f"{use.what}, module {use.name}: which parameters have a gradient depends on the shapes that it is given; call "
                "it with tensors of one shape"
            )
    return tuple(dict.fromkeys(use.what for use in uses)), found


def _key(use: Use) -> Any:
    return use.known, *facts_of(use.module, use.given)


def facts_of(module: nn.Module, given: Given) -> tuple[Any, ...]:
    """The facts that a proof depends on."""
    weights = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    tensors = tuple((tuple(t.shape), t.dtype) for t in given.tensors)
    plain = tuple((k, repr(v)) for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)))
    return type(module), weights, tensors, repr(given.structure), plain


def _prove(use: Use) -> Sometimes:
    where, known = f"{use.what}, module {use.name}", use.known
    steps = None if known.steps is None else known.steps(use.module)
    try:
        proof = compared(use.module, known.forward, use.given, known.integers, steps, known.chosen)
    except Exception as error:
        raise CaptureError(
            f"{where}: whether both forwards are equal could not be found out, as one fails in float64: "
            f"{first_line(str(error))}. Fix the function given to forward_of"
        ) from error
    if not proof.difference <= TOLERANCE:
        raise CaptureError(
            f"{where}: the forwards are not equal in float64: {proof.tensor} differs by {proof.difference:.1e} of its largest "
            "entry (inf: one has none, or of another shape or dtype). Fix the function given to forward_of, or register one that "
            "is equal. Where parts of the module that no row takes have no gradient, forward_of(…, integers=…) must draw the "
            "numbers of all parts, and forward_of(…, chosen=…) says which rows take where no integer that forward is given does"
        )
    return proof.sometimes
