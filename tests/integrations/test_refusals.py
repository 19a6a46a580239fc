"""A training that would be another than it says, without a word, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.compared import started, told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_program_cannot_follow_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    started("refusals_script.py", "autopar", 1, tmp_path, ["refusals"])
    said = told(tmp_path, "refusals")
    for name, words in {
        "averaging": "was written to",
        "freezing": "was frozen or unfrozen",
        "gradients": "Gradients.on_pre_optimizer_step",
        "annealed": "self.state.global_step",
        "compiled": "torch_compile=True",
        "counting": "batch_idx",
        "hook": "WithHook.on_after_backward",
    }.items():
        assert words in said[name], (name, said[name])
