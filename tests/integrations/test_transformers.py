"""Scripts of transformers.Trainer train, evaluate, save and go on with autopar on several ranks as they do on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.compared import differences, started, told

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SCRIPT = "trainer_script.py"
CASES = ("bert", "gpt2", "smoothing", "early", "own")
ADAPTERS = ("llama_lora",)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    started(SCRIPT, "original", 1, folder, [*CASES, "gpt2_own_loss"])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_metrics_and_weights_are_those_of_one_device(original: Path, tmp_path: Path, ranks: int) -> None:
    started(SCRIPT, "autopar", ranks, tmp_path, [*CASES, "gpt2_own_loss"])
    for case in CASES:
        assert differences(told(tmp_path, case), told(original, case), 1e-9) == [], case
    narrow = differences(told(tmp_path, "gpt2_own_loss"), told(original, "gpt2_own_loss"), 1e-6)
    assert narrow == [], "transformers computes this loss in float32"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("later", [1, 2])
def test_a_run_goes_on_inside_an_epoch_where_it_stopped(original: Path, tmp_path: Path, later: int) -> None:
    started(SCRIPT, "autopar", 2, tmp_path, ["bert@3"])
    started(SCRIPT, "autopar", later, tmp_path, ["bert@checkpoint-3"])
    again, whole = told(tmp_path, "bert@checkpoint-3"), told(original, "bert")
    assert differences(again["sums"], whole["sums"], 1e-9) == []
    assert differences(again["metrics"], whole["metrics"], 1e-9) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_adapters_train_and_the_rest_stays(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    started(SCRIPT, "original", 1, tmp_path / "original", ADAPTERS)
    started(SCRIPT, "autopar", 2, tmp_path / "autopar", ADAPTERS)
    for case in ADAPTERS:
        assert differences(told(tmp_path / "autopar", case), told(tmp_path / "original", case), 1e-9) == [], case
