"""Inputs and outputs of every shape: keywords, nested containers, dataclasses, things that carry a loss."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import Net, assert_equal_to_eager, compiled, square

CLASSES = torch.tensor([1, 5, 0, 7])


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Any = None
    name: str = "model"
    loss: Tensor | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)


def x() -> Tensor:
    return torch.randn(4, 8)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_keyword_arguments_and_their_defaults_are_kept() -> None:
    class Keywords(Model):
        def forward(self, x: Tensor, *, scale: float = 3.0, mask: Tensor | None = None, flag: bool = True) -> Tensor:
            y = self.lin(x) * scale
            return y * mask if mask is not None and flag else y

    mask = (torch.rand(4, 8) > 0.5).float()
    plain = assert_equal_to_eager(Keywords(), {"x": x(), "target": CLASSES}, F.cross_entropy)
    masked = assert_equal_to_eager(Keywords(), {"x": x(), "mask": mask, "target": CLASSES}, F.cross_entropy)
    off = assert_equal_to_eager(
        Keywords(), {"x": x(), "mask": mask, "flag": False, "scale": 2.0, "target": CLASSES}, F.cross_entropy
    )
    assert len({plain.ir.fingerprint, masked.ir.fingerprint, off.ir.fingerprint}) == 3


def test_keywords_may_come_in_another_order_than_forwards() -> None:
    class Two(Model):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.lin(a) - 2 * b

    assert_equal_to_eager(Two(), {"b": x(), "target": CLASSES, "a": x()}, F.cross_entropy)


def test_nested_dicts_lists_and_named_tuples_reach_forward_as_they_are() -> None:
    class Nested(Model):
        def forward(self, features: dict, history: list[Tensor], pair: Pair) -> Tensor:
            deep = features["a"]["b"][1]
            return self.lin(deep) * pair.left + sum(history) - pair.right

    batch = ({"a": {"b": (3, x())}, "unused": x()}, [x(), x()], Pair(x(), x()))
    assert_equal_to_eager(Nested(), batch, training=False)


def test_a_dataclass_as_input_is_taken_apart_and_made_again() -> None:
    class Taking(Model):
        def forward(self, batch: Output) -> Tensor:
            return self.lin(batch.logits) * (2.0 if batch.name == "twice" else 1.0)

    assert_equal_to_eager(Taking(), (Output(x(), name="twice"),), training=False)


def test_numbers_strings_and_none_are_constants_of_the_program() -> None:
    class Modes(Model):
        def forward(self, x: Tensor, times: int, mode: str, extra: Tensor | None) -> Tensor:
            for _ in range(times):
                x = self.lin(x)
            return torch.tanh(x) if mode == "tanh" and extra is None else x

    assert_equal_to_eager(Modes(), (x(), 3, "tanh", None, CLASSES), F.cross_entropy)


def test_the_same_tensor_given_twice_is_two_inputs() -> None:
    class Two(Model):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.lin(a) + b

    model, same = Two(), x()
    program = compiled(model, (same, same, CLASSES), F.cross_entropy)
    assert autopar.verify(program, model, (x(), x(), CLASSES)).ok


def test_an_input_that_forward_ignores_is_allowed() -> None:
    assert_equal_to_eager(Net(lambda net, a, b: net.last(net.first(a))), (x(), x(), CLASSES), F.cross_entropy)


@pytest.mark.parametrize("stride", ["transposed", "every second", "expanded"])
def test_views_inside_the_model_work_on_inputs_of_any_strides(stride: str) -> None:
    odd = {
        "transposed": torch.randn(8, 4).t(),
        "every second": torch.randn(4, 16)[:, ::2],
        "expanded": torch.randn(4, 1).expand(4, 8),
    }[stride]
    model = Net(lambda net, x: net.last((net.first(x).view(4, 2, 4) * x.contiguous().view(4, 2, 4)).view(4, 8)))
    program = compiled(model, (x(), CLASSES), F.cross_entropy)
    assert autopar.verify(program, model, (odd, CLASSES)).ok


def test_a_view_of_a_value_that_a_plan_transposes_works() -> None:
    model = Net(lambda net, x: net.last(net.first(x.transpose(1, 2)).transpose(1, 2).contiguous().view(4, -1)), width=8)
    model.last = nn.Linear(48, 8)
    assert_equal_to_eager(model, (torch.randn(4, 8, 6), CLASSES), F.cross_entropy, ranks=4, seeds=(0, 1, 2))


# --- outputs ---------------------------------------------------------------------------------------------------------


def test_dataclasses_named_tuples_and_nested_outputs_come_back_as_they_were() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = net.first(x)
        return Output(y, {"all": [y * 2, (y.sum(0),)], "pair": Pair(y, x)}, "named")

    model, batch = Net(forward), (x(),)
    program = assert_equal_to_eager(model, batch, training=False)
    (out,) = program.run([batch])
    assert isinstance(out, Output)
    assert isinstance(out.hidden["pair"], Pair)
    assert out.name == "named"
    assert out.loss is None
    torch.testing.assert_close(out.hidden["all"][1][0], model(*batch).hidden["all"][1][0])


def test_inputs_parameters_and_repeated_tensors_may_be_outputs() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = net.first(x)
        return x, net.first.weight, y, y, y[:2], 3, None

    model, batch = Net(forward), (x(),)
    (out,) = assert_equal_to_eager(model, batch, training=False).run([batch])
    assert out[5:] == (3, None)
    assert torch.equal(out[0], batch[0])
    assert torch.equal(out[1], model.first.weight)


def test_a_model_that_returns_its_input_is_a_program() -> None:
    assert_equal_to_eager(Net(lambda net, x: x), (x(),), training=False)


def test_a_scalar_output_is_trained_on_without_loss_fn() -> None:
    assert_equal_to_eager(Net(lambda net, x: square(net.last(net.first(x)))), (x(),))


@pytest.mark.parametrize("carrier", ["dataclass", "namespace", "dict"])
def test_an_output_with_a_loss_is_trained_on_it(carrier: str) -> None:
    class WithLabels(Model):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            logits = self.lin(x)
            loss = F.cross_entropy(logits, labels)
            if carrier == "dict":
                return {"loss": loss, "logits": logits}
            return Output(logits, loss=loss) if carrier == "dataclass" else SimpleNamespace(loss=loss, logits=logits)

    assert_equal_to_eager(WithLabels(), {"x": x(), "labels": CLASSES})


def test_outputs_that_the_loss_ignores_are_not_computed() -> None:
    model = Net(lambda net, x: {"logits": net.first(x), "debug": net.last(x).sort(-1)})
    program = assert_equal_to_eager(model, (x(), CLASSES), lambda out, y: F.cross_entropy(out["logits"], y))
    ops = {str(node.target) for t in program.ir.templates.values() for node in t.ops}
    assert not any("sort" in op for op in ops)


def test_a_loss_over_several_targets_and_a_loss_module_with_weights() -> None:
    def loss(out: Pair, y: Tensor, weight: Tensor) -> Tensor:
        return (F.cross_entropy(out.left, y, reduction="none") * weight).mean() + square(out.right)

    model = Net(lambda net, x: Pair(net.first(x), net.last(x)))
    assert_equal_to_eager(model, (x(), CLASSES, torch.rand(4)), loss)
    criterion = nn.CrossEntropyLoss(weight=torch.rand(8), label_smoothing=0.1)
    program = assert_equal_to_eager(Net(lambda net, x: net.first(x)), (x(), CLASSES), criterion)
    assert program.run([(x(), CLASSES)])[0].isfinite()


def test_names_that_the_emitted_file_uses_itself_do_not_clash() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("rt", "torch", "aten", "ops", "step", "d_loss"):
                self.register_parameter(name, nn.Parameter(torch.randn(8)))
            self.register_buffer("call", torch.randn(8))
            self.register_module("lambda", nn.Linear(8, 8))

        def forward(self, saved: Tensor, inputs: Tensor) -> Tensor:
            total = self.rt + self.torch + self.aten * self.ops * self.step + self.d_loss + self.call
            return self.get_submodule("lambda")(saved * total) + inputs

    assert_equal_to_eager(Clash(), (x(), x(), CLASSES), F.cross_entropy)
