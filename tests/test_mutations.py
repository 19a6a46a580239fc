"""Seeded faults: each breaks the compiler in one place, and an oracle that shares no code with that place must notice.

An oracle is eager PyTorch, torch's own FLOP counter, a closed form, or the bytes that a running program holds. Every
oracle passes on the compiler as it is, and fails on each fault that is its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.capture.graph import position_masks
from autopar.capture.templates import canonical
from autopar.codegen import stage
from autopar.codegen.stage import rows
from autopar.costmodel import collective, compute
from autopar.ir.mesh import Mesh
from autopar.ops import registry
from autopar.passes.batch.divided import _Divide
from autopar.passes.memory import tape
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from tests.measure import measure_peak

Patch = pytest.MonkeyPatch
SGD = functools.partial(torch.optim.SGD, lr=0.1)
VOCAB, TOKENS = 512, 64


class Attending(nn.Module):
    """(batch, seq, 16) -> the same: a block with attention, and a penalty on its weights in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y) + 0.1 * self.first.weight.pow(2).sum()


class Speaking(nn.Module):
    """Logits of a large vocabulary are most of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)), ids)


class Later(nn.Module):
    """(batch, 8 positions, 16) -> the loss of the last 4 positions, which read all up to their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        allowed = torch.arange(8)[None, :] <= torch.arange(4, 8)[:, None]
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(x[:, 4:]), k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).square().mean()


def of(model: nn.Module, batch: Any, loss: Any = None, ranks: int = 2, **options: Any) -> autopar.Program:
    return autopar.compile(
        model, autopar.ClusterSpec.local(ranks), batch, loss_fn=loss, optimizer=SGD, options=autopar.Options(**options)
    )


# --- oracles ----------------------------------------------------------------------------------------------------------


def equals_eager() -> None:
    """A data-parallel model with a mean loss, in microbatches, against eager PyTorch."""
    model, batch = Penalized(), (torch.randn(8, 8), torch.randn(8, 8))
    assert autopar.verify(of(model, batch, strategy="dp", microbatches=2), model, batch).ok


def flops_are_torchs() -> None:
    """Work of all ops of a training step against torch's FLOP counter on the eager model, which leaves fused attention out:
    2 products of 2·b·h·s²·d each forward, 5 backward (Dao 2022, algorithm 4)."""
    model, x = Attending(), torch.randn(4, 32, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x.detach()).square().mean().backward()
    program = of(model, (x.detach(), torch.zeros(4, 32, 16)), F.mse_loss, ranks=1)
    rules = RuleBook()
    ours = 0.0
    for call in program.ir.calls:
        for op in program.ir.template_of(call).op_calls.values():
            definition = registry.find(op.op)
            if definition is not None and definition.work is not None:
                ours += definition.work(op, rules.rule(op))[0]
    attention = 7 * 2 * 4 * 2 * 32**2 * 8
    assert ours == pytest.approx(counter.get_total_flops() + attention, rel=0.01)


def a_large_product_takes_its_flops_at_peak() -> None:
    """8192³ on one A100: 2n³ / 312 TFLOP/s at best, and not half as fast."""
    device = autopar.ClusterSpec.homogeneous(devices=1, device="a100").device(0)
    n = 8192
    seconds = compute.op_time_s(
        device, flops=2.0 * n**3, nbytes=3.0 * 2 * n * n, dtype="bfloat16", kind="matmul", shape=(n, n, n)
    )
    best_s = 2 * n**3 / 312e12
    assert best_s <= seconds <= 2 * best_s


def an_all_reduce_takes_what_a_ring_takes() -> None:
    """An all-reduce of 1 GB over 8 devices with 100 GB/s each way sends 2 · 7/8 of the bytes."""
    cluster = autopar.ClusterSpec.homogeneous(
        devices=8,
        device="a100",
        devices_per_node=8,
        intra_bandwidth_Bps=100e9,
        intra_latency_s=0.0,
        intra_efficiency=1.0,
    )
    pricer = Pricer(cluster, Mesh.of(dp=8))
    assert pricer.collective_s("all_reduce", 1e9, "dp") == pytest.approx(2 * 7 / 8 * 1e9 / 100e9, rel=0.05)


def peak_bytes_are_those_held() -> None:
    """The predicted peak against storages counted while the program runs."""
    ids = torch.randint(0, VOCAB, (TOKENS,))
    program = of(Speaking(), (ids,), ranks=1)
    (measured,) = measure_peak(program, (ids,))
    assert 0.98 * measured - 256 <= program.predicted.peak_bytes <= 1.05 * measured + 256


def attention_to_earlier_keys_equals_eager() -> None:
    model, x = Later(), torch.randn(4, 8, 16)
    assert autopar.verify(of(model, (x,)), model, (x,)).ok


# --- faults -----------------------------------------------------------------------------------------------------------


def dropped_all_reduce(patch: Patch) -> None:
    """A fault that drops the all-reduce of the gradients of replicated parameters."""
    patch.setattr(stage, "rows", lambda steps: rows(tuple(s for s in steps if s.kind != "all_reduce")))


def wrong_divisor_of_a_mean(patch: Patch) -> None:
    patch.setattr(canonical, "math", types.SimpleNamespace(prod=lambda sizes: math.prod(sizes) + 1))
    lifted = autopar.ops.dialect.LIFT[torch.ops.aten.mse_loss.default]
    patch.setitem(autopar.ops.dialect.LIFT, torch.ops.aten.mse_loss.default, lambda *a, **k: lifted(*a, **k) * 1.01)


def wrong_share_of_a_microbatch(patch: Patch) -> None:
    real = _Divide._share

    def share(self: _Divide, node: Any, phase: str) -> Any:
        new = real(self, node, phase)
        new.args = (new.args[0], self.parts + 1)
        return new

    patch.setattr(_Divide, "_share", share)


def halved_collectives(patch: Patch) -> None:
    real = collective.one_level_s
    patch.setattr(collective, "one_level_s", lambda *a: tuple(x / 2 for x in real(*a)))


def a_tenth_of_the_flops(patch: Patch) -> None:
    real = compute.op_time_s
    patch.setattr(compute, "op_time_s", lambda device, *, flops, **k: real(device, flops=flops / 10, **k))


def a_quarter_of_attention(patch: Patch) -> None:
    for name in ("autopar.attention", "autopar.attention_grad"):
        definition = registry.OPS[name]
        work = definition.work
        assert work is not None

        def less(call: Any, rule: Any, work: Callable[..., Any] = work) -> Any:
            flops, kind, groups = work(call, rule)
            return flops / 4, kind, groups

        patch.setitem(registry.OPS, name, dataclasses.replace(definition, work=less))
    registry.find.cache_clear()


def dropped_logits(patch: Patch) -> None:
    real = tape.Machine.new
    logits = VOCAB * TOKENS * 4
    patch.setattr(tape.Machine, "new", lambda self, nbytes: real(self, 0 if nbytes == logits else nbytes))


def a_flag_for_a_triangle_at_the_end(patch: Patch) -> None:
    """The flag is for as many keys as queries."""

    def flagged(self: position_masks.Allowed, keys: int) -> bool:
        return torch.equal(self.end, torch.arange(keys - len(self.end) + 1, keys + 1))

    patch.setattr(position_masks.Allowed, "is_causal", flagged)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (dropped_all_reduce, equals_eager),
    (wrong_divisor_of_a_mean, equals_eager),
    (wrong_share_of_a_microbatch, equals_eager),
    (halved_collectives, an_all_reduce_takes_what_a_ring_takes),
    (a_tenth_of_the_flops, a_large_product_takes_its_flops_at_peak),
    (a_quarter_of_attention, flops_are_torchs),
    (dropped_logits, peak_bytes_are_those_held),
    (a_flag_for_a_triangle_at_the_end, attention_to_earlier_keys_equals_eager),
]


@pytest.mark.parametrize("oracle", list(dict.fromkeys(o for _, o in FAULTS)), ids=lambda o: o.__name__)
def test_the_oracle_passes(oracle: Callable[[], None]) -> None:
    oracle()


@pytest.mark.parametrize(("fault", "oracle"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_the_fault_is_noticed(fault: Callable[[Patch], None], oracle: Callable[[], None], monkeypatch: Patch) -> None:
    registry.find.cache_clear()
    fault(monkeypatch)
    try:
        with pytest.raises((AssertionError, autopar.AutoparError)):
            oracle()
    finally:
        monkeypatch.undo()
        registry.find.cache_clear()
