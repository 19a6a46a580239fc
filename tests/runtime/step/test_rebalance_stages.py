"""Rows that move between the ranks of a stage, in pipelines: every stage shares them in its own way, and losses stay."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.step.rebalance import EVERY, Rebalancer
from autopar.runtime.step.session import Session

ROWS, WIDTH, STEPS = 24, 24, 6
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Chain(nn.Module):
    """Blocks with dropout, the last of which may use the first one's weights again."""

    def __init__(self, blocks: int, tied: bool) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        if tied:
            self.blocks[-1][0].weight = self.blocks[0][0].weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


def batch() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))


def compiled(ranks: int, blocks: int = 2, tied: bool = False, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    own = autopar.Options(**{"rebalance": True, "microbatches": 2, "recompute": "none", **options})
    model = Chain(blocks, tied).double()
    return autopar.compile(model, autopar.ClusterSpec.local(ranks), batch(), optimizer=ADAMW, options=own)


@functools.cache
def alone(blocks: int, tied: bool, microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one rank, and its parameters in the end."""
    program = compiled(1, blocks, tied, rebalance=False, microbatches=microbatches)
    done = program.run([batch()], steps=STEPS)
    return [loss.item() for loss in done.losses], done.state


def rebalancer(session: Session) -> Rebalancer:
    assert session.rebalancer is not None
    return session.rebalancer


def uneven(units: int, places: int, most: int) -> list[int]:
    """All units but one each at one place."""
    return [units - places + 1 if place == most else 1 for place in range(places)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ranks": 6, "pp": 2, "schedule": "1f1b", "strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 4, "pp": 2, "schedule": "zb-h1", "strategy": "dp", "tied": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"ranks": 4, "pp": 2, "schedule": "zb-auto", "strategy": "zero3", "microbatches": 4}, marks=pytest.mark.slow
        ),
        {"ranks": 4, "pp": 2, "chunks": 2, "schedule": "interleaved", "strategy": "zero1", "blocks": 4, "tied": True},
        pytest.param({"ranks": 4, "pp": 2, "schedule": "zb-v", "strategy": "dp", "blocks": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 8, "pp": 2, "mesh": {"dp": 2, "tp": 2}, "strategy": "zero1", "tied": True}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_losses_of_a_pipeline_are_those_of_an_even_run_whatever_moves(options):
    program = compiled(**options)
    assert len(program.lowered.graph.groups) == 2
    if "mesh" not in options:  # inside of which this small model has all rows on every rank
        assert any("dp" in (*t.source_spec.dims[0], *t.target_spec.dims[0]) for t in program.lowered.transfers)

    def body(session: Session) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        assert len(rebalancer(session).rows) == 2
        for step in range(STEPS):
            for group, rows in enumerate(rebalancer(session).rows) if step in (1, 3, 4) else ():
                places = len(rows.units)
                rows.set_units(uneven(sum(rows.units), places, (group + step) % places))
            losses.append(session.train_step(list(batch())).item())
        return losses, {name: session.gather_full(name) for name in program.ir.parameters}

    (losses, state), *others = program.on_ranks(body)
    assert len({tuple(found) for found, _ in others}) == 1
    expected, parameters = alone(options.get("blocks", 2), options.get("tied", False), program.plan.microbatches)
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def test_stages_of_other_sizes_send_each_other_what_whoever_has_it_holds():
    """A stage of three ranks before one of two, planned by hand: rows move in both, at other steps."""
    program = compiled(5, pp=2, microbatches=2)
    sizes = [stage.mesh.size for stage in program.plan.stages]
    assert sorted(sizes) == [1, 4] or sorted(sizes) == [2, 3]

    def body(session: Session) -> list[float]:
        losses = []
        for step in range(STEPS):
            for rows in [one for one in rebalancer(session).rows if step % 2 and one.axis]:
                places = len(rows.units)
                rows.set_units(uneven(sum(rows.units), places, step % places))
            losses.append(session.train_step(list(batch())).item())
        return losses

    assert program.on_ranks(body)[0] == pytest.approx(alone(2, False, program.plan.microbatches)[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_slow_rank_of_a_stage_is_noticed(capsys):
    program = compiled(4, pp=2, schedule="1f1b")

    def body(session: Session) -> tuple[list[float], list[Any], list[tuple[int, ...]]]:
        rank, compute = session.comm.rank, type(session)._compute
        own = next(rows for rows in rebalancer(session).rows if rank in rows.ranks)

        def slow(*args: Any) -> Any:
            time.sleep((6e-3 if rank == 3 else 1e-3) * own.units_of(rank))
            return compute(session, *args)

        session._compute = slow  # type: ignore[method-assign]
        losses = [session.train_step(list(batch())).item() for _ in range(2 * EVERY + 3)]
        return losses, rebalancer(session).moves, [rows.units for rows in rebalancer(session).rows]

    ranks = program.on_ranks(body)
    losses, moves, units = ranks[0]
    assert all((found, own) == (moves, units) for _, found, own in ranks)
    assert ((1,), (6, 6), (3,)) in [(move.stages, move.before, move.ranks) for move in moves]
    assert units[1][1] <= 4
    even = compiled(4, pp=2, schedule="1f1b", rebalance=False).run([batch()], steps=len(losses)).losses
    assert losses == pytest.approx([loss.item() for loss in even], rel=1e-9)
    assert "rows of stage 1 move along dp, 6:6 becomes" in capsys.readouterr().err


def test_a_stage_whose_ranks_are_alike_keeps_its_rows():
    program = compiled(4, pp=2, schedule="1f1b")

    def body(session: Session) -> list[tuple[int, ...]]:
        for _ in range(2):
            rebalancer(session).consider(1, [5.0, 5.0, 1.0, 3.0])
        return [rows.units for rows in rebalancer(session).rows]

    assert program.on_ranks(body)[3] == [(6, 6), (9, 3)]


def test_nothing_rests_by_shares_and_room_and_work_are_told_by_group():
    program = compiled(4, pp=2, schedule="1f1b", strategy="zero1")
    for stage in program.plan.stages:
        assert isinstance(stage.mesh.sizes["dp"], Shares)
        for plan in stage.parameters.values():
            assert all("dp" not in axes for spec in (plan.storage, plan.optimizer) for axes in spec.dims)
    assert "MOST_UNITS = [12, 12]" in program.pipeline
    first, second = busy_s = program.decision.account.busy_s
    assert f"BUSY_S = {list(busy_s)}" in program.pipeline
    assert 0 < first < second < program.predicted.step_time_s  # the second one has the loss
