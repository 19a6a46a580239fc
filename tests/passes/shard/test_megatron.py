"""`strategy="megatron"` is Megatron-LM's tensor and sequence parallelism, found from what a program computes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import ClusterSpec, Options, ParallelProgram
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.runtime.kernels.losses import chunk_rows
from benchmarks.models import Llama, LlamaShape
from benchmarks.published_models import Transformer
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo
from tests.zoo.test_zoo import assert_equal_to_one_device

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
WEIGHTS = ("gradient", "regather", "gather", "loss")


@functools.cache
def of_zoo(name: str, dp: int, tp: int, strategy: str = "megatron") -> ParallelProgram:
    zoo = BY_NAME[name]
    options = Options(strategy=strategy, mesh={"dp": dp, "tp": tp}, recompute="none")
    return compiled_zoo(zoo, dp * tp, options=options)


def activations_sent(program: ParallelProgram, nbytes: float, axis: str = "tp") -> Counter[str]:
    """How often a step sends so many bytes of activations along an axis, by kind of collective."""
    times: Counter[str] = Counter()
    for c in program.account.collectives:
        if c.axis == axis and c.nbytes == nbytes and not c.what.startswith(WEIGHTS):
            times[c.kind] += c.times
    return times


def storages(program: ParallelProgram) -> dict[str, str]:
    return {name: str(p.storage) for name, p in program.plan.stages[0].parameters.items()}


@pytest.mark.parametrize("options", [{}, {"pp": 2, "mesh": {"dp": 3}}], ids=str)
def test_an_only_axis_shards_weights_whether_or_not_it_divides_rows(options: dict[str, Any]) -> None:
    model, ranks = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double(), 3 * options.get("pp", 1)
    data = torch.randn(8, 6).double(), torch.randn(8, 5).double()
    program = autopar.compile(
        model,
        ClusterSpec.local(ranks),
        data,
        loss_fn=F.mse_loss,
        optimizer=ADAMW,
        options=Options(strategy="megatron", **options),
    )
    stored = {name: str(p.storage) for stage in program.plan.stages for name, p in stage.parameters.items()}
    assert "@dp" in stored["0.weight"], stored
    assert autopar.verify(program, model, data).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("tp", [2, 8])
def test_a_llama_gathers_and_scatters_the_sequence_as_often_as_korthikanti_counts(tp: int) -> None:
    """Per layer two gathers and two scatters forward, as many backward, of batch · sequence · width; at the ends the
    embedding scatters, the logits gather, and their gradients the other way."""
    layers, seq, batch, dim = 2, 512, 8, 1024
    shape = LlamaShape(layers, dim, ffn=2816, heads=8, kv_heads=8, vocab=32000)
    with torch.device("meta"):
        model = Llama(shape, seq).to(torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    options = Options(strategy="megatron", mesh={"dp": 8 // tp, "tp": tp}, recompute="none")
    program = autopar.compile(
        model, ClusterSpec.preset("dgx-h100", nodes=1), (ids, ids), optimizer=ADAMW, options=options
    )
    local_batch = batch * tp // 8
    activations = activations_sent(program, 2 * local_batch * seq * dim)
    assert activations == {"all_gather": 4 * layers + 2, "reduce_scatter": 4 * layers + 2}
    of_chunk = min(chunk_rows(dim, program.cluster.device(0).runs_as), local_batch * seq)
    chunks, rows = local_batch * seq // of_chunk, 4 * of_chunk
    assert activations_sent(program, rows) == {"all_reduce": chunks}, "the largest logit of every token"
    assert activations_sent(program, 2 * rows) == {"all_reduce": chunks}, "its sum of exponentials, its label's logit"
    others = [c for c in program.account.collectives if not c.what.startswith(WEIGHTS) and c.axis != "tp"]
    assert all(c.nbytes == 2 for c in others), "the batch's axis counts tokens, and sends nothing else"
    assert sum(activations.values()) + 2 * chunks == sum(
        c.times for c in program.account.collectives if c.axis == "tp" and not c.what.startswith(WEIGHTS)
    )
    assert program.plan.origin == "megatron"
    for name, spec in storages(program).items():
        column = any(part in name for part in ("embed", "wq", "wk", "wv", "gate", "up", "head"))
        row = any(part in name for part in ("wo", "down"))
        assert spec == ("[@tp, .]" if column else "[., @tp]" if row else "[.]"), name


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("name", "width_bytes", "sent"),
    [
        ("llama", 8 * 16 * 64 * 4, {"all_gather": 4 * 3 + 2, "reduce_scatter": 4 * 3 + 2}),
        ("bert", 8 * 16 * 32 * 4, {"all_gather": 4 * 2 + 1, "reduce_scatter": 4 * 2 + 2}),
    ],
)
def test_transformers_of_the_zoo_send_no_more(
    name: str, width_bytes: int, sent: dict[str, int], dp: int, tp: int
) -> None:
    """A BERT has no logits: its embedding scatters, and the gradient of the one token that it looks at."""
    program = of_zoo(name, dp, tp)
    assert activations_sent(program, width_bytes / dp) == sent
    assert_equal_to_one_device(BY_NAME[name], program)


@pytest.mark.slow
def test_encoder_and_decoder_share_one_gather_of_the_memory() -> None:
    program = of_zoo("t5", 2, 2)
    encoder, decoder = (activations_sent(program, 8 * n * 32 * 4 / 2) for n in (16, 8))
    layers, embedding, memory, logits = 2, 1, 1, 1
    assert encoder == {
        "all_gather": 4 * layers + embedding + memory,
        "reduce_scatter": 4 * layers + embedding + layers * memory,
    }
    assert decoder == {"all_gather": 6 * layers + embedding + logits, "reduce_scatter": 6 * layers + embedding + logits}
    assert program.plan.origin == "megatron (whole over tp: encoder_bias.weight, decoder_bias.weight)"
    assert_equal_to_one_device(BY_NAME["t5"], program)


def test_a_perceptron_is_a_column_then_a_row() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32)
    options = Options(strategy="megatron", mesh={"dp": 2, "tp": 2})
    program = autopar.compile(model, ClusterSpec.local(4), (x, x), loss_fn=F.mse_loss, optimizer=ADAMW, options=options)
    stored = storages(program)
    assert (stored["0.weight"], stored["0.bias"], stored["2.weight"]) == ("[@tp, .]", "[@tp]", "[., @tp]")
    assert not activations_sent(program, 4 * 64 * 4), "nothing as wide as the hidden layer is sent"
    assert autopar.verify(program, model, (x, x)).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["megatron-zero1", "megatron-zero3"])
def test_zero_shards_over_the_axes_that_take_the_batch(strategy: str) -> None:
    program, plain = of_zoo("llama", 2, 2, strategy), of_zoo("llama", 2, 2)
    for name, p in program.plan.stages[0].parameters.items():
        assert "dp" in p.optimizer.axes, name
        assert ("dp" in p.storage.axes) == (strategy == "megatron-zero3"), name
        assert ("tp" in p.storage.axes) == ("tp" in plain.plan.stages[0].parameters[name].storage.axes), name
    assert activations_sent(program, 8 * 16 * 64 * 4 / 2) == activations_sent(plain, 8 * 16 * 64 * 4 / 2)
    assert_equal_to_one_device(BY_NAME["llama"], program)


def test_a_program_without_products_of_weights_says_so() -> None:
    program = of_zoo("audio", 1, 2)
    assert all(p.storage.is_replicated or len(p.storage.dims) == 1 for p in program.plan.stages[0].parameters.values())
    assert program.plan.origin.startswith("megatron (whole over tp: ")
    assert_equal_to_one_device(BY_NAME["audio"], program)


@pytest.mark.few(1)
@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 2}, {"dp": 1, "cp": 2, "tp": 2}], ids=["tp", "cp tp"])
@pytest.mark.parametrize(
    "shape",
    [
        TransformerShape(2, 32, 4, 64, 64, 16, kv_heads=2, gated_mlp=True),
        TransformerShape(2, 32, 4, 64, 64, 16, tied_embeddings=True, attention="materialised"),
        TransformerShape(2, 32, 4, 64, 64, 16, gated_mlp=True, experts=4, topk=2),
    ],
    ids=["llama", "gpt", "mixture"],
)
def test_one_sequence_at_a_time_is_split_as_two_are(shape: TransformerShape, axes: dict[str, int]) -> None:
    """A batch of one row merges with the sequence without a trace in any rule."""
    torch.manual_seed(0)
    model, ids = Transformer(shape), torch.randint(0, shape.vocab, (2, shape.seq_len))
    two, one = (
        autopar.compile(
            model,
            ClusterSpec.local(math.prod(axes.values())),
            (ids, ids),
            optimizer=ADAMW,
            options=Options(strategy="megatron", mesh=axes, microbatches=m, recompute="none"),
        )
        for m in (1, 2)
    )
    assert storages(one) == storages(two)
    assert storages(one)["blocks.0.attention.q.weight"] == "[@tp, .]"
    assert autopar.verify(one, model, (ids, ids)).ok
