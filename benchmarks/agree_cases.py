"""The cases of `benchmarks.agree`: transformers on clusters under layouts, those that are to be refused among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import emitted_on
from benchmarks.published_rows import read_rows

LLAMA = TransformerShape(4, 4096, 32, 14336, 128256, 4096, kv_heads=8, gated_mlp=True, name="llama")
GPT = TransformerShape(6, 1600, 25, 6400, 50304, 1024, name="gpt")
WIDE_GPT = replace(GPT, layers=4, hidden=4096, heads=32, ffn=16384, tied_embeddings=True, name="wide gpt")
OLD_GPT = replace(WIDE_GPT, attention="materialised", name="old gpt")
MIXTURE = replace(LLAMA, hidden=2048, heads=16, ffn=4096, vocab=32000, experts=8, topk=2, name="mixture")
DEEPSEEK = replace(
    MIXTURE, heads=16, kv_heads=16, ffn=8192, moe_ffn=1408, experts=16, topk=4, shared_experts=2, first_dense_layers=1,
    mla=(512, 256, 96, 32, 128), name="deepseek",
)  # fmt: skip
DEEP = replace(LLAMA, layers=32, vocab=32000, name="deep llama")
SHAPES = (LLAMA, GPT, WIDE_GPT, OLD_GPT, MIXTURE, DEEPSEEK, DEEP)


def case(
    model: TransformerShape,
    cluster: ClusterSpec | int,
    microbatches: float = 1,
    micro_batch: int = 1,
    recompute: str = "none",
    schedule: str = "1f1b",
    precision: str = "bf16",
    **sizes: Any,
) -> Workload:
    """A layout of a model on a cluster, or on so many H100, with the software of emitted programs. sizes: of `ParallelConfig`."""
    if isinstance(cluster, int):
        cluster = ClusterSpec.homogeneous(devices=cluster, device="h100", devices_per_node=_per_node(cluster))
    parallel = ParallelConfig(**{"sequence_parallel": sizes.get("tp", 1) > 1, **sizes})
    plan = StepPlan(parallel, micro_batch, recompute, schedule)
    software = replace(emitted_on(cluster), precision=precision)
    return Workload.of(model, cluster, plan, int(microbatches * micro_batch * parallel.dp), software)


def _per_node(devices: int) -> int:
    return max(n for n in range(1, 9) if devices % n == 0)


def rows(w: Workload, batch: int) -> Workload:
    """The case with another batch."""
    return replace(w, batch=batch)


SMALL = replace(LLAMA, layers=2, vocab=32000)
SMALL_MIXTURE = replace(MIXTURE, layers=2)
SMALL_GPT = replace(GPT, layers=2)


def refusable() -> Iterator[Workload]:
    """Layouts of which one size at a time cannot be cut as it would have to be."""
    for model in (
        replace(SMALL, heads=3, kv_heads=3, head_dim=128),
        replace(SMALL, kv_heads=2),
        replace(SMALL, seq_len=1026),
    ):
        yield case(model, 4, tp=4)
        yield case(model, 8, dp=2, tp=4, zero=3)
    yield case(SMALL_GPT, 7, tp=7)
    yield case(replace(SMALL, seq_len=1025), 2, cp=2)
    yield case(replace(SMALL_MIXTURE, experts=6), 4, dp=4, ep=4)
    yield rows(case(SMALL_MIXTURE, 8, dp=8, ep=4, micro_batch=2), 12)
    yield rows(case(SMALL_MIXTURE, 8, dp=8, ep=4, micro_batch=2), 9)
    yield case(SMALL, 4, dp=4, microbatches=1.5)
    yield case(SMALL, 4, dp=4, microbatches=0.5)
    yield case(SMALL, 8, dp=3, tp=2)
    for chunks in (1, 2):
        for pp in (2, 4, 5):
            yield case(SMALL, pp, pp=pp, vpp=chunks, microbatches=2 * pp)
    yield case(SMALL, 4, dp=4, ep=2)


def unequal() -> Iterator[Workload]:
    """Layouts in which some ranks hold more than others: of the batch, heads, features, a vocabulary, or experts."""
    for dp, batch, micro_batch, zero in ((3, 4, 2, 0), (5, 17, 4, 3), (5, 34, 4, 2), (7, 60, 9, 1), (4, 12, 2, 1)):
        for model in (SMALL, SMALL_GPT, SMALL_MIXTURE):
            yield rows(case(model, dp, micro_batch=micro_batch, dp=dp, zero=zero), batch)
    yield rows(case(SMALL, 6, micro_batch=2, dp=3, cp=2, zero=1), 5)
    yield rows(case(replace(SMALL, layers=4), 6, micro_batch=2, dp=3, pp=2), 20)
    yield rows(case(SMALL, 6, micro_batch=2, dp=3, tp=2, zero=3), 4)
    for model in (
        replace(SMALL, heads=6, kv_heads=6, head_dim=128),
        replace(SMALL, heads=12, kv_heads=6, head_dim=128),
        replace(SMALL, vocab=32001),
        replace(SMALL, ffn=14338),
        SMALL_GPT,
        replace(SMALL_GPT, vocab=50257),
        replace(SMALL_MIXTURE, experts=7),
        replace(SMALL_MIXTURE, experts=6, ffn=4098),
    ):
        yield case(model, 4, tp=4)
        yield case(model, 8, 2, dp=2, tp=4, zero=1)
        yield case(model, 8, dp=2, tp=4, zero=3)
    yield case(replace(SMALL_MIXTURE, ffn=1026), 8, dp=2, ep=2, tp=4)
    for tp in (2, 8):
        yield case(replace(SMALL_GPT, vocab=50257), tp, 2, tp=tp)
        yield case(replace(SMALL_GPT, vocab=50257), 2 * tp, 2, 2, "selective", dp=2, tp=tp)
    yield case(replace(SMALL_GPT, vocab=50257), 7, tp=7, sequence_parallel=False)
    yield case(replace(SMALL_GPT, layers=4), 8, 4, recompute="full", tp=4, pp=2)


def of_every_kind() -> Iterator[Workload]:
    """Every kind of layout once or more, of few layers."""
    for zero, microbatches in product(range(4), (1, 2, 4)):
        yield case(LLAMA, 4, microbatches, dp=4, zero=zero)
    for model in (GPT, MIXTURE):
        yield from (case(model, 3, 2, 2, dp=3, zero=zero) for zero in (1, 2, 3))
    for model in SHAPES[:-1]:
        for recompute in ("none", "selective", "full"):
            yield case(model, 1, recompute=recompute)
            yield case(model, 2, 3, 2, recompute, dp=2, zero=1)
        for tp in (2, 4, 5):
            yield case(model, tp, 2, tp=tp)
            yield case(model, 2 * tp, 2, 2, dp=2, tp=tp, zero=1)
        yield case(model, 2, 2, cp=2)
        yield case(model, 16, 2, dp=4, cp=2, tp=2, zero=3)
    for model in (MIXTURE, DEEPSEEK):
        for ep, tp, zero in ((2, 1, 0), (4, 1, 1), (4, 2, 1), (8, 1, 3)):
            yield case(model, 8 * tp, 2, dp=8, ep=ep, tp=tp, zero=zero)
    yield case(LLAMA, 1, precision="float32")
    yield case(GPT, 4, 2, precision="float32", dp=2, tp=2)


def in_stages() -> Iterator[Workload]:
    """Pipelines of enough layers to be cut evenly."""
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        yield case(DEEP, 4, 8, schedule=schedule, pp=4)
    yield case(DEEP, 4, 8, pp=4, vpp=2)
    for zero, recompute in ((1, "none"), (2, "full"), (3, "selective")):
        yield case(DEEP, 16, 8, recompute=recompute, dp=2, tp=2, pp=4, zero=zero)
    yield case(replace(DEEP, layers=30), 8, 16, pp=8)


def of_presets() -> Iterator[Workload]:
    """Whole models on nodes: what fits and what does not, and what the estimator's tests ask."""
    whole = replace(LLAMA, layers=32, seq_len=8192, name="llama 8b")
    node = ClusterSpec.preset("dgx-h100")
    for recompute in ("none", "full"):
        for dp, tp, cp, zero in ((8, 1, 1, 1), (8, 1, 1, 3), (2, 4, 1, 0), (4, 1, 2, 1)):
            yield case(whole, node, 2, recompute=recompute, dp=dp, tp=tp, cp=cp, zero=zero)
    yield case(
        replace(whole, seq_len=4096, experts=8, topk=2), ClusterSpec.preset("dgx-h100", nodes=2), dp=16, ep=8, zero=1
    )
    big = replace(whole, layers=80, hidden=8192, heads=64, ffn=28672, seq_len=4096, name="llama 70b")
    four = ClusterSpec.preset("dgx-a100", nodes=4)
    for tp, pp, zero in ((8, 4, 0), (8, 2, 1), (4, 4, 1), (8, 1, 3), (1, 1, 3)):
        for recompute in ("none", "full"):
            yield case(big, four, 4, recompute=recompute, dp=32 // tp // pp, tp=tp, pp=pp, zero=zero)
    yield case(big, 24, 4, dp=24, zero=3, recompute="full")
    yield case(big, 56, 2, dp=56, zero=3, recompute="full")
    two_kinds = {"nodes": [{"count": 1, "device": d, "devices_per_node": 8} for d in ("h100", "a100")]}
    yield case(whole, ClusterSpec.from_dict(two_kinds), dp=16, zero=3)


CASES = {"refused": refusable, "unequal": unequal, "kinds": of_every_kind, "stages": in_stages, "presets": of_presets}


def published(path: str) -> Iterator[Workload]:
    """The layouts of published rows, each once, as emitted programs would run them."""
    seen = set()
    for row in read_rows(path):
        w = row_workload(row)
        w = replace(w, software=replace(emitted_on(w.cluster), precision=w.precision))
        if w.parallel.tp > 1:
            w = w.at(replace(w.plan, parallel=replace(w.parallel, sequence_parallel=True)))
        key = (w.model, w.cluster, w.plan, w.batch, w.precision)
        if key not in seen:
            seen.add(key)
            yield w
