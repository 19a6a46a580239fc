"""No gradient is lost, and none appears, on the way from the eager model to the captured program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.export.fake import fake_mode, faked
from autopar.ops.dialect import LIFT
from tests.capture.equal import Net, assert_equal_to_eager, compiled

CLASSES = torch.tensor([1, 5, 0, 7])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), CLASSES


class TiedLm(nn.Module):
    """Embedding and head share one weight; the head is registered first, so export names the weight after it."""

    def __init__(self, vocab: int = 16, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocab, bias=False)
        self.embed = nn.Embedding(vocab, width)
        self.middle = nn.Linear(width, width)
        self.embed.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


# --- parameters without memory, tied parameters -----------------------------------------------------------------------


def test_meta_parameters_with_cross_entropy_keep_their_backward() -> None:
    real, (x, y) = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), batch()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    program, reference = compiled(empty, (x, y), F.cross_entropy), compiled(real, (x, y), F.cross_entropy)
    assert program.ir.trained == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert program.ir.fingerprint == reference.ir.fingerprint
    assert autopar.verify(program, real, (x, y)).max_error <= 1e-9


def test_a_model_far_larger_than_memory_compiles_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 18, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 8))
        x = torch.empty(4, 1 << 18)
    assert sum(p.numel() for p in model.parameters()) * 4 > 256e9
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=2)
    program = autopar.compile(model, cluster, (x, CLASSES.to("meta")), loss_fn=F.cross_entropy)
    assert program.training
    assert all(p.device.type == "meta" for p in model.parameters())


def test_faking_keeps_tied_weights_tied_and_hands_the_model_back_as_it_was() -> None:
    model = TiedLm()
    before = dict(model.named_parameters(remove_duplicate=False))
    with faked(model, fake_mode()) as names:
        assert model.embed.weight is model.head.weight
        assert isinstance(model.embed.weight, FakeTensor)
        assert names[id(model.head.weight)] == "head.weight"
    assert all(value is before[name] for name, value in model.named_parameters(remove_duplicate=False))


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_weights_are_one_parameter_whose_gradient_is_the_sum_of_both_uses(ranks: int) -> None:
    ids = torch.randint(0, 16, (4, 8))
    program = assert_equal_to_eager(TiedLm(), (ids, ids), lm_loss, ranks=ranks, seeds=(0, 1))
    assert "head.weight" in program.ir.parameters
    assert "embed.weight" not in program.ir.parameters
    assert program.ir.parameters["head.weight"].aliases == ("embed.weight",)


class Shift(nn.Module):
    """Adds a buffer that it is given."""

    def __init__(self, shift: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("shift", shift, persistent)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x) + self.shift)


@pytest.mark.parametrize(("ranks", "persistent"), [(1, True), (2, True), (1, False)])
def test_a_buffer_that_several_modules_hold_is_one_buffer(ranks: int, persistent: bool) -> None:
    shift = torch.randn(8)
    model = nn.Sequential(Shift(shift, persistent), nn.Linear(8, 8), Shift(shift, False), Shift(shift, persistent))
    program = assert_equal_to_eager(model, batch(), F.cross_entropy, ranks=ranks)
    assert list(program.ir.buffers) == ["0.shift"]
    assert set(program.run([batch()]).saved) == set(model.state_dict())


# --- custom autograd.Functions -------------------------------------------------------------------------------------------


class StraightThrough(Function):
    """Rounds forward, passes the gradient through: its derivative is nowhere in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class ScaledSigmoid(Function):
    """Saves a value, takes a number, and returns two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(x * scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y, y * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g2: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return (g + 2 * g2) * y * (1 - y) * ctx.scale * 0.5, None


class ReverseGradient(Function):
    """Nothing forward, minus the gradient backward (domain-adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class WithNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.round(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class NumpyBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy() * 2)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Joined(Function):
    @staticmethod
    def forward(ctx: Any, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.chunk(2)


def test_a_straight_through_estimator_keeps_its_backward() -> None:
    model = Net(lambda net, x: net.last(StraightThrough.apply(net.first(x) * 4)))
    program = assert_equal_to_eager(model, batch(), F.cross_entropy, ranks=4)
    assert "first.weight" in program.ir.trained


def test_a_model_whose_every_path_is_a_custom_function_is_trained() -> None:
    assert_equal_to_eager(
        Net(lambda net, x: StraightThrough.apply(net.last(net.first(x)) * 4)), batch(), F.cross_entropy
    )


def test_a_custom_function_with_saved_values_numbers_and_two_results_keeps_its_backward() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        a, b = ScaledSigmoid.apply(net.first(x), 3.0)
        return net.last(a * b)

    assert_equal_to_eager(Net(forward), batch(), F.cross_entropy)


def test_uses_of_one_function_with_different_numbers_stay_apart() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return ScaledSigmoid.apply(net.first(x), 3.0)[0] + ScaledSigmoid.apply(net.last(x), 0.5)[1]

    assert_equal_to_eager(Net(forward), batch(), F.cross_entropy)


def test_a_custom_function_beside_batch_norm_survives_functionalization() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), Net(lambda net, x: net.last(ReverseGradient.apply(net.first(x))))
    )
    assert_equal_to_eager(model, batch(), F.cross_entropy)


@pytest.mark.parametrize("function", [WithNumpy, NumpyBackward, InPlace])
def test_a_function_that_cannot_be_traced_is_refused_by_name(function: type[Function]) -> None:
    model = Net(lambda net, x: net.last(function.apply(net.first(x) * 4)))
    with pytest.raises(autopar.CaptureError, match=rf"{function.__name__}|test_gradients\.py"):
        compiled(model, batch(), F.cross_entropy)


def test_a_function_over_a_list_of_tensors_is_refused_by_name() -> None:
    model = Net(lambda net, x: Joined.apply([net.first(x), net.last(x)])[:4])
    with pytest.raises(autopar.CaptureError, match=r"Joined takes .*lists of tensors.*one positional argument"):
        compiled(model, batch(), F.cross_entropy)


# --- checkpoints, no_grad, detach ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_vanish_and_compute_the_same(reentrant: bool) -> None:
    def block(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        return net.last(checkpoint(lambda h: torch.sin(net.first(h)), h, use_reentrant=reentrant))

    plain = compiled(Net(lambda net, x: net.last(torch.sin(net.first(net.first(x))))), batch(), F.cross_entropy)
    program = assert_equal_to_eager(Net(block), batch(), F.cross_entropy)
    ops = [[str(n.target) for n in t.ops] for t in program.ir.templates.values()]
    assert ops == [[str(n.target) for n in t.ops] for t in plain.ir.templates.values()]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_differentiable_input_trains_nothing_inside_as_in_eager() -> None:
    model = Net(lambda net, x: net.last(checkpoint(lambda h: torch.sin(net.first(h)), x, use_reentrant=True)))
    program = assert_equal_to_eager(model, batch(), F.cross_entropy)
    assert program.ir.trained == ("last.weight", "last.bias")


def test_no_grad_regions_and_detach_stop_gradients_exactly_as_in_eager() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        with torch.no_grad():
            scale = torch.sigmoid(net.last(h)) * 2
            with torch.enable_grad():
                inner = net.first(x * 2)
        return h * scale + net.first(x).detach() + inner

    program = assert_equal_to_eager(Net(forward), batch(), F.cross_entropy)
    assert program.ir.trained == ("first.weight", "first.bias")


def test_a_value_that_only_reaches_the_loss_detached_gets_no_gradient_and_not_a_zero_one() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, side = block(x)
            return x + side.detach()

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x), self.side(x)

    program = assert_equal_to_eager(Blocks(), batch(), F.cross_entropy)
    assert not any("side" in name for name in program.ir.trained)


def test_frozen_parameters_pass_gradients_on_and_get_none() -> None:
    model = Net(
        lambda net, x: net.last(torch.relu(net.frozen(net.first(x)))), frozen=nn.Linear(8, 8).requires_grad_(False)
    )
    program = assert_equal_to_eager(model, batch(), F.cross_entropy)
    assert program.ir.trained == ("first.weight", "first.bias", "last.weight", "last.bias")


# --- the guard ----------------------------------------------------------------------------------------------------------


def test_a_gradient_that_capture_loses_is_an_error_that_names_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIFT, torch.ops.aten.relu.default, lambda x: torch.relu(x).detach())
    model = Net(lambda net, x: net.last(torch.relu(net.first(x))))
    with pytest.raises(
        autopar.CaptureError, match=r"no gradient for first\.bias, first\.weight where the eager model has"
    ):
        compiled(model, batch(), F.cross_entropy)


def test_a_gradient_that_eager_does_not_have_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocks(nn.Module):
        """The detach lies inside a block, where its template alone says that the gradient stops."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Net(lambda net, x: net.last(x) + net.first(x).detach()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    monkeypatch.setitem(LIFT, torch.ops.aten.detach.default, lambda x: x * 1)
    lost = r"layers\.0\.first\.bias, layers\.0\.first\.weight"
    with pytest.raises(autopar.CaptureError, match=f"a gradient for {lost}.* where the eager model has none"):
        compiled(Blocks(), batch(), F.cross_entropy)


def test_a_model_that_trains_nothing_is_refused() -> None:
    model = Net(lambda net, x: net.last(x).detach()).requires_grad_(True)
    with pytest.raises(autopar.CaptureError, match="nothing to train"):
        compiled(model, batch(), F.cross_entropy)


def test_a_model_that_eager_cannot_train_is_refused_with_the_reason_of_eager() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = torch.sigmoid(net.first(x))
        return net.last(h) * h.mul_(2)

    with pytest.raises(autopar.CaptureError, match=r"the model itself cannot be trained.*inplace operation"):
        compiled(Net(forward), batch(), F.cross_entropy)
