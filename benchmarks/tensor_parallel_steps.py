"""Tensor-parallel training steps by DTensor, to compare with: `parallelize_module` as torch's tutorials have it.

Columns, then rows, of every block; the embedding by rows of its table, the head by columns. What norms give is made a DTensor
once, so that the gradients of all products which read it are summed before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.harness import Batch, Step
from benchmarks.models import Gpt, next_token_loss
from benchmarks.reference_steps import MakeOptimizer, Model

COLUMNS = ("qkv", "up", "attention.wq", "attention.wk", "attention.wv", "gate")
ROWS = ("proj", "down", "attention.wo")
NORMS = ("norm_1", "norm_2", "attention_norm", "ffn_norm")
"""Modules of a block, of either model."""


def tensor_parallel_step(
    model: Model, make_optimizer: MakeOptimizer, sequence: bool = False, vocabulary: bool = False
) -> Step:
    """A step on the whole batch. sequence: what lies between the products of blocks is sharded along the sequence, norms
    included. vocabulary: logits stay sharded, for a parallel cross-entropy."""
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence, vocabulary)
    optimizer = make_optimizer(groups_alike(model.parameters()))
    loss_context: Callable[[], AbstractContextManager[Any]] = loss_parallel if vocabulary else nullcontext

    def step(batch: Batch) -> float:
        ids, labels = batch
        with loss_context():
            loss = next_token_loss(model(ids), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        return (value.full_tensor() if isinstance(value, DTensor) else value).item()

    return step


def parallelize(model: Model, mesh: DeviceMesh, sequence: bool, vocabulary: bool) -> None:
    """Shards the model's parameters in place."""
    keep_own_heads(model, mesh.size())
    between = Shard(1) if sequence else Replicate()
    for block in model.blocks:
        if sequence:
            apply(block, mesh, dict.fromkeys(NORMS, SequenceParallel()))
        for name in NORMS:
            whole = PrepareModuleOutput(
                output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False
            )
            apply(block, mesh, {name: whole})
        apply(block, mesh, dict.fromkeys(COLUMNS, ColwiseParallel()))
        apply(block, mesh, dict.fromkeys(ROWS, RowwiseParallel(output_layouts=between)))
    look_up = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1) if vocabulary else Replicate(), use_local_output=not vocabulary
    )
    apply(model, mesh, {"embed": look_up, "tokens": look_up, "head": head})
    if sequence:
        apply(model, mesh, {"norm": SequenceParallel()})
        if isinstance(model, Gpt):
            model.positions = nn.Parameter(model.positions.detach().chunk(mesh.size())[mesh.get_local_rank()].clone())


def apply(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Apply the styles to those submodules that there are."""
    names = {name for name, _ in module.named_modules()}
    parallelize_module(module, mesh, {name: style for name, style in styles.items() if name in names})


def keep_own_heads(model: Model, ranks: int) -> None:
    """Blocks shape what they get by their own share of heads. A product that makes q, k and v gets its rows in such an order
    that a contiguous shard has all three of its heads."""
    blocks: Iterable[Any] = model.blocks
    for block in blocks:
        if isinstance(model, Gpt):
            block.heads //= ranks
            for parameter in block.qkv.parameters():
                of_ranks = parameter.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1)
                parameter.data = of_ranks.flatten(0, 2).contiguous()
        else:
            block.attention.heads //= ranks
            block.attention.kv_heads //= ranks


def groups_alike(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """A group of DTensors and one of plain tensors, as fused optimizers take no mixture."""
    every = list(parameters)
    groups = [[p for p in every if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    return [{"params": group} for group in groups if group]
