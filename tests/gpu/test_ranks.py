"""On several GPUs: one rank per process over NCCL computes what the ranks compute as threads of a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.proof.test_processes import batch, compiled, in_torchrun, saved

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"mesh": {"dp": 2}, "strategy": "dp"}),
        (2, {"mesh": {"dp": 2}, "strategy": "zero3", "microbatches": 2}),
        (2, {"pp": 2, "microbatches": 2}),
        (4, {"mesh": {"dp": 2, "tp": 2}}),
    ],
)
def test_ranks_over_nccl_train_as_threads_do(ranks: int, options: dict[str, object], tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    program = compiled(ranks, **options)
    want = program.run([batch(step) for step in range(3)])
    for got in in_torchrun("curve", ranks, saved(program, tmp_path / "program", batches=3), tmp_path):
        assert got["losses"] == pytest.approx([loss.item() for loss in want], rel=1e-9)
        for name, value in want.state_dict().items():
            torch.testing.assert_close(got["weights"][name].cpu(), value, rtol=1e-9, atol=1e-9)
