"""How often a search looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Within the context garbage is looked for rarely: a search makes little, among some hundred thousand objects that stay,
    and in forked processes to look at an object copies it."""
    before = gc.get_threshold()
    gc.set_threshold(max(100_000, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
