"""Training steps to compare with: PyTorch's own wrappers around a model, and the emitted program of a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Batch, Step
from benchmarks.models import Gpt, Llama, next_token_loss

Model = Gpt | Llama
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def autopar_step(directory: Path) -> Step:
    """The emitted program of a directory."""
    import autopar

    program = autopar.load(directory)
    return lambda batch: float(program(batch))


def ddp_step(
    model: Model, make_optimizer: MakeOptimizer, bucket_mb: float = 25.0, low: torch.dtype | None = None
) -> Step:  # fmt: skip
    """DistributedDataParallel, whose gradients are views of its buckets. low: under autocast."""
    ddp = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True
    )
    return data_parallel_step(ddp, make_optimizer, low)


def fsdp2_step(
    model: Model, make_optimizer: MakeOptimizer, reshard: bool = True, low: torch.dtype | None = None
) -> Step:  # fmt: skip
    """FSDP2 per block. reshard: parameters of blocks are gathered again for backward. low: gathered and computed with in that
    dtype, gradients summed in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    sums = torch.float32 if low is not None else None
    policy, of_root = MixedPrecisionPolicy(low, sums), MixedPrecisionPolicy(low, sums, output_dtype=sums)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=of_root)
    return data_parallel_step(model, make_optimizer)


def data_parallel_step(model: nn.Module, make_optimizer: MakeOptimizer, low: torch.dtype | None = None) -> Step:
    """A step on this rank's rows of the global batch; the loss is the mean over ranks. low: under autocast."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(model.parameters())
    device = next(model.parameters()).device

    def step(batch: Batch) -> float:
        ids, labels = (t.chunk(ranks)[rank].to(device) for t in batch)
        with torch.autocast(device.type, low, enabled=low is not None):
            loss = next_token_loss(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return step


class Part(nn.Module):
    """A run of a model's blocks, the first one behind its embedding, the last one before its head."""

    def __init__(self, model: Model, stage: int, stages: int) -> None:
        super().__init__()
        blocks, here = list(model.blocks), len(model.blocks) // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.blocks = nn.ModuleList(blocks[stage * here : None if self.last else (stage + 1) * here])
        self.tables = (model.cos, model.sin) if isinstance(model, Llama) else ()
        if self.first:
            self.tokens = model.embed if isinstance(model, Llama) else model.tokens
            self.positions = None if isinstance(model, Llama) else model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x)
            x = x if self.positions is None else x + self.positions
        for block in self.blocks:
            x = block(x, *self.tables)
        return self.head(self.norm(x)) if self.last else x


def pipelined_step(model: Model, make_optimizer: MakeOptimizer, microbatches: int, schedule: str = "1F1B") -> Step:
    """torch's own schedule ("1F1B", "GPipe") of equally many blocks on every rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, ranks = dist.get_rank(), dist.get_world_size()
    part, last = Part(model, rank, ranks), ranks - 1
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
    runner = kind(stage, microbatches, loss_fn=next_token_loss)
    optimizer = make_optimizer(part.parameters())

    def step(batch: Batch) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(batch[0], return_outputs=False)
        elif rank == last:
            runner.step(target=batch[1], losses=losses, return_outputs=False)
        else:
            runner.step()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if rank == last else torch.zeros(())
        dist.broadcast(mean, last)
        return mean.item()

    return step
