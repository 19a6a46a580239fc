"""trl's trainers train with autopar on several ranks as they do on one device, and log the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.errors import InputError
from autopar.integrations.logged import StepLogs
from autopar.integrations.picked import PickedInSums
from autopar.integrations.plain_heads import PlainLogProbs
from tests.integrations.compared import differences, started, told

CASES = ("sft", "lora", "accumulated", "dpo")
NARROW = 2e-6
"""trl computes log-probabilities in float32 whatever the model's precision is."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fine_tuning_and_preferences_are_those_of_one_device(tmp_path: Path, ranks: int) -> None:
    for package in ("trl", "peft", "datasets", "transformers"):
        pytest.importorskip(package)
    started("sft_script.py", "original", 1, tmp_path / "original", CASES)
    started("sft_script.py", "autopar", ranks, tmp_path / "autopar", CASES)
    for case in CASES:
        assert differences(told(tmp_path / "autopar", case), told(tmp_path / "original", case), NARROW) == [], case


def test_log_probabilities_and_what_goes_with_them_are_those_of_trl() -> None:
    kernels = pytest.importorskip("trl.kernels")
    numbers = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=numbers) for n in (6, 20))
    bias, targets = torch.randn(20, generator=numbers), torch.randint(0, 20, (6,), generator=numbers)
    asked = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    arguments = (hidden, weight, bias, targets, 0.7, 7, 5.0, 1.5, asked)
    theirs, ours = (one.apply(*arguments) for one in (kernels.ChunkedLogProbFunction, PlainLogProbs))
    for name, own, other in zip(asked, ours, theirs, strict=True):
        torch.testing.assert_close(own, other, msg=name)


def test_logs_are_computed_of_a_steps_extras_and_no_loss_can_depend_on_them() -> None:
    class Trainer:
        def __init__(self) -> None:
            self._metrics: dict[str, dict[str, list[object]]] = {"train": {"accuracy": [], "tokens": []}, "eval": {}}
            self._total_train_tokens = 100

    trainer = Trainer()
    logs = StepLogs(lambda: trainer._total_train_tokens)
    correct, tokens = logs.gathered(torch.tensor(0.0)), logs.gathered(torch.tensor(0))
    accuracy = (correct.sum() / tokens.sum()).item() if tokens > 0 else 0.0
    logs.metrics["train"]["accuracy"].append(accuracy)
    logs.total = logs.total + tokens.sum().item() // 2
    logs.metrics["train"]["tokens"] = [logs.total]
    for right in (3.0, 4.0):
        logs.put(trainer, [torch.tensor(right), torch.tensor(8)])
    assert trainer._metrics["train"] == {"accuracy": [0.375, 0.5], "tokens": [108]}
    assert trainer._total_train_tokens == 108
    with pytest.raises(InputError, match="the trainer's loss depends on"):
        torch.ones(()) * correct


def test_what_a_mask_picks_is_known_by_its_sum_and_mean_alone() -> None:
    values, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True, False, True], [False, True, False]])
    with PickedInSums():
        picked, row = values[mask], values[0]
        assert (picked.sum(), picked.mean()) == (torch.tensor(6.0), torch.tensor(2.0))
        assert row.tolist() == [0.0, 1.0, 2.0], "other indices are torch's"
        with pytest.raises(InputError, match="takes max"):
            picked.max()
        with pytest.raises(InputError, match="picks elements by a mask"):
            torch.exp(picked)
