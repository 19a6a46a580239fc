"""Local names of emitted functions: each given once, none that the emitted files use for something else."""

from __future__ import annotations

import keyword
import re

from autopar.ops.runtime_modules import RUNTIME_MODULES

_USED = ("rt", "call", "saved", "inputs", "torch", "aten", *RUNTIME_MODULES, "user_ops", *keyword.kwlist)


class Names:
    """The names of one function."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = dict.fromkeys(_USED, 1)

    def fresh(self, stem: str) -> str:
        """`stem` as an identifier, or `stem_2`, `stem_3`, … when taken."""
        if not (stem.isascii() and stem.isidentifier()) or stem[0] == "_":
            stem = re.sub(r"\W", "_", stem).lstrip("0123456789_") or "x"
        count = self._taken.get(stem, 0) + 1
        self._taken[stem] = count
        if count == 1:
            return stem
        name = f"{stem}_{count}"
        return self.fresh(name) if name in self._taken else self._claim(name)

    def take(self, name: str) -> None:
        """Keep `name` from being given."""
        self._taken.setdefault(name, 1)

    def _claim(self, name: str) -> str:
        self._taken[name] = 1
        return name
