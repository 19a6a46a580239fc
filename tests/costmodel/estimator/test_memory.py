"""Memory of a stage: the order of ZeRO levels, recomputation, experts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.memory import Memory, logits, stage_memory
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.counter import ByteCounter
from autopar.runtime.comm.devices import standing_for
from autopar.runtime.kernels.losses import linear_cross_entropy

MODEL = TransformerShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=32000, seq_len=2048, gated_mlp=True)


def held_by(model: TransformerShape, plan: StepPlan, *, stage: int = 0, layers: int = 16, m: int = 1) -> Memory:
    """Bytes of a stage that runs m microbatches."""
    batch = m * plan.parallel.dp * plan.micro_batch
    return stage_memory(Workload.of(model, ClusterSpec.preset("dgx-h100"), plan, batch), stage, layers)


@given(dp=st.integers(2, 64), b=st.integers(1, 8), recompute=st.sampled_from(["none", "selective", "full"]))
def test_zero_levels_save_in_order(dp, b, recompute):
    held = [held_by(MODEL, StepPlan(ParallelConfig(dp=dp, zero=z), b, recompute)) for z in range(4)]
    states = [m.parameters + m.gradients + m.optimizer for m in held]
    assert states == sorted(states, reverse=True)
    assert len({m.activations for m in held[:3]}) == 1


@given(p=st.sampled_from([1, 2, 4, 8]), m=st.integers(1, 16), stage=st.integers(0, 7))
def test_recompute_saves_and_later_stages_hold_less(p, m, stage):
    def held(stage: int, recompute: str) -> float:
        plan = StepPlan(ParallelConfig(pp=p), 1, recompute)
        return held_by(MODEL, plan, stage=stage, layers=16 // p, m=m).activations

    stage = min(stage, p - 1)
    assert held(stage, "full") <= held(stage, "none")
    if 0 < stage < p - 1:
        assert held(stage + 1, "none") <= held(stage, "none") + 2 * 2048 * 2048 * 1.01


def test_experts_are_divided_and_tied_embeddings_counted_once():
    moe = replace(MODEL, experts=8, topk=2, moe_ffn=4096)
    one = held_by(moe, StepPlan(ParallelConfig(dp=8), 1))
    spread = held_by(moe, StepPlan(ParallelConfig(dp=8, ep=8), 1))
    experts = 2 * 16 * 8 * moe.mlp_params(4096)
    assert one.parameters - spread.parameters == pytest.approx(experts * 7 / 8)
    tied = replace(MODEL, tied_embeddings=True)
    assert MODEL.params - tied.params == 32000 * 2048


@pytest.mark.parametrize("sequences", [1, 2, 8, 16])
def test_an_emitted_head_has_the_logits_of_one_chunk_of_tokens_at_once(sequences: int) -> None:
    w = Workload.of(MODEL, ClusterSpec.preset("dgx-h100"), StepPlan(ParallelConfig(dp=8), sequences), 8 * sequences)
    kinds = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(int(w.tokens), MODEL.hidden, **kinds), torch.empty(MODEL.vocab, MODEL.hidden, **kinds)
    labels, scale = (torch.empty(int(w.tokens), dtype=d, device="meta") for d in (torch.long, torch.float32))
    with standing_for(w.device.runs_as), ByteCounter() as counter:
        linear_cross_entropy(x, weight, labels, scale, 0.0, 0.0)
    made = x.nbytes + weight.nbytes
    assert logits(w) <= counter.peak <= logits(w) + made + 0.25 * counter.peak
