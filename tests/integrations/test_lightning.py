"""Scripts of Lightning fit, validate, save and go on with autopar's strategy on several ranks as they do on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.integrations.unseen import Unseen
from tests.integrations.compared import differences, started, told

SCRIPT = "lightning_script.py"
CASES = ("plain", "accumulated", "early")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_logs_and_weights_are_those_of_one_device(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("lightning")
    started(SCRIPT, "original", 1, tmp_path / "original", [*CASES, "again@2", "again@last"])
    started(SCRIPT, "autopar", ranks, tmp_path / "autopar", [*CASES, "again@2"])
    started(SCRIPT, "autopar", 2, tmp_path / "autopar", ["again@last"])
    for case in (*CASES, "again@2", "again@last"):
        assert differences(told(tmp_path / "autopar", case), told(tmp_path / "original", case), 1e-9) == [], case


@pytest.mark.parametrize(
    "use", ["batch_idx % 2", "batch_idx == 0", "batch_idx + 1.0", "not batch_idx", "batch_idx.size"]
)
def test_a_step_that_looks_at_what_changes_from_step_to_step_is_refused(use: str) -> None:
    with pytest.raises(InputError, match="batch_idx"):
        eval(use, {"batch_idx": Unseen("batch_idx")})
