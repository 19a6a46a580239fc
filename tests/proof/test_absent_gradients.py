"""Experts that no row of a batch chose: every optimizer leaves them alone, on every plan, as in an eager loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.step.session import Session

EXPERTS, D, ROWS = 4, 4, 8
Factory = Callable[..., Any]


class Experts(nn.Module):
    """Experts that are modules, and a loop over those that rows chose."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.parts[i](x[rows]))
        return out


@autopar.forward_of(Experts, integers=EXPERTS)
def products(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
    weights = torch.stack([part.weight.t() for part in self.parts])
    biases = torch.stack([part.bias for part in self.parts])
    return autopar.grouped_mm(x.unsqueeze(1), weights, chosen).squeeze(1) + F.embedding(chosen, biases).squeeze(1)


class Model(nn.Module):
    """Layers of experts, which the first numbers of a row choose. shared: all layers have the same experts."""

    def __init__(self, layers: int = 2, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        one = Experts()
        self.layers = nn.ModuleList(one if shared else Experts() for _ in range(layers))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, d + 2)."""
        h = self.first(x[:, :D])
        for i, layer in enumerate(self.layers):
            h = h + layer(h, x[:, D + i % 2 :][:, :1].long())
        return h


def batches(steps: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Rows choose the experts of their step: some are left out in every step, one comes late, one goes away. Of four rows,
    which are a rank's or a microbatch, one half chooses other experts than the other."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, D + 2, generator=generator, dtype=torch.float64)
        halves = [0] * (ROWS // 2) + [1 + (step > 1)] * (ROWS // 2)
        x[:, D], x[:, D + 1] = torch.tensor(halves), torch.tensor(halves[::-1]) + (step > 2)
        found.append((x, torch.randn(ROWS, D, generator=generator, dtype=torch.float64)))
    return found


def eager(model: nn.Module, optimizer: Factory) -> tuple[dict[str, Tensor], list[frozenset[str]]]:
    """Parameters after a step per batch, and which of them had no gradient in each."""
    model = copy.deepcopy(model)
    one, none = optimizer(model.parameters()), []
    for x, y in batches():
        one.zero_grad()
        F.mse_loss(model(x), y).backward()
        none.append(frozenset(name for name, p in model.named_parameters() if p.grad is None))
        one.step()
    return {name: p.detach() for name, p in model.named_parameters()}, none


def compiled(model: nn.Module, optimizer: Any, ranks: int, **options: Any) -> autopar.ParallelProgram:
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(
        model, cluster, batches()[0], loss_fn=F.mse_loss, optimizer=optimizer, options=autopar.Options(**options)
    )


def largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "one rank in microbatches": {"ranks": 1, "microbatches": 2},
    "batch over two": {"ranks": 2, "mesh": {"dp": 2}, "strategy": "dp"},
    "batch over two, shards of parameters": {"ranks": 2, "mesh": {"dp": 2}, "strategy": "zero3", "microbatches": 2},
    "experts over two": {"ranks": 4, "mesh": {"dp": 2, "ep": 2}, "microbatches": 2},
    "matrices over four": {"ranks": 4, "mesh": {"tp": 4}},
    "two stages": {"ranks": 2, "pp": 2, "microbatches": 4},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", PLANS)
def test_experts_that_nobody_chose_stay_as_they_are_on_every_plan(plan: str) -> None:
    model = Model()
    expected, none = eager(model, ADAMW)
    assert all(none)
    assert len(set(none)) > 1
    program = compiled(model, ADAMW, **PLANS[plan])
    assert largest_difference(program.run(batches()).state_dict(), expected) <= 1e-9


def test_experts_that_stages_share_have_a_gradient_where_any_stage_has_one() -> None:
    model = Model(shared=True)
    expected, none = eager(model, ADAMW)
    assert any(none)
    program = compiled(model, ADAMW, 2, pp=2, microbatches=2)
    assert program.lowered.shared
    assert largest_difference(program.run(batches()).state_dict(), expected) <= 1e-9


OPTIMIZERS: dict[str, Factory] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov and decay": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.1, weight_decay=0.1),
    "Adadelta": functools.partial(torch.optim.Adadelta, weight_decay=0.1),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.1, weight_decay=0.1),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1, weight_decay=0.1),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.1),
}


def two_groups(named_parameters: Any) -> torch.optim.Optimizer:
    """Decay of weights alone."""
    named = list(named_parameters)
    groups = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.5},
        {"params": [p for n, p in named if "bias" in n]},
    ]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)


def trained(program: autopar.ParallelProgram, optimizer: Any, steps: int = 5) -> dict[str, Tensor]:
    """Parameters after training with another optimizer than the program was compiled with."""

    def body(session: Session) -> dict[str, Tensor]:
        for batch in batches(steps):
            session.train_step(list(batch))
        return {name: session.gather_full(name) for name in program.ir.parameters}

    return ranks_of(program, optimizer, body)[0]


def ranks_of(program: autopar.ParallelProgram, optimizer: Any, body: Callable[[Session], Any]) -> list[Any]:
    rule = autopar.UpdateRule(optimizer) if not isinstance(optimizer, autopar.UpdateRule) else optimizer
    return program.in_process.run(program.weights(), rule, 0, body)


@pytest.fixture(scope="module")
def on_two() -> autopar.ParallelProgram:
    """Each rank has a half of the batch."""
    return compiled(Model(), ADAMW, 2, mesh={"dp": 2}, strategy="dp")


@pytest.mark.few(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_leaves_them_alone(name: str, on_two: autopar.ParallelProgram) -> None:
    expected, _ = eager(Model(), OPTIMIZERS[name])
    assert largest_difference(trained(on_two, OPTIMIZERS[name]), expected) <= 1e-9


def test_groups_of_parameters_clipping_and_loss_scaling(on_two: autopar.ParallelProgram) -> None:
    model = Model()
    one = two_groups(model.named_parameters())
    for x, y in batches():
        one.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
    rule = autopar.UpdateRule(two_groups, clip_norm=autopar.ClipNorm(0.5), loss_scaling=autopar.LossScaling(8.0))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert largest_difference(trained(on_two, rule), expected) <= 1e-9


class Frugal(torch.optim.Optimizer):
    """An optimizer of one's own, which looks at `grad is None` itself and counts the gradients that there are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                p.add_(0.01)
            else:
                p.mul_(0.99).sub_(p.grad)


def test_an_optimizer_of_ones_own_sees_none(on_two: autopar.ParallelProgram) -> None:
    expected, _ = eager(Model(), Frugal)
    assert largest_difference(trained(on_two, Frugal), expected) <= 1e-9


def test_gradients_that_are_not_there_are_not_given_out(on_two: autopar.ParallelProgram) -> None:
    model, (x, y) = Model(), batches()[0]
    F.mse_loss(model(x), y).backward()
    wanted = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(wanted) < len(dict(model.named_parameters()))

    def body(session: Session) -> set[str]:
        session.train_step([x, y])
        return set(session.full_grads())

    assert ranks_of(on_two, ADAMW, body) == [wanted, wanted]


class LoopOverAll(Experts):
    """Experts that no row chose have a gradient of zeros."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, part(x[rows]))
        return out


def test_counts_travel_in_messages_that_there_are_anyway(on_two: autopar.ParallelProgram) -> None:
    autopar.forward_of(LoopOverAll, integers=EXPERTS)(products)
    other = Model()
    other.layers = nn.ModuleList(LoopOverAll() for _ in range(2)).double()
    without = compiled(other, ADAMW, 2, mesh={"dp": 2}, strategy="dp")
    assert not without.ir.conditions
    assert messages(on_two) == messages(without)
    assert "CONDITIONS" in on_two.pipeline
    assert "CONDITIONS" not in without.pipeline


def messages(program: autopar.ParallelProgram) -> list[tuple[str, str]]:
    """Kind and axes of what the first rank sends in a step."""
    profile = program.run(batches(), steps=1, profile=True).profile
    assert profile is not None
    ((step,), *_) = profile.ranks
    return [(one.kind, one.axes) for one in step.messages]


def test_a_checkpoint_from_before_an_expert_was_chosen_takes_its_state_away(on_two: autopar.ParallelProgram) -> None:
    """Going back to the second step, where the expert that the third one chooses has no state."""

    def state(session: Session) -> dict[str, Any]:
        copied = copy.deepcopy(session.state_dict())
        session.comm.barrier(site="the state is copied")  # of the other thread too
        return copied

    def body(session: Session) -> tuple[dict[str, Any], dict[str, Any]]:
        first, *rest = batches()
        session.train_step(list(first))
        session.train_step(list(rest[0]))
        saved, ends = state(session), []
        for _ in range(2):
            for batch in rest[1:]:
                session.train_step(list(batch))
            ends.append(state(session))
            session.load_state_dict(saved)
        assert len(saved) < len(ends[0])
        return ends[0], ends[1]

    for first, again in ranks_of(on_two, ADAMW, body):
        assert first.keys() == again.keys()
        for name, value in first.items():
            assert torch.equal(value, again[name]) if isinstance(value, Tensor) else value == again[name]


def test_verify_holds_gradients_to_none(on_two: autopar.ParallelProgram) -> None:
    result = autopar.verify(on_two, Model(), batches()[0], steps=3)
    assert result.ok
    assert len(result.errors) < 2 * len(on_two.ir.parameters) + 3


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_rests_in_a_memory_tier_is_left_alone_there(offload: str) -> None:
    model = Model()
    cluster, options = autopar.ClusterSpec.local(2).with_tiers(), autopar.Options(offload=offload, mesh={"dp": 2})
    program = autopar.compile(model, cluster, batches()[0], loss_fn=F.mse_loss, optimizer=ADAMW, options=options)
    assert largest_difference(program.run(batches()).state_dict(), eager(model, ADAMW)[0]) <= 1e-9
