"""A head's product and its loss in chunks: the same step, without the logits of all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.graph import head_losses
from autopar.ops.dialect import LIFT
from autopar.ops.head_loss import head_loss
from autopar.runtime.comm.devices import Device
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.kernels import losses
from autopar.runtime.kernels.losses import chunk_rows
from benchmarks.models import Llama, LlamaShape
from tests.measure import measure_peak
from tests.ops.gradients import f

BATCH, SEQ, WIDTH, VOCABULARY = 8, 12, 16, 64
WEIGHT = torch.rand(VOCABULARY) + 0.5
OP = "autopar.linear_cross_entropy"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 rows: a rank has several, the last one not full."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", 8)


class Head(nn.Module):
    """Tokens to logits; the table is the head's, by the function `logits`."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.norm(self.embed(tokens)), self.embed.weight)


def _of_flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return _of_flat(logits[:, :-1].contiguous().float(), labels[:, 1:])


def _classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _of_flat,
    "sum": functools.partial(_of_flat, reduction="sum"),
    "smoothed": functools.partial(_of_flat, label_smoothing=0.1),
    "weighted": functools.partial(_of_flat, weight=WEIGHT),
    "next token": _next_token,
    "classes second": _classes_second,
    "twice": lambda logits, labels: 2 * _of_flat(logits, labels),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return tokens, labels


def model(logits: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Head:
    torch.manual_seed(0)
    return Head(logits)


def compiled(
    loss: Callable[[Tensor, Tensor], Tensor] = _of_flat, net: nn.Module | None = None, ranks: int = 4, **options: Any
) -> autopar.ParallelProgram:
    return autopar.compile(
        net or model(),
        autopar.ClusterSpec.local(ranks),
        batch(),
        loss_fn=loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        options=autopar.Options(**options),
    )


def is_joined(program: autopar.ParallelProgram) -> bool:
    return any(c.op.startswith(OP) for t in program.ir.templates.values() for c in t.op_calls.values())


def assert_eagers(program: autopar.ParallelProgram, net: nn.Module | None = None) -> None:
    assert is_joined(program)
    assert autopar.verify(program, net or model(), batch()).max_error <= 1e-9


# --- the function


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunks_give_eagers_sum_and_gradients(smoothing: float) -> None:
    x, w, labels, scale = f(5, 7, 4), f(9, 4), torch.randint(0, 9, (5, 7)), torch.rand(5, 7, dtype=torch.float64)
    scale[0, :3] = 0

    def rows(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w).flatten(0, 1)
        return (
            F.cross_entropy(z, labels.flatten(), reduction="none", label_smoothing=smoothing) * scale.flatten()
        ).sum()

    loss, dx, dw = losses.linear_cross_entropy(x.detach(), w.detach(), labels, scale, smoothing, smoothing / 9)
    expected = rows(x, w)
    for one, other in zip((loss, dx, dw), (expected, *torch.autograd.grad(expected, (x, w))), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_in_bf16_gradients_are_rounded_no_more_than_eagers() -> None:
    """Gradients are rounded so also where the softmax of the label is nearly one."""
    torch.manual_seed(0)
    x, w, labels = torch.randn(64, 32), torch.randn(128, 32), torch.randint(0, 128, (64,))
    x = x + 0.3 * w[labels]
    low = [t.bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in low]
    eager = torch.autograd.grad(F.cross_entropy(F.linear(*low).float(), labels, reduction="sum"), low)
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels, reduction="sum"), exact)
    ours = losses.linear_cross_entropy(low[0].detach(), low[1].detach(), labels, torch.ones(64), 0.0, 0.0)[1:]
    for one, other, true in zip(ours, eager, truth, strict=True):
        assert (one.double() - true).norm() <= 1.1 * (other.double() - true).norm()


# --- programs


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_on_four_ranks_a_step_is_eagers(name: str) -> None:
    assert_eagers(compiled(LOSSES[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("form", [lambda x, w: x @ w.T, lambda x, w: x @ w.t(), lambda x, w: x @ w.transpose(0, 1)])
def test_a_product_with_the_transposed_table_is_a_head(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_eagers(compiled(net=model(form)), model(form))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mean", "smoothed", "weighted", "next token"])
def test_a_vocabulary_in_blocks_exchanges_two_rows_a_chunk_and_no_logits(name: str) -> None:
    program = compiled(LOSSES[name], strategy="megatron", mesh={"dp": 1, "tp": 4})
    assert_eagers(program)
    (line,) = (t for t in program.source(0).splitlines() if "losses.linear_cross_entropy" in t)
    assert "along=rt.along('tp')" in line
    assert max(c.nbytes for c in program.account.collectives) <= BATCH * SEQ * WIDTH * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", ["mean", "smoothed"])
def test_a_vocabulary_that_does_not_divide_is_in_blocks_of_unequal_size(name: str, dp: int) -> None:
    program = compiled(LOSSES[name], ranks=3 * dp, strategy="megatron", mesh={"dp": dp, "tp": Shares((22, 21, 21))})
    (stage,) = program.plan.stages
    assert "tp" in stage.parameters["embed.weight"].storage.axes
    assert_eagers(program)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_eagers(seed: int) -> None:
    program = compiled(LOSSES["smoothed" if seed % 2 else "weighted"])
    assert_eagers(program.with_plan(autopar.random_plan(program, seed)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{"microbatches": 4, "pp": 2, "schedule": "zb-h1"}, {"microbatches": 2}, {"recompute": "full"}]
)
def test_in_microbatches_and_stages_a_step_is_eagers(options: dict[str, Any]) -> None:
    assert_eagers(compiled(LOSSES["next token"], **options))


def test_the_price_has_a_message_for_maxima_and_one_for_sums_of_every_chunk() -> None:
    program = compiled(strategy="megatron", mesh={"dp": 1, "tp": 4})
    sent = [(c.nbytes, c.times) for c in program.account.collectives if "linear_cross_entropy" in c.what]
    rows = BATCH * SEQ
    assert sent == [(8 * 4, rows // 8), (2 * 8 * 4, rows // 8)]


def test_the_peak_is_as_promised_and_has_no_logits() -> None:
    program = compiled(ranks=1)
    for peak, promised in zip(measure_peak(program, batch()), [program.predicted.peak_bytes], strict=True):
        assert promised * 0.95 <= peak <= promised * 1.02


# --- what stays two ops


APART: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows, not their sum": lambda logits, labels: _of_flat(logits, labels, reduction="none").square().mean(),
    "logits read twice": lambda logits, labels: _of_flat(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean(),
    "weighted and smoothed": lambda logits, labels: _of_flat(logits, labels, weight=WEIGHT, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", APART)
def test_what_needs_the_logits_otherwise_keeps_two_ops(name: str) -> None:
    program = compiled(APART[name])
    assert not is_joined(program)
    assert autopar.verify(program, model(), batch()).max_error <= 1e-9


def test_a_head_that_is_not_trained_or_has_a_bias_keeps_two_ops() -> None:
    frozen = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    frozen[1].requires_grad_(False)
    biased = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    for net in (frozen, biased):
        program = compiled(net=net)
        assert not is_joined(program)
        assert autopar.verify(program, net, batch()).max_error <= 1e-9


def test_in_float16_sums_over_tokens_would_overflow() -> None:
    assert is_joined(compiled(precision="bf16"))
    assert not is_joined(compiled(precision="fp16"))


def test_few_rows_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", BATCH * SEQ)
    assert not is_joined(compiled())


def test_where_no_target_counts_gradients_are_zero() -> None:
    x, w, none = f(4, 6, 8), f(32, 8), torch.full((4, 6), -100)
    loss = LIFT[head_loss](x, w, none, None, 1, -100, 0.0, x.dtype)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, w)):
        assert not gradient.any()


def test_on_a_gpu_chunks_are_larger_and_one_op_is_predicted_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of logits that one op saves must not be lost on reading and writing dw."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1024)
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device="h100")

    def program() -> autopar.Program:
        with torch.device("meta"):
            llama = Llama(LlamaShape.of_width(2, 1024), 1024).to(torch.bfloat16)
            ids = torch.zeros(8, 1024, dtype=torch.long)
        return autopar.compile(llama, cluster, (ids, ids))

    joined = program()
    assert is_joined(joined)
    monkeypatch.setattr(head_losses, "_pays", lambda logits, x: False)
    apart = program()
    assert not is_joined(apart)
    assert joined.predicted.step_time_s <= 1.01 * apart.predicted.step_time_s
    assert joined.predicted.peak_bytes < apart.predicted.peak_bytes
    assert chunk_rows(1024, Device("cuda", (9, 0))) == 4 * chunk_rows(1024)
