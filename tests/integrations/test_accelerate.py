"""A loop with accelerate is the same loop with the lines changed that docs/trainers.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.compared import differences, started, told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_changed_lines_train_as_the_loop_did(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    started("accelerate_script.py", "original", 1, tmp_path / "original", ["loop"])
    started("accelerate_script.py", "autopar", 2, tmp_path / "autopar", ["loop"])
    assert differences(told(tmp_path / "autopar", "loop"), told(tmp_path / "original", "loop"), 1e-9) == []
