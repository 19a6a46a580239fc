"""The example that fine-tunes a model of transformers: it runs as it stands, and goes on in the middle of an epoch."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from .test_examples import ROOT, run_script

SCRIPT = "examples/finetune_hf.py"
LOSS = re.compile(r"step (\d+)  loss (\d+\.\d+)")
EVALUATION = re.compile(r"evaluation loss (\d+\.\d+)")
needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "tokenizers")), reason="needs transformers"
)


@pytest.fixture(scope="module")
def example() -> Any:
    """The script as a module; importing it needs no transformers."""
    spec = importlib.util.spec_from_file_location("finetune_hf", ROOT / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(example: Any, count: int, first: int = 0) -> list[list[int]]:
    return list(itertools.islice(example.ShuffledBatches(11, 3, 5, first), count))


def test_every_epoch_draws_each_row_at_most_once_in_another_order(example: Any) -> None:
    batches = drawn(example, 9)
    epochs = [[row for batch in batches[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("first", range(8))
def test_batches_go_on_from_any_step(example: Any, first: int) -> None:
    assert drawn(example, 9 - first, first) == drawn(example, 9)[first:]


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in LOSS.findall(said)}


@needs_transformers
def test_the_example_learns_and_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    said = run_script(SCRIPT, "--ranks", "2", "--steps", "20", cwd=tmp_path)
    before, after, reloaded = map(float, EVALUATION.findall(said))
    assert after < before - 0.5
    assert reloaded == pytest.approx(after, abs=2e-5)
    assert len(losses(said)) == 20
    assert (tmp_path / "out" / "finetune" / "model" / "model.safetensors").exists()


@pytest.mark.slow
@needs_transformers
def test_the_example_goes_on_within_an_epoch_with_the_same_losses(tmp_path: Path) -> None:
    ranks = ["--ranks", "4"]
    whole = losses(run_script(SCRIPT, *ranks, "--steps", "9", "--out", "whole", cwd=tmp_path))
    first = losses(run_script(SCRIPT, *ranks, "--steps", "5", "--out", "parts", cwd=tmp_path))
    second = losses(run_script(SCRIPT, *ranks, "--steps", "9", "--out", "parts", "--resume", cwd=tmp_path))
    assert (sorted(first), sorted(second)) == ([1, 2, 3, 4, 5], [6, 7, 8, 9])
    assert first | second == whole
