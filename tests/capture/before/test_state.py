"""Buffers, modes, in-place ops, shared blocks, parametrizations: what a module keeps and reuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import autopar
from tests.capture.equal import Net, assert_equal_to_eager, compiled, square

CLASSES = torch.tensor([1, 5, 0, 7])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), CLASSES


class Averages(nn.Module):
    """A step counter, a moving average, a buffer that is replaced, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("last", torch.zeros(4, 8))
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.lin(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        self.last = y.detach() * 0.5
        self.scratch[2:4] = x[0, 2:4] * 3
        return y * (self.count + 1) + self.average * self.scratch


# --- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_that_forward_changes_become_outputs_and_follow_eager_over_several_steps(ranks: int) -> None:
    program = assert_equal_to_eager(Averages(), batch(), F.cross_entropy, ranks=ranks, steps=4)
    assert set(program.ir.buffer_updates) == {"count", "average", "last", "scratch"}
    result = autopar.verify(program, Averages(), batch(), steps=3)
    assert {"buffer/count", "buffer/average", "buffer/last"} <= result.errors.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3}], ids=str)
def test_batch_norm_uses_the_statistics_of_the_whole_batch_and_updates_them(options: dict) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 8))
    program = assert_equal_to_eager(model, batch(), F.cross_entropy, ranks=4, steps=3)
    tracked = options.get("track_running_stats", True)
    assert bool(program.ir.buffer_updates) == tracked


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"affine": True}, {"momentum": 0.3}], ids=str)
def test_instance_norm_updates_its_statistics_by_the_mean_over_samples(options: dict) -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, track_running_stats=True, **options), nn.Flatten(), nn.Linear(20, 8)
    )
    program = assert_equal_to_eager(model, (torch.randn(4, 3, 6), CLASSES), F.cross_entropy, ranks=4, steps=3)
    assert {"1.running_mean", "1.running_var"} <= set(program.ir.buffer_updates)
    assert_equal_to_eager(model.eval(), (torch.randn(4, 3, 6), CLASSES), F.cross_entropy, steps=2)


def test_batch_norm_in_eval_mode_keeps_its_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 8)
    )
    model[1].running_mean.normal_()  # type: ignore[operator,union-attr]
    program = assert_equal_to_eager(model.eval(), (torch.randn(4, 3, 6, 6), CLASSES), F.cross_entropy, steps=3)
    assert not program.ir.buffer_updates
    assert not any(t.random for t in program.ir.templates.values())


def test_compiling_changes_no_buffer_of_the_model() -> None:
    model = Averages()
    compiled(model, batch(), F.cross_entropy)
    assert model.count.item() == 0
    assert torch.equal(model.average, torch.zeros(8))
    assert type(model.last) is Tensor


def test_dropout_is_off_in_eval_mode_and_on_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    on = assert_equal_to_eager(model, batch(), F.cross_entropy, ranks=4)
    off = assert_equal_to_eager(model.eval(), batch(), F.cross_entropy)
    assert [any(t.random for t in p.ir.templates.values()) for p in (on, off)] == [True, False]


@pytest.mark.few(1)
@pytest.mark.parametrize("draw", ["rand_like", "randn", "bernoulli", "gumbel", "alpha_dropout", "randint", "uniform_"])
def test_random_numbers_of_every_kind_do_not_depend_on_the_plan(draw: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.first(x)
        noise = {
            "rand_like": lambda: torch.rand_like(y),
            "randn": lambda: torch.randn(4, 8),
            "bernoulli": lambda: torch.bernoulli(torch.full_like(y, 0.3)),
            "gumbel": lambda: F.gumbel_softmax(y, tau=0.7),
            "alpha_dropout": lambda: F.alpha_dropout(y, 0.4, training=True),
            "randint": lambda: torch.randint(0, 5, (4, 8)).float(),
            "uniform_": lambda: torch.empty(4, 8).uniform_(-1, 1),
        }[draw]()
        return square(net.last(y * (1 + noise)))

    program = assert_equal_to_eager(Net(forward), (torch.randn(4, 8),), ranks=4, seeds=(0, 1))
    assert any(t.random for t in program.ir.templates.values())


# --- writing in place --------------------------------------------------------------------------------------------------


def test_ops_that_write_in_place_compute_the_same() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.first(x).relu_()
        h = net.last(h)
        h.add_(1.0).mul_(0.5)
        h = h * 2
        h[:, 0] = h[:, 1] * 2
        h[:, 2:4] += net.first(x)[:, :2]
        h[1] = 0.0
        h.clamp_(min=-3.0)
        return h

    assert_equal_to_eager(Net(forward), batch(), F.cross_entropy, ranks=4)


def test_a_buffer_filled_row_by_row_keeps_the_gradients_of_the_rows() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        out = torch.empty(4, 3, 8)
        h = x
        for t in range(3):
            h = torch.tanh(net.first(h))
            out[:, t] = h
        return net.last(out.sum(1))

    assert_equal_to_eager(Net(forward), batch(), F.cross_entropy)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layer", [nn.GRUCell(8, 8), nn.LSTMCell(8, 8), nn.RNNCell(8, 8)], ids=lambda m: type(m).__name__
)
def test_composite_layers_that_write_in_place_inside_keep_their_gradients(layer: nn.Module) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        state = net.cell(net.first(x))
        state = net.cell(x, state)
        return square(*state) if isinstance(state, tuple) else square(state)

    assert_equal_to_eager(Net(forward, cell=layer), (torch.randn(4, 8),))


def test_circular_padding_keeps_its_values_and_gradients() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    assert_equal_to_eager(Net(lambda net, x: square(net.c(net.c(x))), c=conv), (torch.randn(4, 4, 6, 6),), seeds=(0, 1))


# --- sharing -----------------------------------------------------------------------------------------------------------


def test_a_block_called_three_times_adds_up_its_gradients() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
            self.blocks = nn.ModuleList([block, block])
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(self.blocks[0](x))

    program = assert_equal_to_eager(Shared(), batch(), F.cross_entropy, ranks=4)
    assert len(program.ir.parameters) == 4


def test_a_parameter_used_in_two_places_of_one_block_adds_up() -> None:
    model = Net(lambda net, x: net.first(x) @ net.first.weight + net.last(x) * net.first.bias)
    assert_equal_to_eager(model, batch(), F.cross_entropy)


def test_plain_tensors_of_a_module_are_constants_of_the_program() -> None:
    model = Net(lambda net, x: net.last(net.first(x) * net.table + torch.arange(8)))
    model.table = torch.randn(8)
    program = assert_equal_to_eager(model, batch(), F.cross_entropy)
    assert program.run([batch()])[0].isfinite()


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal", "old weight_norm"])
def test_parametrized_weights_train_their_originals(name: str) -> None:
    lin = nn.Linear(8, 8)
    made = weight_norm(lin) if name == "old weight_norm" else getattr(parametrizations, name)(lin)
    model = nn.Sequential(made, nn.Tanh(), nn.Linear(8, 8))
    program = assert_equal_to_eager(model, batch(), F.cross_entropy, steps=3)
    assert not any(p == "0.weight" for p in program.ir.parameters)


def test_parameters_and_buffers_without_elements_are_there_and_nothing_of_them_is_trained() -> None:
    """A prompt of no tokens, joined to the sequence, and a sum over nothing."""

    def prompted(net: Net, x: Tensor) -> Tensor:
        h = torch.cat([net.prompt.expand(len(x), -1, -1), net.first(x), net.rest.expand(len(x), -1, -1)], 1)
        return net.last(h) + net.none.sum()

    model = Net(prompted)
    model.prompt = nn.Parameter(torch.empty(1, 0, 8))
    model.none = nn.Parameter(torch.empty(8, 0))
    model.register_buffer("rest", torch.empty(1, 0, 8))
    program = assert_equal_to_eager(model, (torch.randn(4, 3, 8),), square, seeds=(0, 1))
    assert "prompt" in program.ir.parameters
    assert "prompt" not in program.ir.trained
