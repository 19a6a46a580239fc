"""Published plans are compiled as they were published, or named with the reason why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.layer import attention_core
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload
from benchmarks.published_compiled import approximated, evenly, forced_options, inexpressible, score_compiled
from benchmarks.published_models import LowRankAttention, Transformer
from tests.zoo.transformers import rotary_tables, rotate

SAMPLE = {row["id"]: row for row in json.loads((Path(__file__).parent / "published_sample.json").read_text())}


GPT_OSS = TransformerShape(2, 64, 4, 96, 128, 16, kv_heads=2, gated_mlp=True, experts=8, topk=2, window=4)
DEEPSEEK = TransformerShape(
    3, 64, 4, 96, 128, 16, gated_mlp=True, experts=8, topk=2, moe_ffn=32, shared_experts=1, first_dense_layers=1,
    mla=(32, 16, 8, 4, 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "inner_norms"),
    [
        (TransformerShape(2, 64, 4, 96, 128, 16, kv_heads=2, gated_mlp=True), 0),
        (TransformerShape(2, 64, 4, 96, 128, 16, kv_heads=2, gated_mlp=True, tied_embeddings=True), 0),
        (GPT_OSS, 0),
        (DEEPSEEK, 3 * (32 + 16)),
    ],
    ids=["untied", "tied", "gpt-oss", "deepseek"],
)
def test_a_shapes_model_has_the_parameters_that_the_estimator_counts(shape: TransformerShape, inner_norms: int) -> None:
    model = Transformer(shape)
    last_norm = shape.hidden
    assert sum(p.numel() for p in model.parameters()) == shape.params + last_norm + inner_norms


CUT = "stages of the pipeline cut where it is fastest"


def test_layers_without_a_window_skip_the_upper_triangle() -> None:
    """Attention takes the mean of all layers with a window and of none where every second layer has one."""
    long = replace(GPT_OSS, seq_len=8192)
    shapes = (replace(long, window_every=1), long, replace(long, window=0))
    plan = StepPlan(ParallelConfig(), 1)
    whole, half, none = (attention_core(Workload.of(one, ClusterSpec.preset("dgx-h100"), plan, 8)) for one in shapes)
    assert half == pytest.approx([(a + b) / 2 for a, b in zip(whole, none, strict=True)])
    assert none < half < whole


def test_a_window_hides_what_lies_before_it() -> None:
    """A token sees 2 (window - 1) tokens back through two layers of a window, and no further."""
    model = Transformer(replace(GPT_OSS, window_every=1)).eval()
    ids = torch.randint(0, 128, (1, 16))
    changed = ids.clone()
    changed[0, 0] += 1 if ids[0, 0] < 127 else -1
    labels = torch.full((1, 16), -100)
    seen = 2 * (GPT_OSS.window - 1)
    for place, same in ((seen, False), (seen + 1, True)):
        at_place = labels.clone()
        at_place[0, place] = 5
        assert torch.equal(model(ids, at_place), model(changed, at_place)) == same


def test_narrow_attention_turns_the_shared_part_of_keys_by_its_position() -> None:
    """The parts are plain products, head by head."""
    torch.manual_seed(0)
    attention, x = LowRankAttention(DEEPSEEK).double(), torch.randn(1, 16, 64, dtype=torch.float64)
    rotary = tuple(t.double() for t in rotary_tables(16, 4))
    got = attention(x, rotary, None)
    q = attention.q_up(attention.q_norm(attention.q_down(x)))[0].view(16, 4, 12)
    narrow = attention.kv_down(x)[0]
    kv = attention.kv_up(attention.kv_norm(narrow[:, :16])).view(16, 4, 16)
    shared = rotate(narrow[None, None, :, 16:], *rotary)[0, 0]
    heads = []
    for h in range(4):
        turned = rotate(q[None, None, :, h, 8:], *rotary)[0, 0]
        scores = (q[:, h, :8] @ kv[:, h, :8].T + turned @ shared.T) * 12**-0.5
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ kv[:, h, 8:])
    torch.testing.assert_close(got[0], attention.o(torch.cat(heads, -1)), rtol=1e-11, atol=1e-11)


def test_materialised_attention_is_the_same_attention() -> None:
    ids, labels = torch.randint(0, 128, (2, 16)), torch.randint(0, 128, (2, 16))
    losses = []
    for attention in ("flash", "materialised"):
        torch.manual_seed(0)
        losses.append(Transformer(TransformerShape(2, 64, 4, 96, 128, 16, attention=attention))(ids, labels))
    torch.testing.assert_close(*losses)


def test_a_plan_is_forced_as_it_was_published() -> None:
    options = forced_options(row_workload(SAMPLE["bloom_176B_production"]))
    assert (options.mesh, options.strategy) == ({"dp": 8, "tp": 4}, "megatron-zero1")
    assert (options.pp, options.chunks, options.schedule, options.microbatches) == (12, 1, "1f1b", 128)
    assert (options.recompute, options.precision) == ("full", "bf16")
    assert options.stage_boundaries == [f"blocks.{i}" for i in range(5, 66, 6)]
    several = forced_options(row_workload(SAMPLE["dgxc_v25.04_llama-3-1-70b-bf16_256"]))
    assert (several.pp, several.chunks) == (4, 5)
    assert several.stage_boundaries == [f"blocks.{i}" for i in range(4, 80, 4)]
    fsdp = forced_options(row_workload(SAMPLE["mosaic_70b_s2048_g64_a100_80gb_bf16_mb8"]))
    assert (fsdp.mesh, fsdp.strategy, fsdp.pp, fsdp.microbatches) == ({"dp": 64}, "zero3", 1, 4)
    experts = forced_options(
        row_workload(SAMPLE["mbridge-26.04.01-gpt_oss_120b-B200-BF16-n64-gbs1280-tp1pp1cp1vp1ep8f0"])
    )
    assert (experts.mesh, experts.strategy, experts.microbatches) == ({"dp": 8, "ep": 8}, "zero1", 5)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("mosaic_1b_s32768_g8_h100_80gb_fp8_mb1", ""),
        ("dgxc_v25.04_llama-3-1-70b-bf16_256", ""),
        ("mbridge-26.04.01-gpt_oss_120b-B200-BF16-n64-gbs1280-tp1pp1cp1vp1ep8f0", ""),
        ("zb-t6-28.3B-zb-v-p32-b2-m128", ""),
    ],
)
def test_what_cannot_be_expressed_is_named(row: str, reason: str) -> None:
    found = inexpressible(row_workload(SAMPLE[row]))
    assert reason in found
    assert bool(found) == bool(reason)


def test_experts_over_ranks_that_share_a_batch_are_named() -> None:
    row = SAMPLE["mbridge-26.04.01-gpt_oss_120b-B200-BF16-n64-gbs1280-tp1pp1cp1vp1ep8f0"]
    wide = {**row, "parallel": {**row["parallel"], "dp": 16, "tp": 4, "ep": 64}}
    assert "experts apart over ep=64 of dp=16" in inexpressible(row_workload(wide))


@pytest.mark.parametrize(
    ("row", "changed", "differences"),
    [
        ("bloom_176B_production", {"recompute": "none"}, ["tensor parallelism with the sequence cut between products"]),
        ("dgxc_v25.02_nemotron4-15b-bf16_2048", {}, []),
        ("zb-t6-28.3B-zb-v-p32-b2-m128", {}, [CUT]),
        ("zb-t6-28.3B-zb-v-p32-b2-m128", {"schedule": "zb-1p"}, ["schedule zb-1p as zb-h1", CUT]),
        ("mosaic_70b_s2048_g64_a100_80gb_bf16_mb8", {}, []),
        ("mosaic_70b_s2048_g64_a100_80gb_bf16_mb8", {"recompute": "selective"}, []),
        (
            "mosaic_70b_s2048_g64_a100_80gb_bf16_mb8",
            {
                "recompute": "selective",
                "parallel": {"dp": 32, "tp": 2, "fsdp": 1, "zero": 3, "sequence_parallel": True},
            },
            ["recomputation of attention and of what is pointwise"],
        ),
    ],
)
def test_what_is_compiled_nearly_says_in_what(row: str, changed: dict[str, Any], differences: list[str]) -> None:
    assert approximated(row_workload({**SAMPLE[row], **changed})) == differences


def test_a_limit_takes_rows_from_every_series() -> None:
    rows = [{"id": i, "series": series} for i, series in enumerate("aaabc")]
    assert [row["series"] for row in evenly(rows, 4)] == ["a", "b", "c", "a"]


@pytest.mark.slow
def test_a_row_is_compiled_and_scored() -> None:
    row = {
        **SAMPLE["dgxc_v25.02_nemotron4-15b-bf16_2048"],
        "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 128, "seq_len": 16, "dtype": "bf16"},
        "hardware": {"gpu": "H100-SXM5-80GB", "gpus": 8, "gpus_per_node": 8},
        "parallel": {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
        "batch": {"global": 8, "micro": 1},
        "schedule": "1f1b",
    }
    (context,) = score_compiled([{**row, "parallel": {"dp": 1, "cp": 2, "tp": 2, "pp": 2, "zero": 1}}])["compiled"]
    assert context["predicted_s"] > 0
    eight_bits = {**row, "id": "fp8", "model": {**row["model"], "dtype": "fp8"}}
    experts = {"experts": 4, "topk": 1, "gated_mlp": True}
    moe = {
        **row,
        "id": "moe",
        "category": {"arch": "moe"},
        "model": {**row["model"], **experts},
        "parallel": {**row["parallel"], "ep": 2},
    }
    further = {**moe, "id": "further", "model": {**moe["model"], "mtp_layers": 1}}
    result = score_compiled([row, eight_bits, moe, further])
    assert result["rows"] == 3
    for compiled, arch in zip(result["compiled"], ("dense", "dense", "moe"), strict=True):
        assert compiled["predicted_s"] > 0
        assert compiled["estimated_s"] > 0
        assert compiled["approximated"] == ["tensor parallelism with the sequence cut between products"]
        assert compiled["arch"] == arch
    errors = [abs(compiled["predicted_s"] / compiled["measured_s"] - 1) for compiled in result["compiled"]]
    assert result["dense_median_abs_error"] == pytest.approx(sum(errors[:2]) / 2)
    assert result["moe_median_abs_error"] == pytest.approx(errors[2])
    assert [refused["id"] for refused in result["not_compiled"]] == ["further"]
