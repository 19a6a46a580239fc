"""The modules of the runtime whose functions emitted lines call, by the names that the files know them by."""

from __future__ import annotations

import types

from autopar.runtime import attention, experts, ops, rnn, scans

HOMES: dict[str, types.ModuleType] = {
    "attention": attention,
    "experts": experts,
    "ops": ops,
    "rnn": rnn,
    "scans": scans,
}
ALWAYS = ("attention", "ops", "rnn")
"""Those that every file imports."""
