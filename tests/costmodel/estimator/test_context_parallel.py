"""Context parallelism in torch: what torchtitan published of it (benchmarks/llama3_h100_202412_torchtitan.md, tables 2 and 6)."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from autopar.costmodel.estimator.layer import communication
from autopar.costmodel.estimator.rows import estimate_row, row_workload
from benchmarks.published_rows import Row

TOKENS = 32768
"""Tokens of a sequence on a rank."""
PUBLISHED = {"8B": (3890, 2540, 1071, 548), "405B": (76, 47, 31, 16)}
"""Tokens per second and GPU with 1, 2, 4 and 8 ranks along cp: Llama 3.1 8B on 8 H100 of 500 W, 405B on 512 with tp and pp 8."""
SIZES = {"8B": (32, 4096, 32, 14336, 8, 1), "405B": (126, 16384, 128, 53248, 512, 8)}


def row(model: str, cp: int) -> Row:
    """A row of the tables: float8, torch.compile, FSDP over what cp leaves of 8 ranks, everything recomputed."""
    layers, hidden, heads, ffn, gpus, stages = SIZES[model]
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 8,
        "ffn": ffn,
        "vocab": 128256,
        "gated_mlp": True,
    }
    parallel = {
        "dp": 8 // cp,
        "cp": cp,
        "tp": stages,
        "pp": stages,
        "sequence_parallel": stages > 1,
        "async_tp": stages > 1,
    }
    return {
        "model": {**shape, "family": "llama", "seq_len": TOKENS * cp, "dtype": "fp8"},
        "hardware": {"gpu": "H100-SXM-96GB-HBM2e-500W", "gpus": gpus, "intra_bw_GBps": 450, "inter_bw_GBps": 50},
        "parallel": {**parallel, "zero": 3, "torch_compile": True, "fsdp": "FSDP2 fully_shard"},
        "batch": {"global": stages * 8 // cp, "micro": 1},
        "recompute": "full",
        "schedule": "1f1b" if stages > 1 else "none",
    }


def test_rings_of_torch_take_what_was_published() -> None:
    errors = []
    for model, rates in PUBLISHED.items():
        for cp, rate in zip((1, 2, 4, 8), rates, strict=True):
            measured_s = row(model, cp)["batch"]["global"] * TOKENS * cp / row(model, cp)["hardware"]["gpus"] / rate
            errors.append(estimate_row(row(model, cp)).step_time_s / measured_s - 1)
    assert statistics.median(map(abs, errors)) < 0.08
    assert max(map(abs, errors)) < 0.2


def test_torch_repeats_keys_for_all_heads_before_they_travel() -> None:
    torchs = row_workload(row("8B", 4))
    own = replace(torchs, software=replace(torchs.software, attention="own"))
    (forward, backward), (less, least) = (communication(w, False) for w in (torchs, own))
    sent, gathered = (sum(s for purpose, s in messages.items() if purpose.what == "cp") for messages in (forward, less))
    assert sent == pytest.approx(4 * gathered, rel=0.05)
    assert sum(backward.values()) == pytest.approx(3 * sent)
    assert sum(least.values()) == pytest.approx(2 * gathered)
    assert all(torchs.software.exposed_share(purpose.overlap) == 1.0 for purpose in forward)
