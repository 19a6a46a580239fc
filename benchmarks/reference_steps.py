"""Training steps to compare with: PyTorch's own wrappers around a model, and the emitted program of a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models import Gpt, next_token_loss
from benchmarks.turns import Batch, Step

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def autopar_step(directory: Path) -> Step:
    """The emitted program of a directory."""
    import autopar

    program = autopar.load(directory)
    return lambda batch: float(program(batch))


def ddp_step(model: Gpt, make_optimizer: MakeOptimizer) -> Step:
    """DistributedDataParallel."""
    return data_parallel_step(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), make_optimizer)


def fsdp2_step(model: Gpt, make_optimizer: MakeOptimizer) -> Step:
    """FSDP2 per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    return data_parallel_step(model, make_optimizer)


def data_parallel_step(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """A step on this rank's rows of the global batch; the loss is the mean over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> float:
        ids, labels = (t.chunk(ranks)[rank] for t in batch)
        loss = next_token_loss(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return step


class HalfGpt(nn.Module):
    """The first or the last half of a Gpt."""

    def __init__(self, gpt: Gpt, last: bool) -> None:
        super().__init__()
        self.last = last
        half = len(gpt.blocks) // 2
        self.blocks = nn.ModuleList(list(gpt.blocks)[half:] if last else list(gpt.blocks)[:half])
        if last:
            self.norm, self.head = gpt.norm, gpt.head
        else:
            self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.last:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def pipelined_step(model: Gpt, make_optimizer: MakeOptimizer, microbatches: int) -> Step:
    """torch's own 1F1B of the two halves, on two ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    half = HalfGpt(model, last=rank == 1)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=next_token_loss)
    optimizer = make_optimizer(half.parameters())

    def step(batch: Batch) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if rank else torch.zeros(())
        dist.broadcast(mean, 1)
        return mean.item()

    return step
