"""An emitted program of one rank on a GPU of this process, beside the eager model that it was compiled from.

The models are those of `benchmarks.one_rank`: Llama, GPT, BERT, ViT and ResNet blocks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.capture.known.promoted import replaced
from autopar.codegen.in_process import load
from autopar.codegen.pipeline import pipeline_source
from autopar.codegen.stage import stage_sources
from autopar.passes.played.meta_comm import MetaComm
from autopar.runtime.program.run_options import RunOptions
from autopar.runtime.program.tables import world_mesh
from autopar.runtime.step.session import Session
from benchmarks.one_rank import MODELS

DEVICE = "cuda"
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
NO_DROPOUT = [name for name in MODELS if "dropout" not in name]
Batch = tuple[Tensor, Tensor]

WRITTEN = RunOptions(compiler="none")


@dataclasses.dataclass(frozen=True)
class Beside:
    """A program and its eager model, with the batches of both."""

    program: autopar.Program
    eager: nn.Module
    batch_of: Callable[[int], Batch]
    loss_of: Callable[[nn.Module, Batch], Tensor]
    precision: str | None

    def session(self, dtype: torch.dtype | None = None) -> Session:
        """The program's only rank, with its weights: nobody to talk to. dtype: in the place of all that the program names."""
        program = self.program
        modules = dataclasses.replace(program.in_process, options=WRITTEN)
        if dtype is not None:
            sources = stage_sources(program.lowered.stages, lambda stage: "", replaced(dtype))
            modules = load(program.lowered, sources, pipeline_source(program.lowered, program.ir, "", replaced(dtype)))
        comm = MetaComm(world_mesh(modules.pipeline), 0, DEVICE)
        session = modules.session(comm, program.request.update, program.options.seed, dtype)
        session.load_weights(program.weights())
        return session

    def batch(self, index: int, dtype: torch.dtype | None = None) -> Batch:
        inputs, labels = (x.to(DEVICE) for x in self.batch_of(index))
        return (inputs.to(dtype) if dtype is not None and inputs.is_floating_point() else inputs), labels

    def eager_step(self, compiled: bool = False) -> Callable[[Batch], float]:
        """A training step of a copy of the model, as a user would write it."""
        model = copy.deepcopy(self.eager).to(DEVICE)
        optimizer = OPTIMIZER(model.parameters())
        forward: Any = torch.compile(self.loss_of) if compiled else self.loss_of

        def step(batch: Batch) -> float:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=self.precision == "bf16"):
                loss = forward(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.item())

        return step


def beside(name: str, precision: str | None = None, cluster: Any = None) -> Beside:
    """A model compiled for one GPU, by default an H100."""
    make, batch_of, loss_fn = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    eager = copy.deepcopy(model)
    program = autopar.compile(
        model,
        cluster or autopar.ClusterSpec.homogeneous(devices=1, device="h100"),
        batch_of(0),
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        options=autopar.Options(precision=precision),
    )

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return model(inputs, labels) if loss_fn is None else loss_fn(model(inputs), labels)

    return Beside(program, eager, batch_of, loss_of, precision)
