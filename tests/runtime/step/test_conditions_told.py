"""Conditions of the data, on a device that the host runs ahead of: all ranks raise the same before the update of any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime import run_threads
from autopar.runtime.comm.comm import Comm
from autopar.runtime.errors import GuardError
from autopar.runtime.kernels import overflow
from autopar.runtime.program.tables import world_mesh
from tests.capture.equal import SGD

RANKS = 4
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": RANKS}},
    "accumulated": {"mesh": {"dp": RANKS}, "microbatches": 2, "recompute": "full"},
    "pipeline": {"pp": 2, "microbatches": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if not torch.isfinite(h).all():  # finite
            raise ValueError("not finite")
        return torch.relu(h)


def batch(bad_row: int | None = None) -> list[Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    if bad_row is not None:
        x[bad_row, 1] = torch.inf
    return [x]


@pytest.fixture(autouse=True)
def host_that_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors stand for a device of which the host knows nothing."""
    monkeypatch.setattr(overflow, "runs_ahead", lambda device: True)


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_row_of_one_rank_ends_the_step_on_all_ranks_and_nothing_is_applied(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    made = autopar.compile(
        model,
        autopar.ClusterSpec.local(RANKS),
        tuple(batch()),
        loss_fn=lambda out: (out**2).sum(),
        optimizer=SGD,
        options=autopar.Options(**PLANS[plan]),
    )
    assert made.in_process.pipeline.TELLS_ALL

    def rank(comm: Comm) -> Any:
        session = made.in_process.session(comm, made.request.update, made.options.seed)
        session.load_weights(made.weights())
        session.train_step(batch())
        before, texts = state(session), []
        for bad_row in (0, 7):
            with pytest.raises(GuardError) as raised:
                session.train_step(batch(bad_row))
            texts.append(str(raised.value))
        after = state(session)
        return before, after, texts, session.train_step(batch()).item()

    results = run_threads(RANKS, world_mesh(made.in_process.pipeline), rank)
    assert len({text for _, _, texts, _ in results for text in texts}) == 1
    assert len({loss for *_, loss in results}) == 1
    for before, after, texts, _ in results:
        assert "# finite: this depends on the data" in texts[0]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def state(session: Any) -> list[Tensor]:
    return [tensor.clone() for stage in session.stages.values() for _, tensor in stage.stored()]
