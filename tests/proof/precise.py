"""Errors of low precision: the emitted program and eager PyTorch in 16 bits, both against eager float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.capture.known.promoted import cast
from autopar.proof.casts import map_tensors
from autopar.proof.reference import loss_of, microbatches

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Curve:
    """Losses of the steps and the parameters after them, in float64."""

    losses: Tensor
    parameters: dict[str, Tensor]


def emitted(program: autopar.Program, batch: Any, steps: int) -> Curve:
    """The program's ranks in this process, in its own dtypes."""
    run = program.run([batch], steps=steps)
    names = dict(program.model.named_parameters())
    return Curve(torch.stack(run.losses).double(), {n: run.state[n].double() for n in names})


def eager(
    program: autopar.Program,
    model: nn.Module,
    batch: Any,
    steps: int,
    dtype: torch.dtype,
    low: torch.dtype | None = None,
) -> Curve:
    """The model on one device in `dtype`; low: under autocast, which leaves parameters and optimizer in `dtype`."""
    model = copy.deepcopy(model).to(dtype)
    inputs = map_tensors(batch, lambda t: cast(t, dtype))
    named = dict(model.named_parameters())
    trained = [p for p in named.values() if p.requires_grad]
    optimizer = program.optimizer(trained)
    parts = program.plan.microbatches if program.ir.microbatched and program.ir.microbatched.separate else 1
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for piece in microbatches(inputs, parts, program):
            with _autocast(low):
                loss = loss_of(model, piece, program.request.loss_fn, program.request.targets)[0] / parts
            loss.backward()
            total += loss.detach().double()
        optimizer.step()
        losses.append(total)
    return Curve(torch.stack(losses), {n: p.detach().double() for n, p in named.items()})


@contextlib.contextmanager
def _autocast(low: torch.dtype | None) -> Iterator[None]:
    if low is None:
        yield
        return
    with torch.autocast("cpu", dtype=low):
        yield


def rounded(program: autopar.Program, model: nn.Module, batch: Any, steps: int, low: torch.dtype) -> Curve:
    """Eager training in 16 bits with float32 master weights: the whole model runs in 16 bits, outputs meet the loss in
    float32, gradients update float32 parameters."""
    master, model = copy.deepcopy(model).float(), copy.deepcopy(model).to(low)
    inputs = map_tensors(batch, lambda t: cast(t, low))
    kept, used = dict(master.named_parameters()), dict(model.named_parameters())
    optimizer = program.optimizer([p for p in kept.values() if p.requires_grad])

    def loss_fn(*args: Any) -> Tensor:
        return program.request.loss_fn(
            *(map_tensors(a, lambda t: t.float() if t.is_floating_point() else t) for a in args)
        )

    losses = []
    for _ in range(steps):
        with torch.no_grad():
            for name, parameter in kept.items():
                used[name].copy_(parameter)
        model.zero_grad()
        loss, _ = loss_of(model, inputs, None if program.request.loss_fn is None else loss_fn, program.request.targets)
        loss.backward()
        for name, parameter in used.items():
            kept[name].grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        losses.append(loss.detach().double())
    return Curve(torch.stack(losses), {n: p.detach().double() for n, p in kept.items()})


def errors(found: Curve, truth: Curve, start: dict[str, Tensor]) -> tuple[float, float]:
    """(mean squared relative error of losses, that of the parameters' way from where they started)."""
    loss = ((found.losses - truth.losses) / truth.losses.abs().mean()).square().mean()
    off = sum(float((found.parameters[n] - p).square().sum()) for n, p in truth.parameters.items())
    way = sum(float((p - start[n]).square().sum()) for n, p in truth.parameters.items())
    return float(loss), off / way


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with dropout off: eager draws other numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
