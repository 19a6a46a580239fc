"""Tests share what the library finds: captures (tests/zoo/shared.py), and effects of lines on memory.

Both follow from the code and from what they are asked about, so what one test found another may use. A test that changes the
library (it has `monkeypatch`) neither finds what others found nor leaves them anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from autopar.ir.lines import Compute
from autopar.passes.memory.probe import Probe, WholeLine, _what

OWN_CAPTURES = (
    "tests/capture/",
    "tests/ops/test_add_an_op.py",
    "tests/ops/test_register_op.py",
    "tests/test_caches.py",
)
"""Tests of captures, and tests that register ops: what they compile is captured for them, but for models of the zoo."""
MOST_EFFECTS = 50_000
"""Effects that are kept; then all go."""


class Sharing:
    """Whether the test that runs shares effects, and captures of models from outside the zoo."""

    effects = captures = False

    def begin(self, request: pytest.FixtureRequest) -> None:
        """A test begins."""
        self.effects = "monkeypatch" not in request.fixturenames
        self.captures = self.effects and not request.node.nodeid.startswith(OWN_CAPTURES)


SHARING = Sharing()


def shared_effects(standing: Callable[..., Any]) -> Callable[..., Any]:
    """`Probe._standing`, which answers what it was asked before. Ops that tests register are played each time: two may have one
    name."""
    known: dict[Hashable, Any] = {}

    def effects(probe: Probe, make: Any, line: WholeLine, layouts: Any) -> Any:
        registered = isinstance(line, Compute) and not line.op.startswith(("aten.", "autopar."))
        if not SHARING.effects or registered:
            return standing(probe, make, line, layouts)
        key = make.__name__, _what(line), len(line.outs), layouts, tuple(probe.mesh.sizes.items()), probe.device
        if key not in known:
            if len(known) >= MOST_EFFECTS:
                known.clear()
            known[key] = standing(probe, make, line, layouts)
        return known[key]

    return effects
