"""The program of one microbatch has the types that a batch of that size has, and refuses where an op needs all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.program import Program
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.batch.states import batched
from autopar.request import request as module
from tests.capture.equal import SGD
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import captured

SAMPLES = 16
COUPLED = {"moe", "resnet"}


def types_of(program: Program) -> dict[tuple[str, str], Any]:
    """(template, node) -> type."""
    return {
        (name, node.name): node.meta.get("type")
        for name, template in program.templates.items()
        for node in template.graph.nodes
        if node.op != "output"
    }


def of(model: nn.Module, samples: int, loss: Any = F.mse_loss, inputs: Any = None, **options: Any) -> autopar.Program:
    batch = inputs(samples) if inputs else (torch.randn(samples, 6), torch.randn(samples, 6))
    return autopar.compile(
        model, autopar.ClusterSpec.local(1), batch, loss_fn=loss, optimizer=SGD, options=autopar.Options(**options)
    )


def part(program: autopar.Program, parts: int) -> Program:
    """The program of one of so many microbatches."""
    return Microbatches(program.captured, program.rules).at(parts)


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_it_has_the_types_of_the_smaller_batch_captured(zoo: ZooModel, training: bool, parts: int) -> None:
    whole = captured(zoo.name, 1, SAMPLES, training)
    before = types_of(whole.ir)
    if training and zoo.name in COUPLED:
        with pytest.raises(autopar.CoupledError, match="couples the samples"):
            part(whole, parts)
        return
    smaller = captured(zoo.name, 1, SAMPLES // parts, training)
    divided = part(whole, parts)
    assert divided.inputs == smaller.ir.inputs
    types, wanted = types_of(divided), types_of(smaller.ir)
    shared = types.keys() & wanted.keys()
    if zoo.name != "bert":  # whose embeddings a smaller batch cuts elsewhere
        assert len(shared) > 0.8 * len(wanted)
        assert {key: types[key] for key in shared} == {key: wanted[key] for key in shared}
    assert types_of(whole.ir) == before, "the program itself is as it was"


def test_one_microbatch_is_the_program_itself() -> None:
    whole = captured("mlp", 1, SAMPLES, True)
    assert part(whole, 1) is whole.ir


class Moving(nn.Module):
    """(batch, 6) -> (6, batch) -> (3, 2 batch) -> back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        moved = torch.tanh(self.lin(x)).t().contiguous()
        merged = torch.sin(moved.reshape(3, -1))
        return merged.reshape(6, -1).t()


def test_the_batch_is_followed_into_merged_and_moved_dims() -> None:
    assert types_of(part(of(Moving(), 8), 4)) == types_of(of(Moving(), 2).ir)


def test_outputs_are_joined_where_the_batch_is_in_them() -> None:
    class Merged(Moving):
        def forward(self, x: Tensor) -> Any:
            moved = torch.tanh(self.lin(x)).t().contiguous()
            return moved, moved.reshape(-1), x.sum(), x.amax(), self.lin.weight * 2

    model, x = Merged().double().eval(), torch.randn(8, 6, dtype=torch.float64)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (x,), options=autopar.Options(microbatches=4))
    with torch.no_grad():
        for got, want in zip(program.run([(x,)]).outputs[0], model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_batch_in_another_dim_is_followed_too() -> None:
    def inputs(samples: int) -> Any:
        return torch.randn(6, samples, 6), torch.randn(6, samples, 6)

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    whole = of(model, 8, inputs=inputs, batch_dims=[1, 1])
    assert types_of(part(whole, 2)) == types_of(of(model, 4, inputs=inputs, batch_dims=[1, 1]).ir)


def test_inputs_without_a_batch_keep_their_shape() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.lin(x) * mask

    def inputs(samples: int) -> Any:
        return torch.randn(samples, 6), torch.ones(6), torch.randn(samples, 6)

    divided = part(of(Masked(), 8, inputs=inputs, batch_dims=[0, None, 0]), 2)
    assert [t.shape for _, t in divided.inputs] == [(4, 6), (6,), (4, 6)]


class Mixing(nn.Module):
    """A layer, then something that mixes samples."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.lin(x))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:4] * x[4:],
    "chunk": lambda x: x.chunk(2)[0],
    "select": lambda x: x[0],
    "cat": lambda x: torch.cat([x, x[:3]]),
    "unbind": lambda x: torch.stack(x.unbind(0)[:3]),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "gather": lambda x: x.gather(0, torch.zeros(8, 6, dtype=torch.int64)),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    "linspace": lambda x: x * torch.linspace(0, 1, 8)[:, None],
    "eye": lambda x: torch.eye(8) @ x,
    "itself": lambda x: torch.sigmoid(x @ x.t()),
    "deviation": lambda x: x - x.mean(0),
    "norm": lambda x: x / x.norm(),
    "maximum": lambda x: x - x.amax(0),
    "merged and mixed": lambda x: x.reshape(4, 12).softmax(0),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_what_mixes_samples_is_refused_with_the_line_that_does(mix: Callable[[Tensor], Tensor]) -> None:
    program = of(Mixing(mix), 8, loss=lambda out, y: (out**2).sum())
    with pytest.raises(autopar.CoupledError, match=r"test_divided\.py:\d+|, which couples"):
        part(program, 2)
    assert not Microbatches(program.captured, program.rules).may_be(2)


@pytest.mark.parametrize("loss", [lambda o, y: o.mean(1).max(), lambda o, y: o.mean(1).median()], ids=["max", "median"])
def test_a_loss_that_is_no_sum_over_samples_is_refused(loss: Any) -> None:
    with pytest.raises(autopar.CoupledError):
        of(nn.Linear(6, 6), 8, loss, microbatches=2)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(autopar.InputError, match="cannot be cut into 2 microbatches"):
        part(of(nn.Linear(6, 6), 9), 2)


def test_a_parameter_that_the_batch_leads_is_refused() -> None:
    class PerSample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(autopar.CoupledError, match="has no batch dim"):
        part(of(PerSample(), 8), 2)


@pytest.fixture
def captured_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of every batch that is captured."""
    samples: list[int] = []
    real = module.capture_program

    def counting(model: nn.Module, inputs: tuple[Tensor, ...], *rest: object) -> object:
        samples.append(inputs[0].shape[0])
        return real(model, inputs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "capture_program", counting)
    return samples


def test_a_step_is_captured_once_for_the_whole_batch(captured_batches: list[int]) -> None:
    of(nn.Linear(6, 6), 8, microbatches=8)
    assert captured_batches == [8]


def test_microbatches_of_their_own_are_captured_too(captured_batches: list[int]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    of(model, 8, microbatches=2, coupled="per-microbatch")
    assert captured_batches == [8, 4]
    of(nn.Linear(6, 6), 8, microbatches=2, coupled="per-microbatch")
    assert captured_batches == [8, 4, 8], "what does not couple needs no word"


class Sum(nn.Module):
    """The loss of the samples, and a penalty that gets the same gradient as it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.a(x), target) + self.a.weight.pow(2).sum()


@pytest.mark.parametrize("parts", [2, 4])
def test_a_share_is_of_the_slot_that_gives_it_not_of_the_value(parts: int) -> None:
    batch = torch.randn(8, 6), torch.randint(0, 4, (8,))
    whole = of(Sum(), 8, None, lambda _: batch)
    joins = {name for name, t in whole.ir.templates.items() if len(t.input_grads) == 2 and len(set(t.input_grads)) == 1}
    assert joins, "one gradient is given to both terms"
    divided = part(whole, parts)
    for name in joins:
        samples, penalty = divided.templates[name].input_grads
        assert samples != penalty
    program = of(model := Sum(), 8, None, lambda _: batch, microbatches=parts)
    assert autopar.verify(program, model, batch).ok


def test_a_loss_of_parameters_alone_that_is_read_elsewhere_has_no_microbatches() -> None:
    class Alone(Sum):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.a.weight.pow(2).sum()

    batch = torch.randn(8, 6), torch.randint(0, 4, (8,))
    program = of(model := Alone(), 8, None, lambda _: batch, microbatches=2)
    assert autopar.verify(program, model, batch).ok
    ir = program.ir
    assert ir.loss is not None
    again = replace(Microbatches(program.captured, program.rules).program, outputs=(*ir.outputs, ir.outputs[0]))
    with pytest.raises(autopar.CoupledError, match="read elsewhere"):
        batched(again, program.rules)
