"""Names of modules as patterns, a star for the number of a layer: `layers.*.mlp.up`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def patterns_of(styles: Mapping[str, str]) -> dict[str, str]:
    """Styles by pattern, where all modules of a pattern have one style; else by name."""
    by_pattern: dict[str, set[str]] = {}
    for name, style in styles.items():
        by_pattern.setdefault(_NUMBER.sub("*", name), set()).add(style)
    found: dict[str, str] = {}
    for name, style in styles.items():
        pattern = _NUMBER.sub("*", name)
        found[pattern if len(by_pattern[pattern]) == 1 else name] = style
    return found


def matching(styles: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Styles by name for the names that a pattern stands for."""
    found = {}
    for name in names:
        for one in (name, _NUMBER.sub("*", name)):
            if one in styles:
                found[name] = styles[one]
                break
    return found
