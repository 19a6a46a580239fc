"""Experts as people write them, in loops that have no graph: traced by another forward, proven, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.examples.trees import flatten
from autopar.capture.known import equal_forwards, known_blocks
from autopar.capture.known.equal_forwards import Given, largest_difference
from autopar.errors import CaptureError, InputError

PLAIN = flatten(((torch.empty(0),) * 3, {}))[2]
"""Three tensors and no keywords."""
MESH = autopar.ClusterSpec.local(4)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known modules and the proofs, put back afterwards."""
    monkeypatch.setattr(known_blocks, "_KNOWN", list(known_blocks._KNOWN))
    monkeypatch.setattr(known_blocks, "_PROVEN", set())


class LoopOverHits(nn.Module):
    """Weights of all experts in two parameters, and a loop over those that the batch chose."""

    def __init__(self, experts: int = 4, d: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.experts = experts
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, d, hidden)),
            nn.Parameter(torch.randn(experts, hidden, d)),
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: (tokens, d), chosen, weights: (tokens, choices)."""
        out = torch.zeros_like(x)
        with torch.no_grad():
            members = F.one_hot(chosen, self.experts).permute(2, 1, 0)
            hit = (members.sum((-1, -2)) > 0).nonzero()
        for (expert,) in hit:
            choice, token = torch.where(members[expert])
            y = F.silu(x[token] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, token, y * weights[token, choice, None])
        return out


def without_loop(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same as products of every row with the matrix of its expert."""
    rows = x.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    y = autopar.grouped_mm(F.silu(autopar.grouped_mm(rows, self.up, chosen)), self.down, chosen)
    return (y * weights.unsqueeze(-1)).sum(1)


class LoopOverModules(nn.Module):
    """Experts that are modules, masks that pick rows, and `.tolist()` of what is to be done."""

    def __init__(self, experts: int = 4, d: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d)) for _ in range(experts)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += self.parts[expert](x[rows]) * weights[rows, choice].unsqueeze(-1)
        return out


def all_experts(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Every expert over all tokens, those weighted 0 that did not choose it."""
    share = (F.one_hot(chosen, len(self.parts)) * weights.unsqueeze(-1)).sum(1)
    return sum(part(x) * share[:, i : i + 1] for i, part in enumerate(self.parts))


class Model(nn.Module):
    """Two layers of a router with experts."""

    def __init__(self, experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.layers = nn.ModuleList(experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, 8)."""
        h = x.flatten(0, 1)
        for router, layer in zip(self.routers, self.layers, strict=True):
            weights, chosen = router(h).softmax(-1).topk(2, -1)
            h = h + layer(h, chosen, weights / weights.sum(-1, keepdim=True))
        return h.view_as(x)


def made(experts: Callable[[], nn.Module] = LoopOverHits) -> Model:
    torch.manual_seed(0)
    return Model(experts)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, 8, generator=generator), torch.randn(8, 4, 8, generator=generator)


def compiled(model: nn.Module, plan: autopar.Plan | None = None, **options: Any) -> autopar.ParallelProgram:
    return autopar.compile(
        model,
        MESH,
        batch(),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        plan=plan,
        options=autopar.Options(**options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "forward"), [(LoopOverHits, without_loop), (LoopOverModules, all_experts)])
def test_a_loop_over_experts_trains_on_four_ranks_as_on_one(experts: Any, forward: Callable[..., Tensor]) -> None:
    autopar.forward_of(experts, integers=4)(forward)
    model = made(experts)
    program = compiled(model)
    assert autopar.verify(program, model, batch()).max_error <= 1e-9
    other = compiled(model, autopar.random_plan(program, 5, pp=1))
    assert autopar.verify(other, model, batch()).max_error <= 1e-9


def test_tokens_of_different_experts_go_into_microbatches() -> None:
    autopar.forward_of(LoopOverHits, integers=4)(without_loop)
    model = made()
    program = compiled(model, microbatches=2)
    assert program.plan.microbatches == 2
    assert autopar.verify(program, model, batch()).max_error <= 1e-9


def test_experts_their_dims_and_tokens_can_all_be_sharded() -> None:
    """One axis over all ranks takes the same factor of every grouped product."""
    autopar.forward_of(LoopOverHits, integers=4)(without_loop)
    model = made()
    program = compiled(model, mesh={"tp": 4}, pp=1)
    for factor in ("e", "k", "n", "t0"):
        other = compiled(model, sharded_by(factor, program.plan), mesh={"tp": 4}, pp=1)
        assert autopar.verify(other, model, batch()).max_error <= 1e-9


def sharded_by(factor: str, plan: autopar.Plan) -> autopar.Plan:
    """The plan with this factor of every grouped product over the one axis of its mesh."""
    (stage,) = plan.stages
    assert any(op.startswith("grouped_mm") for template in stage.templates.values() for op in template.strategies)
    templates = {
        name: replace(
            template,
            strategies={
                op: (factor,) if op.startswith("grouped_mm") else strategy
                for op, strategy in template.strategies.items()
            },
        )
        for name, template in stage.templates.items()
    }
    return replace(plan, stages=(replace(stage, templates=templates),))


def test_the_model_keeps_its_own_forward_and_the_report_names_the_other() -> None:
    autopar.forward_of(LoopOverHits, integers=4)(without_loop)
    model = made()
    report = compiled(model).report()
    assert (
        "LoopOverHits by tests.capture.known.test_known_blocks.without_loop: traced by a forward that was proven"
        in report
    )
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_another_forward_the_loop_is_refused_at_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_known_blocks\.py:\d+ in forward: `.*") as refused:
        compiled(made())
    assert "@autopar.forward_of(TheModule)" in str(refused.value)


def test_after_a_refusal_the_model_has_its_own_forward() -> None:
    autopar.forward_of(LoopOverHits)(lambda self, x, chosen, weights: x[chosen[:, 0] > 0])
    model = made()
    with pytest.raises(CaptureError):
        compiled(model)
    assert all("forward" not in vars(module) for module in model.modules())


def _no_weights(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return without_loop(self, x, chosen, torch.ones_like(weights) / 2)


def _no_gradient(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return without_loop(self, x, chosen, weights.detach())


def _rounded(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return without_loop(self, x, chosen, weights.float().to(weights.dtype))


@pytest.mark.parametrize("wrong", [_no_weights, _no_gradient, _rounded])
def test_a_forward_that_is_not_equal_is_refused_by_name(wrong: Callable[..., Tensor]) -> None:
    autopar.forward_of(LoopOverHits, integers=4)(wrong)
    with pytest.raises(
        CaptureError, match=f"LoopOverHits by .*{wrong.__name__}, module layers.0: the forwards are not equal"
    ):
        compiled(made())


def test_a_model_without_weights_is_proven_on_random_ones() -> None:
    autopar.forward_of(LoopOverHits, integers=4)(without_loop)
    with torch.device("meta"):
        model = Model(LoopOverHits)
    assert "LoopOverHits" in compiled(model).report()


@pytest.mark.parametrize(("forward", "equal"), [(without_loop, True), (_no_weights, False)])
def test_large_sizes_are_divided_alike(forward: Callable[..., Tensor], equal: bool) -> None:
    """1.6 billion numbers, of which a proof makes few."""
    with torch.device("meta"):
        experts = LoopOverHits(8, 7168, 14336)
    given = Given((torch.empty(4096, 7168), torch.empty(4096, 2, dtype=torch.long), torch.empty(4096, 2)), PLAIN)
    difference, _ = largest_difference(experts, forward, given, known_blocks.below(8))
    assert (difference <= 1e-9) == equal


def test_a_forward_that_knows_its_sizes_from_elsewhere_is_proven_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reshaped(LoopOverHits):
        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x.view(-1, 1024), chosen, weights)

    monkeypatch.setattr(equal_forwards, "MANY_ELEMENTS", 1000)
    given = Given((torch.empty(6, 1024), torch.empty(6, 2, dtype=torch.long), torch.empty(6, 2)), PLAIN)
    assert largest_difference(Reshaped(2, 1024, 16), without_loop, given, known_blocks.below(2))[0] <= 1e-9


def test_a_forward_is_given_to_a_class_of_modules() -> None:
    with pytest.raises(InputError, match="forward_of takes a class of modules, not"):
        autopar.forward_of(without_loop)  # type: ignore[arg-type]


def test_a_subclass_with_a_forward_of_its_own_is_another_class() -> None:
    class Doubled(LoopOverHits):
        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return without_loop(self, x, chosen, weights * 2)

    class Same(LoopOverHits):
        pass

    autopar.forward_of(LoopOverHits, integers=4)(without_loop)
    assert compiled(made(Doubled)).captured.exported.known_blocks == ()
    assert "Same" in compiled(made(Same)).captured.exported.known_blocks[0]
