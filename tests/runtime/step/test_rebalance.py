"""Rows that move between ranks while a program runs: losses stay, slow ranks get less, and what cannot move says why."""

from __future__ import annotations

import functools
import math
import re
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import autopar
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.passes.shard.uneven import for_rows
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.step.rebalance import EVERY, RebalanceWarning, Rows
from autopar.runtime.step.session import Session
from tests.zoo.models import MODELS

ROWS = 24
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """Blocks with dropout, whose inner dims are multiples of the batch's rows."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


def compiled(ranks: int = 3, rows: int = ROWS, rebalance: bool = True, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    options = autopar.Options(rebalance=rebalance, **options)
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(Net().double(), cluster, batch(rows), optimizer=ADAMW, options=options)


def batch(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, 24, dtype=torch.float64, generator=draw) for _ in range(2))


def moving(session: Session) -> Rows:
    """The rows of the first group of ranks whose rows move."""
    assert session.rebalancer is not None
    return session.rebalancer.rows[0]


@functools.cache
def alone(rows: int, microbatches: int) -> list[float]:
    """The losses of one rank."""
    program = compiled(1, rows, rebalance=False, microbatches=microbatches)
    return [loss.item() for loss in program.run([batch(rows)] * 8).losses]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "dp"},
        {"strategy": "zero1"},
        {"strategy": "zero2", "microbatches": 2},
        {"strategy": "zero3"},
        {"ranks": 6, "mesh": {"dp": 3, "tp": 2}},
        {"ranks": 6, "mesh": {"replica": 3, "dp": 2}, "strategy": "zero3"},
        {"ranks": 2, "rows": 25},
    ],
    ids=str,
)
def test_losses_are_those_of_an_even_run_whatever_moves(options):
    program = compiled(**options)

    def body(session: Session) -> list[float]:
        own, losses = moving(session), []
        units = own.units
        for step in range(8):
            if step in (2, 4):
                others = sum(units) - (len(units) - 1)
                own.set_units((others, *[1] * (len(units) - 1)) if step == 2 else (*[1] * (len(units) - 1), others))
            losses.append(session.train_step(batch(options.get("rows", ROWS))).item())
        return losses

    found = program.on_ranks(body)[0]
    assert found == pytest.approx(alone(options.get("rows", ROWS), program.plan.microbatches), rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 3, "tp": 2}], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_rows_of_any_model_move(model, mesh):
    """Losses, parameters and buffers are those of a run in which nothing moves."""
    doubled = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    given = tree_map(doubled, model.batch())
    coupled = "per-microbatch" if "batchnorm" in model.tags else "refuse"
    program = autopar.compile(
        model.make().double(),
        autopar.ClusterSpec.local(math.prod(mesh.values())),
        given,
        loss_fn=model.loss_fn,
        optimizer=model.optimizer,
        options=autopar.Options(rebalance=True, mesh=mesh, microbatches=1, coupled=coupled),
    )
    given = program.leaves(given)

    def body(session: Session, moves: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        own, losses = moving(session), []
        most = sum(own.units) - 2
        for step in range(4):
            if moves and step in (1, 3):
                own.set_units((most, 1, 1) if step == 1 else (1, 1, most))
            losses.append(session.train_step(list(given)).item())
        return losses, {name: session.gather_full(name) for name in (*program.ir.parameters, *program.ir.buffers)}

    (still, state), (found, moved) = (
        program.on_ranks(functools.partial(body, moves=moves))[0] for moves in (False, True)
    )
    assert found == pytest.approx(still, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-9, atol=1e-9)


def test_rows_of_a_program_that_answers_move():
    torch.manual_seed(0)
    model, (x, _) = nn.Linear(24, 48).double(), batch()
    program = autopar.compile(
        model, autopar.ClusterSpec.local(3), (x,), options=autopar.Options(rebalance=True, mesh={"dp": 3})
    )

    def body(session: Session) -> list[torch.Tensor | None]:
        before = session.forward([x])
        moving(session).set_units((20, 3, 1))
        return [*before, *session.forward([x])]

    for found in program.on_ranks(body)[0]:
        torch.testing.assert_close(found, model(x), rtol=1e-9, atol=1e-9)


def test_nothing_rests_by_shares_though_its_dims_are_multiples_of_the_rows():
    for strategy in ("zero1", "zero3", "auto"):
        (stage,) = compiled(strategy=strategy).plan.stages
        assert any(isinstance(size, Shares) for _, size in stage.mesh.axes)
        for plan in stage.parameters.values():
            assert all("dp" not in axes for spec in (plan.storage, plan.optimizer) for axes in spec.dims)


def slowed(session: Session, row_s: dict[int, float]) -> None:
    """From now on this rank takes so long for each of its rows."""
    compute = type(session)._compute

    def slow(*args: Any) -> Any:
        time.sleep(row_s[session.comm.rank] * session.comm.block_size(ROWS, "dp"))
        return compute(session, *args)

    session._compute = slow  # type: ignore[method-assign]


@pytest.mark.timeout(120)
def test_a_rank_that_becomes_slow_is_noticed_within_50_steps(capsys):
    def body(session: Session) -> tuple[list[float], list[Any]]:
        losses = []
        slowed(session, dict.fromkeys(range(3), 1e-3))
        for step in range(EVERY + 55):
            if step == EVERY + 5:
                slowed(session, {0: 1e-3, 1: 1e-3, 2: 6e-3})
            losses.append(session.train_step(batch()).item())
        assert session.rebalancer is not None
        return losses, session.rebalancer.moves

    ranks = compiled(strategy="dp").on_ranks(body)
    losses, moves = ranks[0]
    assert all(moved == moves for _, moved in ranks)
    assert moves[0].before == (8, 8, 8)
    assert moves[-1].after[2] <= 3
    even = compiled(strategy="dp", rebalance=False).run([batch()], steps=len(losses)).losses
    assert losses == pytest.approx([loss.item() for loss in even], rel=1e-9)
    assert "rows move along dp, 8:8:8 becomes" in capsys.readouterr().err


def consider(*tellings: tuple[float, ...], most: int = ROWS) -> list[tuple[int, ...]]:
    """The units after each telling of busy seconds."""

    def body(session: Session) -> list[tuple[int, ...]]:
        own, found = moving(session), []
        own._most = most
        for busy_s in tellings:
            own.consider(1, [s * ROWS / n for s, n in zip(busy_s, own.units, strict=True)])
            found.append(own.units)
        return found

    return compiled(strategy="dp").on_ranks(body)[0]


def test_rows_move_when_others_were_better_twice_in_a_row():
    slow = (1.0, 1.0, 3.0)
    assert consider(slow, (1.0, 1.0, 1.02), slow) == [(8, 8, 8)] * 3
    assert consider(slow, slow) == [(8, 8, 8), (11, 10, 3)]
    assert consider((1.0, 1.0, 1.04), (1.0, 1.0, 1.04)) == [(8, 8, 8)] * 2


def test_no_rank_gets_more_rows_than_it_has_room_for():
    assert consider((1.0, 1.0, 3.0), (1.0, 1.0, 3.0), most=9) == [(8, 8, 8), (9, 9, 6)]


@pytest.mark.parametrize(
    ("options", "why"), [({"rows": 4, "ranks": 4, "mesh": {"dp": 4}}, "no axis"), ({"ranks": 2, "pp": 2}, "no stage")]
)
def test_a_program_whose_rows_cannot_move_says_why_and_runs(options, why):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(**options).run([batch(options.get("rows", ROWS))])
    (said,) = [str(one.message) for one in caught if isinstance(one.message, RebalanceWarning)]
    assert said.startswith(f"rows do not move between ranks: {why}")


@pytest.mark.parametrize("options", [{"compiler": "inductor"}, {"cuda_graphs": True}])
def test_what_is_made_for_certain_rows_is_refused_beside_it(options):
    with pytest.raises(InputError, match=r"Options\.rebalance"):
        autopar.Options(rebalance=True, **options)


def test_axes_inside_cut_a_unit_so_that_blocks_divide_under_any_shares():
    mesh = Mesh((("dp", Shares((4, 4, 4))), ("tp", 2)))
    assert mesh.blocks(24, ("dp", "tp")) == (4,) * 6
    assert mesh.blocks(12, ("dp", "tp")) is None
    assert mesh.blocks(12, ("tp",)) == 6


def test_units_of_rows_divide_by_the_axes_inside_that_take_rows():
    mesh = for_rows(Mesh.of(replica=2, dp=3), 24, rebalance=True)
    assert mesh.sizes == {"replica": Shares((4, 4)), "dp": 3}
    assert for_rows(Mesh.of(dp=3, tp=2), 24, rebalance=True).sizes["dp"] == Shares((8, 8, 8))
    for same in (Mesh.of(dp=4, tp=2), Mesh.of(dp=2, ep=2)):
        assert for_rows(same, 4, rebalance=True) == same


def test_a_program_says_for_how_many_units_a_rank_has_room():
    wide = compiled(rows=96, strategy="dp")
    assert "MOST_UNITS = [96]" in wide.pipeline
    peak = wide.predicted.peak_bytes
    assert "MOST_UNITS = [32]" in compiled(rows=96, strategy="dp", memory_bytes=peak).pipeline
    (most,) = re.findall(r"MOST_UNITS = \[(\d+)\]", compiled(rows=96, strategy="dp", memory_bytes=1.1 * peak).pipeline)
    assert 32 < int(most) < 64
    assert "MOST_UNITS" not in compiled(rows=96, strategy="dp", rebalance=False).pipeline
