"""Numbers that a trainer logs of a training step, captured with the step and computed after it.

Trainers of trl gather what they log over processes and go on in Python: `(correct / tokens).item() if tokens > 0 else 0.0`. While
a step is captured every gathered tensor becomes an extra of the program, of the whole batch, and stands there as a `Logged`: an
expression of extras that arithmetic makes longer. After a step of the program the expressions are computed of its extras, and go
where the trainer put them. Nothing of torch takes a `Logged`, so no loss can depend on one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autopar.errors import InputError

Extras = Sequence[Tensor]


class Logged:
    """An expression of the extras of a step. value: what it is, of given extras.

    Where a trainer asks whether one is positive, as for a count, the answer is yes while a step is captured.
    """

    def __init__(self, value: Callable[[Extras], Any]) -> None:
        self.of = value

    def __getattr__(self, name: str) -> Callable[..., Logged]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: Logged(lambda extras: _method(self.of(extras), name, [_of(one, extras) for one in args]))

    def __bool__(self) -> bool:
        return True

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InputError(
            f"the trainer's loss depends on a value that it gathers over processes ({getattr(function, '__name__', function)}), "
            "which a program for all ranks has no use for; compute the loss of the batch, which is the global one"
        )


def _method(value: Any, name: str, args: Sequence[Any]) -> Any:
    """A method of a tensor, or the same of the number that was one."""
    return getattr(value, name)(*args) if hasattr(value, name) else value


def _of(value: Any, extras: Extras) -> Any:
    return value.of(extras) if isinstance(value, Logged) else value


def _two(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Logged, Any], Logged]:
    def combined(self: Logged, other: Any) -> Logged:
        def value(extras: Extras) -> Any:
            ours, theirs = self.of(extras), _of(other, extras)
            try:
                return function(theirs, ours) if swapped else function(ours, theirs)
            except ZeroDivisionError:
                return float("nan")

        return Logged(value)

    return combined


for _name in ("add", "sub", "mul", "truediv", "floordiv"):
    setattr(Logged, f"__{_name}__", _two(getattr(operator, _name)))
    setattr(Logged, f"__r{_name}__", _two(getattr(operator, _name), swapped=True))
for _name in ("gt", "ge", "lt", "le"):
    setattr(Logged, f"__{_name}__", _two(getattr(operator, _name)))


class _Entries(dict[str, list[Any]]):
    """Logs of one mode, which tells entries that are appended from those that are set."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: set[str] = set()

    def __missing__(self, key: str) -> list[Any]:
        super().__setitem__(key, [])
        return self[key]

    def __setitem__(self, key: str, value: list[Any]) -> None:
        self.replaced.add(key)
        super().__setitem__(key, value)


class StepLogs:
    """The logs of a captured step. extras: the tensors that were gathered, in order."""

    def __init__(self, total: Callable[[], Any]) -> None:
        """total: the tokens that the trainer has counted when a step ends."""
        self.extras: list[Tensor] = []
        self.metrics = {mode: _Entries() for mode in ("train", "eval")}
        self.total: Any = Logged(lambda extras: total())

    def gathered(self, value: Tensor, *args: Any, **named: Any) -> Logged:
        """The stand-in for what a trainer gathers."""
        place = len(self.extras)
        self.extras.append(value.detach())
        return Logged(lambda extras: extras[place])

    def put(self, trainer: Any, extras: Extras) -> None:
        """Do what the trainer's own step does with its logs, with the extras of a step of the program."""
        for mode, entries in self.metrics.items():
            for key, logged in entries.items():
                values = [_of(one, extras) for one in logged]
                if key in entries.replaced:
                    trainer._metrics[mode][key] = values
                else:
                    trainer._metrics[mode][key].extend(values)
        trainer._total_train_tokens = _of(self.total, extras)
