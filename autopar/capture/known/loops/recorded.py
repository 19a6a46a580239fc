"""A run of a forward on numbers, call of torch by call, and its repetition along that record.

A loop over the experts that a batch chose depends on data: how often it runs, and over which rows. Recorded are all calls of
torch that forward makes. Those that read data (`nonzero`, `x[mask]`, `tolist`), and whatever is computed from what they gave, are
*held*: in a repetition they give what was recorded, without being run, so Python goes the same way. All others are run.

    chosen = probs.topk(2).indices        run
    rows = torch.where(chosen == e)[0]    held
    y.index_add_(0, rows, expert(x[rows]))  held: a write with held numbers; the last one of the loop *adds* what is known to be
                                          the sum of all of them, which the repetition computes by another way

Where forward goes on with the sum in a new tensor instead, that call *gives* it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CLOSE = 1e-9
_READS = frozenset(
    [
        "nonzero",
        "argwhere",
        "masked_select",
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__index__",
        "__float__",
        "__contains__",
        "__array__",
        "unique",
        "unique_consecutive",
        "bincount",
        "equal",
        "allclose",
        "is_nonzero",
    ]
)
_PLAIN = frozenset(("__bool__", "__int__", "__index__", "__float__", "__contains__", "__len__"))
"""Calls whose results Python wants in a type of its own."""
_UNSEEN = frozenset(["device", "is_cuda", "is_cpu", "is_meta", "layout", "requires_grad", "grad_fn", "is_leaf"])
"""Fields that fake tensors answer without a call of torch."""
_OF_SHAPE = frozenset(
    f"{name}{end}" for name in ("zeros", "ones", "empty", "full", "rand", "randn") for end in ("_like",)
) | {"new_zeros", "new_ones", "new_empty", "new_full"}


class NotThisWay(Exception):
    """Raised where a forward cannot be repeated along its record."""


class HeldInt(int):
    """A number that the data decided; what is computed from it is one too."""

    __slots__ = ()


def _operator(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def computed(self: int, *others: Any) -> Any:
        value = plain(self, *others)
        return HeldInt(value) if type(value) is int else value

    return computed


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg"):
    setattr(HeldInt, f"__{_name}__", _operator(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class Entry:
    """One call of torch, or of an expert. does: "run", "held", "gives", "adds" (to its first argument) or "nothing" (a write
    that changed nothing). tensors: its arguments among tensors; reads: whether it reads data."""

    func: Any
    tensors: tuple[Tensor, ...]
    result: Any
    does: str
    reads: bool = False
    expert: int | None = None


@dataclass(frozen=True, eq=False)
class Sought:
    """The sum that a forward computes, one of several guesses, rows flattened: (rows, d) each; and behind which call."""

    guesses: tuple[Tensor, ...]
    behind: int


def tensors_in(value: Any) -> Iterator[Tensor | HeldInt]:
    """The tensors, and numbers that data decided, among arguments or results."""
    if isinstance(value, (Tensor, HeldInt)):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def name_of_call(func: Any) -> str:
    """The name of a function of torch; `shape` for the getter of that field."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _reads(name: str, args: Any, kwargs: Any) -> bool:
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values()))
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)
        return masks and not (name == "__setitem__" and not getattr(args[2], "ndim", 0))
    return name in _READS


def _writes(name: str, kwargs: Any) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
    )


def _held(name: str, result: Any) -> Any:
    """The record of a held call's result: numbers know that data decided them; of a shape the first dim."""
    if name in _PLAIN:
        return result
    if name == "shape" or (name == "size" and isinstance(result, tuple)):
        return tuple(HeldInt(n) if i == 0 else n for i, n in enumerate(result))
    if isinstance(result, np.ndarray):
        return np.vectorize(HeldInt, otypes=[object])(result) if result.dtype.kind == "i" and result.size else result
    if type(result) is int:
        return HeldInt(result)
    return [_held("", one) for one in result] if type(result) is list else result


def _anew(result: Any) -> Any:
    """A result that may be given once more."""
    if isinstance(result, _Iterated):
        return iter(result.items)
    if isinstance(result, np.ndarray):
        return result.copy()
    return [_anew(one) for one in result] if type(result) is list else result


@dataclass(frozen=True, eq=False)
class _Iterated:
    items: tuple[Any, ...]


class Recording(TorchFunctionMode):
    """The record of a forward that runs on numbers. entries: the calls; calls: which of them are calls of experts on held rows,
    each an expert's number, its rows and what it gave; found: the number of the guess that a call gave or added."""

    def __init__(self, sought: Sought | None = None) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.calls: list[tuple[int, int, Tensor, Tensor]] = []
        self.found: int | None = None
        self._sought = sought
        self._alive: list[Any] = []
        self._held: set[int] = set()
        self._written: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}
        self._inside = self._asked = False

    def holds(self, value: Any) -> bool:
        """Whether the data decided a value, or one in it."""
        return any(
            isinstance(t, HeldInt) or id(t) in self._held or _storage(t) in self._written for t in tensors_in(value)
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or name_of_call(func) in _UNSEEN:
            return func(*args, **kwargs)
        name = name_of_call(func)
        held, reads = self.holds((args, kwargs)), _reads(name, args, kwargs)
        writes = _writes(name, kwargs) and isinstance(args[0], Tensor)
        if writes and held:
            self._before_writing(args[0])
        result = func(*args, **kwargs)
        if name == "__iter__":
            result = _Iterated(tuple(result))
        does, self._asked = "run", self._asked or reads
        if writes and held:
            does = self._wrote(args[0])
        elif held or reads:
            result = _held(name, result)
            does = "gives" if self._is_sought(result) else "held"
        self._note(Entry(func, only_tensors((args, kwargs)), result, does, reads))
        return _anew(result)

    def _note(self, entry: Entry) -> None:
        self.entries.append(entry)
        items = entry.result.items if isinstance(entry.result, _Iterated) else entry.result
        self._alive.append(items)
        if entry.does == "held":
            own = {id(t) for t in entry.tensors}
            self._held |= {id(t) for t in tensors_in(items) if isinstance(t, Tensor)} - (own - self._held)

    def expert(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of an expert: held once data were read, as they may have decided which expert it is. Raises NotThisWay where
        rows are not all that it is given."""
        self._inside = True
        try:
            held, result = self._asked or self.holds((args, kwargs)), forward(*args, **kwargs)
            if held:
                if len(args) != 1 or kwargs or not isinstance(result, Tensor) or not isinstance(args[0], Tensor):
                    raise NotThisWay
                if args[0].numel():
                    self.calls.append((len(self.entries), number, args[0], result))
        finally:
            self._inside = False
        self._note(Entry(None, only_tensors((args, kwargs)), result, "held" if held else "run", expert=number))
        return result

    # --- the sum

    def _before_writing(self, target: Tensor) -> None:
        storage = _storage(target)
        if storage not in self._written and storage not in self._added and id(target) not in self._held:
            self._written[storage] = _whole(target).clone()

    def _wrote(self, target: Tensor) -> str:
        storage = _storage(target)
        if id(target) in self._held:
            return "held"
        before = self._written.get(storage, self._added.get(storage))
        assert before is not None
        added = _whole(target) - before
        if storage in self._added:
            if not self._close(added, torch.zeros_like(added)):
                raise NotThisWay
            return "nothing"
        if not self._is_sought(added) or (target.numel() != added.numel() and target._base is None):
            return "held"
        del self._written[storage]
        self._added[storage] = _whole(target).clone()
        return "adds"

    def _is_sought(self, value: Any) -> bool:
        if self._sought is None or len(self.entries) <= self._sought.behind or not isinstance(value, Tensor):
            return False
        for number, guess in enumerate(self._sought.guesses):
            if value.numel() != guess.numel() or self.found not in (None, number):
                continue
            if value.is_floating_point() and self._close(value.reshape(guess.shape), guess):
                self.found = number
                return True
        return False

    @staticmethod
    def _close(value: Tensor, wanted: Tensor) -> bool:
        return (
            bool((value - wanted).abs().max() <= CLOSE * wanted.abs().max().clamp_min(1.0)) if wanted.numel() else True
        )


class Repeating(TorchFunctionMode):
    """The repetition of a record. kept: positions of calls of which results are wanted, in `results`; total: gives the sum, as
    rows, in the form of a given tensor, or of as many dims."""

    def __init__(
        self, entries: Sequence[Entry], kept: Sequence[int], total: Callable[[Tensor | int], Tensor], stop: int
    ) -> None:
        """stop: before which call to raise Stopped; len(entries): nowhere."""
        super().__init__()
        self._entries, self._kept, self._total, self._stop = entries, frozenset(kept), total, stop
        self.results: dict[int, Any] = {}
        self._at, self._inside = 0, False

    def _next(self, func: Any, expert: int | None = None) -> tuple[int, Entry]:
        at, self._at = self._at, self._at + 1
        if at == self._stop:
            raise Stopped
        if at >= len(self._entries) or self._entries[at].func != func or self._entries[at].expert != expert:
            raise NotThisWay
        return at, self._entries[at]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or name_of_call(func) in _UNSEEN:
            return func(*args, **kwargs)
        at, entry = self._next(func)
        if entry.does == "run":
            result = func(*args, **kwargs)
            if at in self._kept:
                self.results[at] = result
            return result
        if entry.does == "held" and name_of_call(func) == "dtype" and entry.result.is_floating_point:
            kept = only_tensors(list(self.results.values()))
            return next((t.dtype for t in kept if t.is_floating_point()), entry.result)
        if entry.does in ("gives", "adds"):
            target = args[0] if entry.does == "adds" else None
            if target is not None and target._base is not None:
                target = target._base
            self._inside = True
            try:
                total = self._total(entry.result.ndim if target is None else target)
            finally:
                self._inside = False
            if target is None:
                return total
            target.add_(total)
        returns = args[0] if _writes(name_of_call(func), kwargs) and entry.result is not None else None
        if entry.does in ("adds", "nothing"):
            return returns
        return returns if returns is not None else _anew(entry.result)

    def expert(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of an expert; those that the sum itself makes are run."""
        if self._inside:
            return forward(*args, **kwargs)
        _, entry = self._next(None, number)
        if entry.does == "held":
            return entry.result
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False


class Stopped(Exception):
    """Raised where a repetition was to stop."""


@contextmanager
def along(mode: Recording | Repeating, experts: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context calls of torch and of experts are those of the record."""

    def called(number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: mode.expert(number, own, args, kwargs)

    for number, expert in enumerate(experts):
        vars(expert)["forward"] = called(number, expert.forward)
    try:
        with mode:
            yield
    finally:
        for expert in experts:
            del vars(expert)["forward"]


def of_routing(entries: Sequence[Entry], routing: Sequence[Tensor]) -> bool:
    """Whether all that decided held values comes from these tensors and from constants: rows were selected by what was chosen,
    and by nothing else."""
    known = {id(t) for t in routing}
    for entry in entries:
        own = [t for t in entry.tensors if isinstance(t, Tensor)]
        results = [t for t in tensors_in(entry.result) if isinstance(t, Tensor)]
        name = name_of_call(entry.func)
        if entry.reads:
            asked = {"__getitem__": own[1:], "masked_select": own[1:], "__setitem__": own[1:-1]}.get(name, own)
            if not all(id(t) in known for t in asked):
                return False
            known |= {id(t) for t in results}
        elif name in _OF_SHAPE or (entry.expert is None and all(id(t) in known for t in own)):
            known |= {id(t) for t in results} if own or not name.startswith("rand") else set()
        elif _writes(name, {}) and own:
            known.discard(id(own[0]))
    return True


def only_tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors among arguments or results."""
    return tuple(t for t in tensors_in(value) if isinstance(t, Tensor))


def _whole(tensor: Tensor) -> Tensor:
    """All elements of its memory."""
    return torch.as_strided(tensor.detach(), (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0
