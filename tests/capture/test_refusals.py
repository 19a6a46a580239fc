"""Models that cannot be captured fail with the user's source line and the usual fix, never with a wrong program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from tests.capture.equal import SGD, Net, compiled

X, IDS = torch.randn(4, 8), torch.randint(0, 8, (4, 6))


def _branch(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.sum() > 0:  # here
        return net.last(h)
    return h


def _tolist(net: Net, x: Tensor) -> Tensor:
    sizes = (x.sum(-1) > 0).sum(dim=-1, keepdim=True).tolist()  # here
    return net.first(x)[: sizes[0]]


def _item(net: Net, x: Tensor) -> Tensor:
    count = int((x > 0).sum().item())  # here
    return net.first(x)[:, :count]


def _nonzero(net: Net, x: Tensor) -> Tensor:
    rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
    return net.first(x) * rows.tolist()[0]  # here


def _unique(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * torch.unique(x.round()).numel()  # here


def _loop(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    while h.norm() > 1:  # here
        h = h / 2
    return h


class Router(nn.Module):
    """Mixture of experts in the style of a hand-written loop: every expert that was chosen takes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i in choice.unique().tolist():  # here
            rows = torch.where(choice == i)[0]
            out = out.index_add(0, rows, self.experts[i](x[rows]))
        return out


def marked_line(source: Any) -> int:
    lines, first = inspect.getsourcelines(source)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


def refusal(model: nn.Module, batch: tuple[Tensor, ...] = (X,), branches: str = "guard") -> str:
    options = autopar.Options(branches=branches)
    with pytest.raises(autopar.CaptureError) as caught:
        autopar.compile(
            model, autopar.ClusterSpec.local(2), batch, loss_fn=lambda out: out.sum(), optimizer=SGD, options=options
        )
    return str(caught.value)


@pytest.mark.parametrize("forward", [_branch, _tolist, _item, _unique, _loop])
def test_data_dependent_control_flow_and_shapes_name_the_line_and_the_fix(forward: Callable[..., Tensor]) -> None:
    message = refusal(Net(forward), branches="refuse")
    assert re.search(rf"test_refusals\.py:{marked_line(forward)} in {forward.__name__}", message), message
    assert "depends on the data" in message
    assert "torch.where instead of if" in message


def test_values_of_selected_rows_name_the_line() -> None:
    message = refusal(Net(_nonzero))
    assert f"test_refusals.py:{marked_line(_nonzero)} in _nonzero" in message
    assert "asks the values of the rows that a mask selects" in message


def test_data_dependent_expert_routing_names_the_line_and_the_static_form() -> None:
    message = refusal(Router())
    assert f"test_refusals.py:{marked_line(Router)} in forward" in message
    assert "@autopar.forward_of(TheModule)" in message


def test_data_dependence_inside_a_layer_of_torch_names_the_line_of_that_layer() -> None:
    message = refusal(nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8, momentum=None)), branches="refuse")
    assert "batchnorm.py" in message
    assert "depends on the data" in message


def test_a_refusal_prints_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    refusal(Net(_branch), branches="refuse")
    assert capfd.readouterr().err == ""


def test_numpy_inside_forward_is_refused_with_the_line() -> None:
    model = Net(lambda net, x: net.first(x) * torch.from_numpy(np.sign(x.numpy())))
    assert re.search(r"test_refusals\.py:\d+ .* leaves torch for numpy", refusal(model))


@pytest.mark.parametrize("layer", [nn.Embedding(8, 8, max_norm=1.0), nn.EmbeddingBag(8, 8, max_norm=1.0)])
def test_an_embedding_that_renormalizes_its_weight_is_refused_with_the_line_and_what_to_write(layer: nn.Module) -> None:
    def look_up(net: Net, ids: Tensor) -> Tensor:
        return net.e(ids)  # here

    message = refusal(Net(look_up, e=layer), (IDS,))
    assert "writes to the parameter e.weight in place, as max_norm" in message
    assert f"test_refusals.py:{marked_line(look_up)} in look_up" in message
    assert "leave max_norm out" in message


def test_what_the_refusal_of_max_norm_says_to_write_has_rows_of_that_norm() -> None:
    def look_up(net: Net, ids: Tensor) -> Tensor:
        w, max_norm = net.e.weight, 1.0
        scale = (max_norm / (w.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1).detach()
        return F.embedding(ids, w * scale)

    net = Net(look_up, e=nn.Embedding(8, 8))
    expected = nn.Embedding(8, 8, max_norm=1.0, _weight=net.e.weight.detach().clone())
    assert torch.allclose(net(IDS), expected(IDS), rtol=0, atol=1e-6)
    compiled(net, (IDS,), lambda out: out.sum())


def test_an_istft_is_refused_with_its_name_and_what_to_write() -> None:
    def there_and_back(net: Net, x: Tensor) -> Tensor:
        window = torch.hann_window(16)
        spectrum = torch.stft(net.first(x).reshape(1, -1), 16, window=window, return_complex=True)
        return torch.istft(spectrum, 16, window=window)

    message = refusal(Net(there_and_back), (torch.randn(8, 8),))
    assert "torch.istft at" in message
    assert "torch.fft.irfft" in message


def test_what_the_refusal_of_istft_says_to_write_computes_the_same() -> None:
    n, hop, window = 16, 4, torch.hann_window(16, dtype=torch.float64)
    x = torch.stft(torch.randn(2, 64, dtype=torch.float64), n, window=window, return_complex=True)
    length = n + hop * (x.shape[-1] - 1)
    frames = torch.fft.irfft(x, n, dim=-2) * window[:, None]
    squares = (window**2)[:, None].expand(frames.shape)
    sums = [F.fold(one, (1, length), (1, n), stride=(1, hop)).flatten(1) for one in (frames, squares)]
    cut = slice(n // 2, -(n // 2))
    assert torch.allclose(sums[0][:, cut] / sums[1][:, cut], torch.istft(x, n, window=window), rtol=1e-12, atol=1e-12)


def test_a_reentrant_checkpoint_that_no_gradient_passes_is_refused_with_its_line() -> None:
    def checkpointed(net: Net, x: Tensor) -> Tensor:
        return checkpoint(net.first, x, use_reentrant=True)  # here

    message = refusal(Net(checkpointed))
    assert f"test_refusals.py:{marked_line(checkpointed)} in checkpointed" in message
    assert "use_reentrant=False" in message


def test_a_module_that_is_cast_in_forward_is_refused_unless_it_has_that_dtype() -> None:
    compiled(Net(lambda net, x: net.last.to(torch.float32)(net.first(x))), (X,), lambda out: out.sum())
    message = refusal(Net(lambda net, x: net.last.to(torch.float64)(net.first(x).double())))
    assert "casts the parameters of a module to torch.float64" in message
    assert "test_refusals.py" in message


def test_writing_to_an_input_is_refused_by_name() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y += 1
            return self.lin(x * y)

    with pytest.raises(autopar.CaptureError, match=r"writes to its input y in place at .*`y \+= 1`.*clone"):
        compiled(Shift(), {"x": X, "y": torch.randn(4, 8)}, lambda out: out.sum())


def test_packed_sequences_are_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    batch = {"x": torch.randn(4, 6, 8), "lengths": torch.tensor([6, 3, 2, 5])}
    with pytest.raises(autopar.CaptureError, match=r"packs sequences \(pack_padded_sequence\), .* at .*padded batch"):
        compiled(Packed(), batch, lambda out: out.sum())


def test_writing_to_an_input_in_a_helper_names_the_line_of_the_helper() -> None:
    def hide(x: Tensor) -> None:
        x[:, 1:].masked_fill_(x[:, 1:] < 0, 0)  # here

    def shifted(net: Net, x: Tensor) -> Tensor:
        hide(x)
        return net.first(x)

    assert f"test_refusals.py:{marked_line(hide)} in hide" in refusal(Net(shifted))


def test_random_numbers_that_would_differ_between_ranks_are_refused_by_name() -> None:
    message = refusal(Net(lambda net, x: net.first(x)[torch.randperm(4)]))
    assert "aten.randperm" in message
    assert "differ from rank to rank" in message


def test_statistics_that_an_op_keeps_for_its_own_backward_are_refused_where_they_are_read() -> None:
    def normed(net: Net, x: Tensor) -> Tensor:
        y, mean, _ = torch.native_layer_norm(net.first(x), (net.first.out_features,), None, None, 1e-5)
        return y + mean

    message = refusal(Net(normed))
    assert "native_layer_norm" in message
    assert "its result 1 is for its own backward" in message


def test_an_error_of_the_model_itself_keeps_its_words_and_its_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.first(x) @ net.first(x)  # here

    message = refusal(Net(forward))
    assert f"test_refusals.py:{marked_line(forward)}" in message


def test_the_model_is_as_before_after_a_refusal() -> None:
    model = Net(_branch)
    before = dict(model.named_parameters())
    refusal(model, branches="refuse")
    assert all(p is before[name] for name, p in model.named_parameters())
    assert F.linear(X, model.first.weight).shape == (4, 8)


def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat((self.cache, x.detach()))
            return self.lin(x)

    assert "replaces the buffer cache of shape (0, 8)" in refusal(Growing())


def test_what_no_program_has_is_refused_after_a_write_too() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.rows = nn.Embedding(4, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.norm(x)) + self.rows(torch.arange(4)).sum(0)

    assert "sparse=True" in refusal(Sparse())
