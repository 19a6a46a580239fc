"""The models whose steps are timed, and their programs: a Llama of the machine's size, and small models of other kinds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.gpu_report.machine import REHEARSED, Machine, Size
from benchmarks.harness import Batch
from benchmarks.models import Llama, next_token_loss

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)


@dataclass(frozen=True)
class Timed:
    """A model, its loss (None: the model gives it), and its global batches on the host."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None
    batch_of: Callable[[int], Batch]

    def on_meta(self) -> Timed:
        """The same of a model that has no numbers, which is all that a prediction needs."""

        def make() -> nn.Module:
            with torch.device("meta"):
                return self.make()

        return replace(self, make=make)

    def model(self) -> nn.Module:
        """The model, with the same weights wherever it is called."""
        torch.manual_seed(0)
        return self.make().train()

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss as a user would write it."""
        inputs, labels = batch
        return model(inputs, labels) if self.loss_fn is None else self.loss_fn(model(inputs), labels)

    def compiled(self, cluster: autopar.ClusterSpec, **options: Any) -> autopar.Program:
        """The program of its training step."""
        return autopar.compile(
            self.model(), cluster, self.batch_of(0), loss_fn=self.loss_fn, optimizer=OPTIMIZER,
            options=autopar.Options(**options),
        )  # fmt: skip


def llama(size: Size, ranks: int = 1) -> Timed:
    """A Llama with the rows of so many ranks."""

    def batch_of(index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, size.shape.vocab, (ranks * size.rows, size.seq), generator=generator)
        return ids, ids.roll(1, 1)

    return Timed(lambda: Llama(size.shape, size.seq), next_token_loss, batch_of)


def timed(size: Size) -> dict[str, Timed]:
    """The models that one device times."""
    found = {"llama": llama(size)}
    if size != REHEARSED:
        from benchmarks.one_rank import MODELS

        found |= {f"small {name}": Timed(make, loss, batch_of) for name, (make, batch_of, loss) in MODELS.items()}
    return found


def emitted_step(directory: Path) -> Callable[[Any], float]:
    """The saved program on this rank, as its user loads it; weights are there."""
    program = autopar.load(directory)
    return lambda batch: float(program(batch))


def eager_step(machine: Machine, one: Timed, precision: str | None, by_compiler: bool) -> Callable[[Batch], float]:
    """A training step on one device without autopar; by_compiler: of torch.compile."""
    model = copy.deepcopy(one.model()).to(machine.device)
    optimizer = OPTIMIZER(model.parameters())
    loss_of: Any = machine.compiled(one.loss_of) if by_compiler else one.loss_of

    def step(batch: Batch) -> float:
        inputs, labels = (t.to(machine.device) for t in batch)
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=precision is not None):
            loss = loss_of(model, (inputs, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def say_turns(one: dict[str, Any]) -> str:
    """Medians of programs that took turns, in milliseconds."""
    return ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in one["median_ms"].items()) + " ms"
