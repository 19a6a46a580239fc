"""An eager training loop of its own, which shares no code with the compiler: what every compiled program must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
LR, MOMENTUM = 0.05, 0.9


def doubled(value: Any) -> Any:
    """The same batch in float64."""
    if isinstance(value, Tensor):
        return value.to(torch.complex128 if value.is_complex() else torch.float64) if _inexact(value) else value
    return type(value)(map(doubled, value))


def _inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def trained(
    model: nn.Module, batches: Sequence[tuple[Tensor, ...]], loss: Callable[..., Tensor] | None, pieces: int = 1
) -> dict[str, Tensor]:
    """Losses, parameters and buffers after SGD with momentum, a step per batch. pieces: the batch is cut into so many along
    dim 0, and their losses averaged."""
    model = copy.deepcopy(model)
    velocity: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for piece in zip(*(t.chunk(pieces) for t in batch), strict=True):
            value = model(*piece) if loss is None else loss(model(*piece[:-1]), piece[-1])
            value = value.reshape(()) / pieces
            value.backward()
            total += value.detach()
        values[f"loss {step}"] = total
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    velocity[name] = grad.clone() if name not in velocity else MOMENTUM * velocity[name] + grad
                    p -= LR * velocity[name]
    values |= {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = model.state_dict().keys()
    values |= {name: b.clone() for name, b in model.named_buffers() if name in kept}
    return values


def difference(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> float:
    """The largest difference of any value, relative to the largest entry of its kind; infinite where one is missing, or is
    not a number where the other is one."""
    worst = 0.0
    scale = max([1e-3, *(float(v.abs().max()) for n, v in eager.items() if not n.startswith("loss") and v.numel())])
    for name, want in eager.items():
        got = ours.get(name)
        if got is None or got.shape != want.shape:
            return float("inf")
        if not want.numel():
            continue
        same = torch.equal(torch.isfinite(got), torch.isfinite(want))
        if not same:
            return float("inf")
        finite = torch.isfinite(want)
        gap = float((got[finite] - want[finite]).abs().max()) if finite.any() else 0.0
        own = max(1e-3, float(want.abs().max())) if name.startswith("loss") else scale
        worst = max(worst, gap / own)
    return worst
