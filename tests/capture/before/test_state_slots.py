"""A place tells what it does not hold any more, by identity first and by value where values are plain."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture.before import state_slots

TENSOR = torch.zeros(1)
CHANGES: dict[str, tuple[Any, Callable[[Any], Any], list[object]]] = {
    "nothing": ({"a": 1, "b": TENSOR}, lambda held: None, []),
    "an order": ({"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a")), []),
    "an item": ({"a": 1}, lambda held: held.update(a=2), ["a"]),
    "an equal item of another class": ([1], lambda held: held.__setitem__(0, True), [0]),
    "an equal tuple of other classes": ([(1, 2)], lambda held: held.__setitem__(0, (1, 2.0)), [0]),
    "an equal tuple": ([(1, "a", None)], lambda held: held.__setitem__(0, (*held[0],)), []),
    "another tensor": ([(TENSOR,)], lambda held: held.__setitem__(0, (TENSOR.clone(),)), [0]),
    "a first item": ({}, lambda held: held.update(a=None), ["a"]),
    "one item for another": ({"a": None}, lambda held: (held.clear(), held.update(b=None)), ["a", "b"]),
    "the last item": (collections.OrderedDict(a=1), lambda held: held.clear(), ["a"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_container_tells_the_keys_that_changed_and_is_put_back(name: str) -> None:
    start, change, keys = CHANGES[name]
    held = start.copy()
    for place in (
        state_slots.container("held", held),
        *([state_slots.attributes("held", held, held)] if isinstance(held, dict) else []),
    ):
        assert place.changes() == []
        change(held)
        assert place.changes() == keys
        place.write(place.before)
        assert held == start
        assert place.changes() == []
