"""Whether the search cuts blocks in pieces where messages hide so, and only there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar.costmodel.software import Software
from autopar.ir.lines import Compute, Cut, Line, Start
from autopar.passes.lower import template as lower_template
from autopar.passes.price.link_clock import op_seconds, strategy_of
from autopar.passes.price.pricer import PIECE, Pricer, Pricers
from autopar.passes.search import overlap
from autopar.passes.search.pieces import in_pieces, least_in_pieces_s
from autopar.passes.search.task import Task
from autopar.proof.random_plans import insisting
from autopar.proof.verify import verify
from tests.zoo.models import ADAMW, token_loss
from tests.zoo.transformers import Llama

BATCH = (torch.arange(8 * 64).reshape(8, 64) % 64,) * 2


def cluster_at(bandwidth_Bps: float) -> autopar.ClusterSpec:
    local = autopar.ClusterSpec.local(2)
    return replace(local, levels=(replace(local.levels[0], bandwidth_Bps=bandwidth_Bps, latency_s=1e-5),))


def compiled(cluster: autopar.ClusterSpec, beside: bool = True) -> autopar.Program:
    options = autopar.Options(
        mesh={"dp": 1, "tp": 2}, strategy="megatron", microbatches=1, recompute="none", overlap=beside
    )
    return autopar.compile(wide_llama(), cluster, BATCH, loss_fn=token_loss, optimizer=ADAMW, options=options)


def wide_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return Llama(seq=64, d_model=256, layers=2)


def lines(program: autopar.Program) -> list[Line]:
    return [line for s in program.lowered.stages for t in s.templates.values() for f in t.functions for line in f.lines]


def test_blocks_are_in_pieces_where_messages_take_long() -> None:
    program, plain = compiled(cluster_at(2e8)), compiled(cluster_at(2e8), beside=False)
    assert any(t.pieces > 1 for t in program.plan.stages[0].templates.values())
    assert any(isinstance(line, Cut) for line in lines(program))
    assert any(isinstance(line, Start) for line in lines(program))
    assert program.account.step_time_s < 0.9 * plain.account.step_time_s
    assert verify(program, wide_llama(), BATCH).ok


def test_blocks_stay_whole_where_nothing_is_sent_or_messages_take_no_time() -> None:
    program = compiled(cluster_at(1e14))
    assert not any(isinstance(line, Cut) for line in lines(program))


@pytest.mark.slow
def test_blocks_stay_whole_where_pieces_win_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(isinstance(line, Cut) for line in lines(compiled(cluster_at(7e8))))
    monkeypatch.setattr(overlap, "LEAST_WON", 0.0)
    assert any(isinstance(line, Cut) for line in lines(compiled(cluster_at(7e8))))


def test_pieces_take_no_less_than_a_step_without_messages_and_are_not_lowered_where_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, price = list[autopar.Plan](), Task.costs_of
    monkeypatch.setattr(Task, "costs_of", lambda self, plan, *rest: tried.append(plan) or price(self, plan, *rest))

    def tried_in_pieces() -> int:
        return sum(t.pieces > 1 for plan in tried for t in plan.stages[0].templates.values())

    plain, program = compiled(cluster_at(2e8), beside=False), compiled(cluster_at(2e8))
    least_s = plain.account.silent_s
    assert max(plain.account.busy_s) < least_s < program.account.step_time_s < plain.account.step_time_s
    assert tried_in_pieces()
    tried.clear()
    quick = compiled(cluster_at(1e11))
    assert quick.account.comm_time_s > 0
    assert not tried_in_pieces()


@pytest.mark.parametrize("bandwidth_Bps", [2e8, 1e10])
def test_a_step_in_pieces_takes_no_less_than_its_bound(bandwidth_Bps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(cluster_at(bandwidth_Bps), beside=False)
    moved = plain.with_plan(overlap.overlapping(plain.plan, "any"))

    def least_s(plan: autopar.Plan) -> float:
        pricers = Pricers(plain.cluster)
        counted = moved.with_plan(moved.plan).account
        return least_in_pieces_s(counted, moved.lowered, plan, moved.ir, pricers, moved.rules)

    for pieces in (2, 4):
        cut = in_pieces(moved.plan, pieces, moved.ir, moved.lowered, moved.rules)
        for plan in (cut, insisting(cut)):
            assert least_s(plan) <= plain.with_plan(plan).account.step_time_s * (1 + 1e-9)
        if bandwidth_Bps == 2e8:
            assert least_s(cut) < 0.95 * moved.account.step_time_s
    monkeypatch.setattr(Software, "launch_host_s", 1e-3)
    slow = moved.with_plan(moved.plan).account.step_time_s
    assert least_s(cut) > 0.9 * slow


def test_a_plan_that_wins_in_pieces_alone_is_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of plans as they are, of what they compute, and in pieces."""
    plans = {
        "best": (10.0, 6.0, 9.9),
        "next": (10.1, 6.0, 9.0),
        "computes": (10.2, 9.5, 9.0),
        "sends": (20.0, 1.0, 8.0),
    }
    tried = []

    def priced(name: str) -> Any:
        step_s, computed_s, _ = plans[name]
        account = SimpleNamespace(busy_s=(computed_s,), silent_s=computed_s)
        return SimpleNamespace(name=name, step_s=step_s, account=account)

    def in_pieces(_: Any, candidate: Any, *__: float) -> Any:
        tried.append(candidate.name)
        return SimpleNamespace(name=candidate.name, step_s=plans[candidate.name][2])

    monkeypatch.setattr(overlap, "with_pieces", in_pieces)
    monkeypatch.setattr(overlap, "_fits", lambda task, candidate: True)
    ranked: Any = [(None, priced(name)) for name in plans]
    place, _, winner = overlap._in_pieces(ranked)
    assert (place, winner.step_s) == (1, 9.0)
    assert tried == ["best", "next"], "what computes or sends for too long is not tried"


@pytest.mark.slow
def test_a_piece_is_no_cheaper_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured passes over what fits into a cache take next to nothing here."""
    program, price = compiled(cluster_at(2e8)), Pricer.op_s
    free = lambda self, *args: 0.0 if PIECE in self.mesh.names else price(self, *args)  # noqa: E731
    monkeypatch.setattr(Pricer, "op_s", free)
    stage, planned = program.lowered.stages[0], program.plan.stages[0].templates
    pricer = Pricer(program.cluster, stage.mesh)
    pieces = 0
    for name, template in stage.templates.items():
        op_s = op_seconds(planned[name], program.ir.templates[name], pricer, program.rules)
        for line in (line for f in template.functions for line in f.lines if isinstance(line, Compute) and line.piece):
            assert line.piece is not None
            pieces += 1
            assert strategy_of(line, planned[name], pricer)[1].mesh.names[-1] == PIECE
            whole_s = op_s(replace(line, piece=None))
            assert line.piece[1] * op_s(line) == pytest.approx(whole_s)
    assert pieces


def test_what_is_not_tried_where_no_template_sends_would_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel: gradients alone travel, which is more than the least of a step that is cut in pieces for messages."""

    priced, price = list[autopar.Plan](), Task.stage_costs
    monkeypatch.setattr(Task, "stage_costs", lambda self, plan, split: priced.append(plan) or price(self, plan, split))

    def planned() -> tuple[autopar.Plan, float, int]:
        priced.clear()
        options = autopar.Options(mesh={"dp": 2}, strategy="dp", microbatches=1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        batch = (torch.randn(8, 64), torch.randn(8, 64))
        loss = torch.nn.functional.mse_loss
        program = autopar.compile(model, cluster_at(1e6), batch, loss_fn=loss, optimizer=ADAMW, options=options)
        return program.plan, program.account.step_time_s, len(priced)

    pruned = planned()
    for module in (overlap, lower_template):
        monkeypatch.setattr(module, "sends_beside", lambda *_: True)
    every = planned()
    assert every[:2] == pruned[:2]
    assert every[2] > pruned[2]
