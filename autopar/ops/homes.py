"""The modules of the runtime whose functions emitted lines call, by the names that the files know them by."""

from __future__ import annotations

import types

from autopar.runtime import (
    attention,
    batch_norm,
    experts,
    images,
    losses,
    moves,
    ops,
    pools,
    rnn,
    scans,
    selection,
    softmax,
    zigzag,
)

HOMES: dict[str, types.ModuleType] = {
    "attention": attention,
    "batch_norm": batch_norm,
    "experts": experts,
    "images": images,
    "losses": losses,
    "moves": moves,
    "ops": ops,
    "pools": pools,
    "rnn": rnn,
    "scans": scans,
    "selection": selection,
    "softmax": softmax,
    "zigzag": zigzag,
}
ALWAYS = ("attention", "ops", "rnn")
"""Those that every file imports."""
