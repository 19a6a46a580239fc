"""Loops over experts in modules that nobody told of: understood from a run on numbers, proven, trained as eager trains them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.examples.trees import flatten
from autopar.capture.known.equal_forwards import Given, Proof, compared
from autopar.capture.known.known_blocks import below
from autopar.capture.known.loops.expert_loops import applies, chosen_experts, experts_of_a_loop, has_experts
from autopar.capture.known.loops.like_experts import Form, form_of
from autopar.capture.known.loops.recorded import HeldInt
from autopar.errors import CaptureError
from tests.capture.known import expert_forms as forms
from tests.capture.known.expert_forms import EXPERTS, FORMS, HIDDEN, KINDS, D
from tests.ops.rings import carrying

ADAMW = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
ALWAYS_ALL = (forms.WhereIndex, forms.Repeated, forms.Bincount, forms.Switch)
"""Forms that call experts with no rows too, whose gradients are zeros then."""


class Model(nn.Module):
    """Layers of mixtures around a residual. Only the first of them sees what the batch says."""

    def __init__(self, form: type[nn.Module], kind: type[nn.Module] = forms.Mlp, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(form(kind) for _ in range(layers))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        beside = x.new_zeros(())
        for layer in self.layers:
            y = layer(x)
            if isinstance(layer, forms.Switch):
                y, balance = y
                beside = beside + 0.01 * balance
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.head(x) + beside


def batches(steps: int = 3, alike: bool = False) -> list[tuple[Tensor, Tensor]]:
    """alike: in each step rows are much alike, so that experts are left out."""
    generator = torch.Generator().manual_seed(1)
    made = [[torch.randn(8, 4, D, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(steps)]
    return [(x[:1, :1] + 0.01 * x if alike else x, y) for x, y in made]


def proof_of(form: type[nn.Module], kind: type[nn.Module] = forms.Mlp) -> tuple[nn.Module, Proof]:
    module: nn.Module = form(kind)
    given: tuple[Tensor, ...] = (torch.empty(8, 4, D),)
    if isinstance(module, forms.Apart):
        module, given = module.experts, (torch.empty(32, D), torch.empty(32, 2, dtype=torch.long), torch.empty(32, 2))
    assert has_experts(module)
    likes, _, structure = flatten((given, {}))
    numbers = lambda module, shape, generator: below(EXPERTS)(module, shape, generator)  # noqa: E731
    return module, compared(module, experts_of_a_loop, Given(tuple(likes), structure), numbers, chosen=chosen_experts)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form, marks=pytest.mark.slow if form in (forms.BooleanMask, forms.PerToken, forms.SortedCounts) else ()
        )
        for form in FORMS
    ],
)
def test_a_loop_is_understood_and_equal(form: type[nn.Module]) -> None:
    """On rows at random and all alike, and in which experts have no gradient."""
    module, proof = proof_of(form)
    assert proof.difference <= 1e-12
    experts = {name for name, _ in module.named_parameters() if "expert_" in name or name.startswith("experts.")}
    assert set(proof.sometimes.numbers) == (set() if form in ALWAYS_ALL else experts)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind is forms.SwiGlu else ()) for kind in KINDS[1:]]
)
def test_experts_of_any_layers_are_understood(kind: type[nn.Module]) -> None:
    _, proof = proof_of(forms.BooleanMask, kind)
    assert proof.difference <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_experts_have_one_form_but_those_that_normalise(kind: type[nn.Module]) -> None:
    form = form_of(kind().double())
    if kind is forms.Normed:
        assert form is None
    else:
        assert isinstance(form, Form)
        assert form.gate.act == ("gelu" if kind is forms.Mlp else "silu")


def compiled(model: nn.Module, mesh: dict[str, int], batch: tuple[Tensor, Tensor]) -> autopar.ParallelProgram:
    options = autopar.Options(mesh=mesh, on_overflow="chunk", microbatches=1)
    return autopar.compile(
        model, autopar.ClusterSpec.local(2), batch, loss_fn=F.mse_loss, optimizer=ADAMW, options=options
    )


def trained(program: autopar.ParallelProgram, steps: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    def body(session: Any) -> dict[str, Tensor]:
        for batch in steps:
            session.train_step(list(batch))
        return {name: session.gather_full(name) for name in program.ir.parameters}

    return program.in_process.run(program.weights(), autopar.UpdateRule(ADAMW), 0, body)[0]


def in_eager(model: nn.Module, steps: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """Parameters after training, and whether some had no gradient in a step after one in which they had."""
    model, left_out, had = copy.deepcopy(model), False, set[str]()
    optimizer = ADAMW(model.parameters())
    for x, y in steps:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        present = {name for name, p in model.named_parameters() if p.grad is not None}
        left_out, had = left_out or bool(had - present), had | present
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, left_out


def check_trains_as_eager(form: type[nn.Module], kind: type[nn.Module] = forms.Mlp) -> None:
    model = Model(form, kind).double()
    steps = batches(1) + batches(3, alike=True)
    expected, left_out = in_eager(model, steps)
    assert left_out == (form not in ALWAYS_ALL)
    for axis in ("dp", "ep"):
        program = compiled(model, {axis: 2}, steps[0])
        assert set(program.ir.parameters) == {name for name, _ in model.named_parameters()}
        if axis == "ep":
            program = program.with_plan(carrying(program, "ep"))
            assert "along=rt.along('ep')" in program.source(0) or form_of(kind().double()) is None
        found = trained(program, steps)
        assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-9


@pytest.mark.slow
def test_a_loop_trains_as_eager_over_data_and_over_experts() -> None:
    """AdamW's moments of experts that no row chose stay, and the parameters are the user's own, by name."""
    check_trains_as_eager(forms.OneHotPermuted, forms.SwiGlu)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_as_eager(form: type[nn.Module]) -> None:
    check_trains_as_eager(form)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_every_kind_train_as_eager(kind: type[nn.Module]) -> None:
    check_trains_as_eager(forms.BooleanMask, kind)


class Unlike(forms.WhereIndex):
    """Experts that are not all of one kind."""

    def __init__(self, expert: Any = forms.Mlp, choices: int = 2) -> None:
        super().__init__(expert, choices)
        self.experts[1] = nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, D))


class OverRows(nn.Module):
    """An expert that looks at all of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x - x.mean(0))


class Checked(forms.OneHotPermuted):
    """A branch on values that the router did not choose."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if hidden_states.abs().max() > 100:
            hidden_states = hidden_states.clamp(-100, 100)
        return super().forward(hidden_states)


class AboveMean(forms.WhereIndex):
    """Rows beyond what an expert's list of them says are weighted by how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.size(-1))
        weights, index = self.gate(flat).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(index == e)
            share = weights[rows, slot].unsqueeze(-1)
            y.index_add_(0, rows, expert(flat[rows]) * share / max(rows.shape[0], 1))
        return y.view_as(x)


def first_sum(output: Any, target: Tensor) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [Unlike(), forms.WhereIndex(OverRows)], ids=["unlike", "over rows"])
def test_experts_that_make_no_mixture_compute_all_rows(model: nn.Module) -> None:
    x = torch.randn(8, 4, D)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (x, x), loss_fn=first_sum)
    assert not program.captured.exported.known_blocks
    assert "rows that a mask selects are computed in their places" in program.report()
    assert autopar.verify(program, model, (x, x), steps=1).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [Checked(), AboveMean()], ids=lambda m: type(m).__name__)
def test_what_is_not_understood_is_refused_at_its_line(model: nn.Module) -> None:
    x = torch.randn(8, 4, D)
    with pytest.raises(CaptureError, match=r"expert_(forms|loops)\.py:\d+ in forward"):
        autopar.compile(model, autopar.ClusterSpec.local(2), (x, x), loss_fn=first_sum)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_loop_is_understood_of_the_forward_that_it_is_in() -> None:
    assert not applies(AboveMean(), torch.empty(8, 4, D)) or proof_of(AboveMean)[1].difference > 1e-3
    assert has_experts(forms.WhereIndex())
    assert not has_experts(Model(forms.WhereIndex))


def test_numbers_that_data_decided_stay_so() -> None:
    n = HeldInt(3)
    assert all(isinstance(m, HeldInt) for m in (n + 1, 1 + n, n - 2, 2 * n, n // 2, -n, sum([n, n])))
