"""Values that a training step may not look at while it is captured, as they would be the same in every step of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import InputError


class Unseen:
    """Stands for a value that changes from step to step, and raises InputError, which says what to do, where it is used.

    what: the value, as in "batch_idx"; seen: attributes that do not change.
    """

    def __init__(self, what: str, seen: Mapping[str, Any] | None = None) -> None:
        self.__dict__.update(seen or {})
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(f"{self._what}.{name}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unseen, (self._what,)


def _refusal(what: str) -> InputError:
    return InputError(
        f"the training step uses {what} while it is captured, which would be one number for all steps; give what changes with "
        "the batch, as a tensor"
    )


def _used(name: str) -> Callable[..., Any]:
    def use(self: Unseen, *args: Any) -> Any:
        raise _refusal(self._what)

    use.__name__ = name
    return use


for _name in (
    *("bool", "int", "float", "index", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "pow", "rpow", "mod", "rmod"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
):
    setattr(Unseen, f"__{_name}__", _used(f"__{_name}__"))
Unseen.__hash__ = object.__hash__  # type: ignore[method-assign]
