"""Recurrent models of Hugging Face's transformers, where it is installed, as their authors wrote them, on parts of a sequence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.known.known_recurrences import delta_attention
from autopar.program import ParallelProgram

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "use_cache": False}
MODELS: dict[str, dict[str, Any]] = {
    "Mamba": SIZES | {"state_size": 4},
    "FalconMamba": SIZES | {"state_size": 4},
    "Mamba2": SIZES | {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 2, "chunk_size": 4},
    "Rwkv": SIZES | {"num_hidden_layers": 2, "context_length": 64},
    "RecurrentGemma": SIZES | {"block_types": ["recurrent"], "num_attention_heads": 4, "intermediate_size": 32},
}
SCANS = {"linear_scan", "linear_scan_back", "cummax", "roll"}


def compiled(name: str, batch_size: int = 1, steps: int = 32) -> tuple[ParallelProgram, Any, Any]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    tokens = torch.randint(3, 64, (batch_size, steps))
    batch = {"input_ids": tokens, "labels": tokens}
    options = autopar.Options(mesh={"cp": 4})
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=optimizer, options=options)
    return program, model, batch


def carried(plan: autopar.Plan) -> set[str]:
    """The ops of a plan that send messages of their own."""
    templates = (t for stage in plan.stages for t in stage.templates.values())
    taken = (item for t in templates for item in t.strategies.items())
    return {op.rstrip("_0123456789") for op, choices in taken if any(c.startswith("+") for c in choices)}


@pytest.mark.parametrize("name", MODELS)
def test_a_recurrence_is_one_op_on_quarters_of_a_sequence(name: str) -> None:
    program, model, batch = compiled(name)
    assert len(program.captured.exported.known_blocks) == 1
    assert autopar.verify(program, model, batch).max_error <= 1e-9
    plans = (autopar.random_plan(program, seed, pp=1) for seed in range(100))
    carrying = next(plan for plan in plans if carried(plan) & SCANS)
    assert autopar.verify(program.with_plan(carrying), model, batch).max_error <= 1e-9


def test_the_size_of_a_graph_does_not_grow_with_the_steps() -> None:
    short, long = (compiled("Rwkv", steps=steps)[0] for steps in (16, 64))
    sizes = [sum(len(t.graph.nodes) for t in p.ir.templates.values()) for p in (short, long)]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_one_long_sequence_is_cut_by_the_search_itself() -> None:
    """Batch 1 on 4 ranks: the scan runs on quarters, and sends rows."""
    config = transformers.MambaConfig(vocab_size=256, hidden_size=1024, num_hidden_layers=2, use_cache=False)
    with torch.device("meta"):
        model = transformers.MambaForCausalLM(config).train()
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), {"input_ids": tokens, "labels": tokens})
    assert carried(program.plan) == {"linear_scan", "linear_scan_back"}


def test_a_delta_rule_is_its_authors_over_several_chunks() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    query, key, value, g = (torch.randn(2, 10, 3, 4) for _ in range(4))
    given = (query, key, value, -g.abs(), torch.rand(2, 10, 3), 4, torch.randn(2, 3, 4, 4), True, True)
    for ours, theirs in zip(delta_attention(*given), kimi.chunk_kimi_delta_attention(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
