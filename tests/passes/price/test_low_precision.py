"""Steps in 8 bits are priced of programs that are compiled in 16: products with weights and what they read, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import Software
from benchmarks.published_compiled import forced_options, predicted_s
from benchmarks.published_models import Transformer

WIDE = TransformerShape(2, 4096, 32, 14336, 32768, 4096, kv_heads=8, gated_mlp=True)
MIXTURE = replace(WIDE, hidden=2048, experts=16, topk=4, moe_ffn=1024)


@pytest.mark.parametrize("shape", [pytest.param(WIDE, marks=pytest.mark.slow), MIXTURE], ids=["dense", "mixture"])
def test_programs_in_8_bits_are_priced_as_the_estimator_prices_them(shape: TransformerShape) -> None:
    cluster = ClusterSpec.preset("dgx-b200")
    parallel = ParallelConfig(dp=8, ep=8 if shape.experts else 1, zero=1)
    w = Workload.of(shape, cluster, StepPlan(parallel, 2), 16, Software("bf16", graphs="step"))
    with torch.device("meta"):
        model, ids = Transformer(shape), torch.zeros(w.batch, shape.seq_len, dtype=torch.long)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    program = autopar.compile(model, cluster, (ids, ids), optimizer=optimizer, options=forced_options(w))
    compiled, estimated = [], []
    for precision, attention_8 in (("bf16", False), ("fp8", False), ("mxfp8", False), ("mxfp8", True)):
        software = replace(w.software, precision=precision, attention_8=attention_8).canonical()
        compiled.append(predicted_s(program, software))
        estimated.append(estimate_workload(replace(w, software=software)).step_time_s)
    assert compiled == pytest.approx(estimated, rel=0.06)
    assert [c / compiled[0] for c in compiled] == pytest.approx([e / estimated[0] for e in estimated], rel=0.03)
    assert compiled[3] < compiled[2] < compiled[0] * 0.97
