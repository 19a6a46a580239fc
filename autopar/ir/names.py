"""Names that nothing else has, for values that passes add to a graph: where two values had one name, one would be read as the
other."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain, count


def fresh_name(stem: str, taken: Container[str]) -> str:
    """`stem`, or `stem_v2`, `stem_v3`, … where that is taken."""
    return next(name for name in chain([stem], (f"{stem}_v{k}" for k in count(2))) if name not in taken)
