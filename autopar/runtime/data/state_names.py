"""A program's state under every name that the model's own state dict has for it, and back.

    tok.weight    head.weight    tied: the program holds one tensor, the model's state dict names it twice
    mask          —              a buffer that is not persistent has no name there

names: of every tensor that a program holds the names in the model's state dict, as the manifest has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Names = Mapping[str, Sequence[str]]


def of_model(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The state of a program as `model.load_state_dict` takes it: every name that the model has for a value, and no other."""
    return {saved: state[held] for held, also in names.items() if held in state for saved in also}


def of_program(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """A state with the program's own name for every tensor, which may be there under another of the model's names."""
    found = {held: next((state[one] for one in also if one in state), None) for held, also in names.items()}
    return {held: value for held, value in found.items() if value is not None} | dict(state)
