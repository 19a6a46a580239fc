"""No gradient is not a gradient of zeros: the proof of a known forward sees which it is, and the graph says when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.before.conditional_gradients import Draw, doubtful, learned
from autopar.capture.build import capture_program
from autopar.capture.examples.trees import flatten
from autopar.capture.known import known_blocks
from autopar.capture.known.equal_forwards import Given, Proof, compared
from autopar.capture.known.known_torch import adaptive_log_softmax, any_cluster, cluster_of
from autopar.errors import CaptureError
from autopar.ir.program import Program

TWO = flatten(((torch.empty(0),) * 2, {}))[2]
"""Two tensors and no keywords."""
GIVEN = Given((torch.empty(6, 4), torch.empty(6, 1, dtype=torch.long)), TWO)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "_KNOWN", list(known_blocks._KNOWN))
    monkeypatch.setattr(known_blocks, "_PROVEN", set())


class Hits(nn.Module):
    """A loop over the experts that rows chose: the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.parts[i](x[rows]))
        return out


class All(Hits):
    """A loop over all experts: those that no row chose have a gradient of zeros."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, part(x[rows]))
        return out


class Stacked(nn.Module):
    """One parameter of all experts: it has a gradient whatever rows choose."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, x[rows] @ self.w[i])
        return out


class OneHot(Hits):
    """Told by one-hot rows; a row of zeros chose nobody."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            rows = chosen[:, i].nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, part(x[rows]))
        return out


class Routes(Hits):
    """A mixture that chooses the experts itself."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x, largest(self, x, other))


def largest(module: Any, x: Tensor, other: Tensor) -> Tensor:
    return x[:, :3].argmax(1, keepdim=True)


def products(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
    weights = torch.stack([part.weight.t() for part in self.parts])
    return autopar.grouped_mm(x.unsqueeze(1), weights, chosen).squeeze(1)


def stacked(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return autopar.grouped_mm(x.unsqueeze(1), self.w, chosen).squeeze(1)


def of_one_hot(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return products(self, x, chosen.argmax(1, keepdim=True)) * (chosen.sum(1, keepdim=True) > 0)


def routed(self: Any, x: Tensor, other: Tensor) -> Tensor:
    return products(self, x, largest(self, x, other))


def detached(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """The last expert has no gradient at all, also where rows chose it."""
    last = self.parts[2].weight
    weights = torch.stack([*(part.weight.t() for part in self.parts[:2]), last.detach().t() + 0 * last.t()])
    return autopar.grouped_mm(x.unsqueeze(1), weights, chosen).squeeze(1)


def rows_of_one_hot(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return F.one_hot(torch.randint(0, 4, shape[:-1], generator=generator), 4)[..., :3]


def proof(
    module: nn.Module, forward: Callable[..., Tensor], integers: Any = 3, given: Given = GIVEN, chosen: Any = None
) -> Proof:
    torch.manual_seed(0)
    drawn = integers if callable(integers) else known_blocks.below(integers)
    return compared(module, forward, given, drawn, None, chosen)


EXPERTS = {f"parts.{i}.weight": frozenset({i}) for i in range(3)}


def test_an_expert_that_no_row_chose_has_no_gradient() -> None:
    found = proof(Hits(), products)
    assert found.difference <= 1e-9
    assert dict(found.sometimes.numbers) == EXPERTS
    assert not found.sometimes.one_hot


@pytest.mark.parametrize(("module", "forward"), [(All, products), (Stacked, stacked)])
def test_zeros_are_zeros_where_eager_has_zeros(module: Callable[[], nn.Module], forward: Callable[..., Tensor]) -> None:
    found = proof(module(), forward)
    assert found.difference <= 1e-9
    assert found.sometimes.numbers == {}


def test_rows_may_name_experts_by_ones() -> None:
    """The input has no gradient either where no row chose any expert."""
    given = Given((torch.empty(6, 4), torch.empty(6, 3, dtype=torch.long)), TWO)
    found = proof(OneHot(), of_one_hot, rows_of_one_hot, given)
    assert found.difference <= 1e-9
    assert found.sometimes.one_hot
    assert dict(found.sometimes.numbers) == EXPERTS | {"input 0": frozenset({0, 1, 2})}


def test_a_module_that_chooses_by_itself_must_say_what_it_chose() -> None:
    assert proof(Routes(), routed).difference == float("inf")
    found = proof(Routes(), routed, chosen=largest)
    assert found.difference <= 1e-9
    assert dict(found.sometimes.numbers) == EXPERTS


def test_numbers_that_are_never_drawn_prove_nothing() -> None:
    """The third expert had no gradient in any draw, which says nothing of batches that choose it."""
    assert proof(Hits(), products, 2).difference == float("inf")


def test_a_number_that_few_rows_name_is_found_and_rows_are_asked_together() -> None:
    asked = []

    def seldom_the_third(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        two, rare = torch.randint(0, 2, shape, generator=generator), torch.rand(shape, generator=generator) < 1 / 500
        return torch.where(rare, 2, two)

    def told(module: Any, x: Tensor, chosen: Tensor) -> Tensor:
        asked.append(chosen)
        return chosen

    given = Given((torch.empty(64, 4), torch.empty(64, 1, dtype=torch.long)), TWO)
    found = proof(Hits(), products, seldom_the_third, given, told)
    assert found.difference <= 1e-9
    assert dict(found.sometimes.numbers) == EXPERTS
    assert not (asked[0] == 2).any()
    assert len(asked) < 600  # of 2048 rows


def test_a_gradient_that_is_there_is_not_one_of_zeros() -> None:
    found = proof(Hits(), detached)
    assert found.difference >= 0.1
    assert found.tensor == "the gradient of parts.2.weight"


def test_clusters_of_a_softmax_that_no_target_is_in_have_no_gradient() -> None:
    module = nn.AdaptiveLogSoftmaxWithLoss(4, 12, [4, 8])
    found = proof(
        module,
        adaptive_log_softmax,
        any_cluster,
        Given((torch.empty(6, 4), torch.empty(6, dtype=torch.long)), TWO),
        cluster_of,
    )
    assert found.difference <= 1e-9
    first, second = frozenset({1}), frozenset({2})
    assert dict(found.sometimes.numbers) == {
        "tail.0.0.weight": first,
        "tail.0.1.weight": first,
        "tail.1.0.weight": second,
        "tail.1.1.weight": second,
    }


def test_a_number_that_never_comes_alone_is_doubtful() -> None:
    """The gradient may depend on either of 0 and 1, which no draw named apart."""

    def draw(present: bool, *numbers: int) -> Draw:
        return Draw({"w": present}, {(0, False): frozenset(numbers)})

    draws = [draw(True, 0, 1), draw(False, 2, 3), draw(True, 0, 1, 3)]
    found = learned(draws)
    assert found is not None
    assert doubtful(draws, found) == {0, 1}
    draws.append(draw(False, 1, 2))
    found = learned(draws)
    assert found is not None
    assert found.numbers == {"w": {0}}
    assert not doubtful(draws, found)
    assert learned([*draws, draw(True, 3)]) is None


# --- the graph


class Model(nn.Module):
    """around: what is added to what the experts make."""

    def __init__(self, experts: nn.Module, around: Callable[[Any, Tensor], Tensor | float] = lambda _, h: h) -> None:
        super().__init__()
        self.first, self.experts, self.around = nn.Linear(4, 4), experts, around

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = h[:, :3].argmax(1, keepdim=True)
        return (self.experts(h, chosen) + self.around(self, h)).pow(2).sum()


def captured(model: nn.Module) -> Program:
    return capture_program(model, (torch.randn(6, 4),))[0]


def nothing(model: Any, h: Tensor) -> float:
    return 0.0


def test_a_program_says_when_its_parameters_have_a_gradient() -> None:
    autopar.forward_of(Hits, integers=3)(products)
    program = captured(Model(Hits()))
    assert program.conditions == {f"experts.parts.{i}.weight": (((1, (i,)),),) for i in range(3)}
    assert len(program.outputs) == 2
    assert program.type_of(program.outputs[1]).shape == (3,)


def test_a_parameter_that_is_read_elsewhere_too_always_has_a_gradient() -> None:
    autopar.forward_of(Hits, integers=3)(products)
    penalty = Model(Hits(), lambda model, h: model.experts.parts[1].weight.pow(2).sum())
    assert set(captured(penalty).conditions) == {"experts.parts.0.weight", "experts.parts.2.weight"}
    compared_with = Model(Hits(), lambda model, h: (model.experts.parts[1].weight > 0).sum() * 1.0)
    assert len(captured(compared_with).conditions) == 3


def test_what_experts_alone_read_has_a_gradient_where_rows_chose_any() -> None:
    autopar.forward_of(OneHot, integers=rows_of_one_hot)(of_one_hot)

    class Choosing(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            chosen = F.one_hot(h.argmax(1), 4)[:, :3]
            return (self.experts(h, chosen) + self.around(self, h)).pow(2).sum()

    any_of_them = (((1, (0, 1, 2)),),)
    assert captured(Choosing(OneHot(), nothing)).conditions["first.weight"] == any_of_them
    assert "first.weight" not in captured(Choosing(OneHot())).conditions


def test_two_modules_one_after_the_other_must_both_be_open() -> None:
    autopar.forward_of(OneHot, integers=rows_of_one_hot)(of_one_hot)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = OneHot(), OneHot()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x, F.one_hot(x.argmax(1), 4)[:, :3])
            return self.second(h, F.one_hot(x.argmin(1), 4)[:, :3]).sum()

    conditions = captured(Twice()).conditions
    assert conditions["first.parts.1.weight"] == (((1, (1,)), (2, (0, 1, 2))),)
    assert conditions["second.parts.1.weight"] == (((2, (1,)),),)


def test_experts_that_two_layers_share_have_a_gradient_if_either_chose_them() -> None:
    autopar.forward_of(Hits, integers=3)(products)

    class Shared(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for direction in (1, -1):
                h = h + self.experts(h, (direction * h[:, :3]).argmax(1, keepdim=True))
            return h.pow(2).sum()

    conditions = captured(Shared(Hits())).conditions
    assert conditions["experts.parts.0.weight"] == (((1, (0,)),), ((2, (0,)),))


@pytest.mark.parametrize(("experts", "forward"), [(All, products), (Stacked, stacked)])
def test_other_programs_count_nothing(experts: Any, forward: Callable[..., Tensor]) -> None:
    autopar.forward_of(experts, integers=3)(forward)
    program = captured(Model(experts()))
    assert program.conditions == {}
    assert len(program.outputs) == 1


def test_a_difference_that_cannot_be_carried_is_refused_by_name() -> None:
    autopar.forward_of(Routes, integers=3)(routed)
    with pytest.raises(
        CaptureError, match=r"Routes by .*routed, module experts: .*the gradient of parts\.\d\.weight.*chosen="
    ):
        captured(Model(Routes()))
