"""A program for a part of its batch has the types that capturing the smaller batch gives, or says that it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.program import Program
from autopar.passes.batch.rebatch import NoRebatch, batch_dims, rebatch
from tests.capture.equal import SGD
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import captured

SAMPLES = 16


def types_of(program: Program) -> dict[str, dict[str, Any]]:
    """Template -> node -> type."""
    return {
        name: {node.name: node.meta.get("type") for node in template.graph.nodes if node.op != "output"}
        for name, template in program.templates.items()
    }


def forward_ops(program: Program) -> Counter[str]:
    """Every forward op of every call with its types, wherever segments begin (what only passes through is cloned)."""
    return Counter(
        f"{op.op} {op.operands} {op.results}"
        for call in program.calls
        for node in program.template_of(call).ops
        if node.meta["phase"] == "F"
        for op in (program.template_of(call).op_calls[node.name],)
        if op.op != "aten.clone.default"
    )


def of(model: nn.Module, samples: int, loss: Any = F.mse_loss, inputs: Any = None, **options: Any) -> autopar.Program:
    batch = inputs(samples) if inputs else (torch.randn(samples, 6), torch.randn(samples, 6))
    return autopar.compile(
        model, autopar.ClusterSpec.local(1), batch, loss_fn=loss, optimizer=SGD, options=autopar.Options(**options)
    )


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_it_has_the_types_of_the_smaller_batch_captured(zoo: ZooModel, training: bool, parts: int) -> None:
    whole = captured(zoo.name, 1, SAMPLES, training)
    smaller = captured(zoo.name, 1, SAMPLES // parts, training)
    made = rebatch(whole.ir, parts, whole.rules)
    assert made.inputs == smaller.ir.inputs
    assert forward_ops(made) == forward_ops(smaller.ir)
    assert types_of(whole.ir) != types_of(made), "and the program itself is as it was"
    if [(c.template, c.inputs) for c in made.calls] == [(c.template, c.inputs) for c in smaller.ir.calls]:
        assert types_of(made) == types_of(smaller.ir)
    else:
        assert zoo.name == "bert", "segments of equal weight are others in a smaller batch only where much has no batch"


def test_one_part_is_the_program_itself() -> None:
    whole = captured("mlp", 1, SAMPLES, True)
    assert rebatch(whole.ir, 1, whole.rules) is whole.ir


def test_the_batch_is_followed_into_merged_and_moved_dims() -> None:
    class Moving(nn.Module):
        """(batch, 6) -> (6, batch) -> (3, 2 batch) -> back."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            moved = torch.tanh(self.lin(x)).t().contiguous()
            merged = torch.sin(moved.reshape(3, -1))
            return merged.reshape(6, -1).t()

    whole, smaller = of(Moving(), 8), of(Moving(), 2)
    assert types_of(rebatch(whole.ir, 4, whole.rules)) == types_of(smaller.ir)


def test_a_batch_in_another_dim_is_followed_too() -> None:
    def inputs(samples: int) -> Any:
        return torch.randn(6, samples, 6), torch.randn(6, samples, 6)

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    whole = of(model, 8, inputs=inputs, batch_dims=[1, 1])
    smaller = of(model, 4, inputs=inputs, batch_dims=[1, 1])
    assert types_of(rebatch(whole.ir, 2, whole.rules)) == types_of(smaller.ir)


def test_inputs_without_a_batch_keep_their_shape() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.lin(x) * mask

    def inputs(samples: int) -> Any:
        return torch.randn(samples, 6), torch.ones(6), torch.randn(samples, 6)

    whole = of(Masked(), 8, inputs=inputs, batch_dims=[0, None, 0])
    made = rebatch(whole.ir, 2, whole.rules)
    assert [t.shape for _, t in made.inputs] == [(4, 6), (6,), (4, 6)]


class Cutting(nn.Module):
    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cut = cut
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.lin(x))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:4] * x[4:],
        lambda x: x.chunk(2)[0],
        lambda x: x[0],
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack(x.unbind(0)[:3]),
    ],
    ids=["slice", "chunk", "select", "cat", "unbind"],
)
def test_a_batch_that_is_cut_is_refused(cut: Callable[[Tensor], Tensor]) -> None:
    program = of(Cutting(cut), 8, loss=lambda out, y: (out**2).sum())
    with pytest.raises(NoRebatch, match="cuts the batch"):
        rebatch(program.ir, 2, program.rules)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    program = of(nn.Linear(6, 6), 9)
    with pytest.raises(NoRebatch, match=r"dim 0 of .* cannot be divided by 2"):
        rebatch(program.ir, 2, program.rules)


def test_a_parameter_that_the_batch_leads_is_refused() -> None:
    class PerSample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    program = of(PerSample(), 8)
    with pytest.raises(NoRebatch, match="is in a dim of the parameter"):
        batch_dims(program.ir, program.rules)


def test_a_batch_that_meets_itself_is_refused() -> None:
    class Contrasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            return torch.sigmoid((y @ y.t()).flatten())

    program = of(Contrasting(), 8, loss=lambda out, y: out.sum())
    with pytest.raises(NoRebatch, match="twice"):
        batch_dims(program.ir, program.rules)
