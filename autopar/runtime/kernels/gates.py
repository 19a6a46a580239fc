"""The activations between the two products of an expert, by name, and their slopes.

    plain    a = f(h)                                       one row of f numbers
    gated    a = f(gate) · (up + shift)                     h holds gate and up

`limit` cuts before: gate to at most limit, up to -limit … limit (gpt-oss, DeepSeek-V4). `alpha` is that of
silu(x) = x · sigmoid(alpha · x). Emitted programs run without autograd, so every activation has its slope here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
aten = torch.ops.aten


def _silu(x: Tensor, alpha: float) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


def _silu_slope(g: Tensor, x: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return aten.silu_backward(g, x)
    s = torch.sigmoid(x * alpha)
    return g * (s + alpha * x * s * (1 - s))


ACTIVATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], Callable[[Tensor, Tensor, float], Tensor]]] = {
    "silu": (_silu, _silu_slope),
    "gelu": (lambda x, _: F.gelu(x), lambda g, x, _: aten.gelu_backward(g, x)),
    "gelu_tanh": (
        lambda x, _: F.gelu(x, approximate="tanh"),
        lambda g, x, _: aten.gelu_backward(g, x, approximate="tanh"),
    ),
    "relu": (lambda x, _: F.relu(x), lambda g, x, _: aten.threshold_backward(g, x, 0)),
    "relu2": (lambda x, _: F.relu(x).square(), lambda g, x, _: 2 * g * F.relu(x)),
}
"""f(x, alpha), and the gradient of x given that of f: (g, x, alpha)."""


@dataclass(frozen=True)
class Gate:
    """The activation between the products of a gated layer. limit: None for no cut. alpha: read by silu alone."""

    act: str
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def value(self, h: Tensor, interleaved: bool = False) -> Tensor:
        """h: (rows, f), or (rows, 2, f) of gate and up, (rows, f, 2) if they are interleaved -> (rows, f)."""
        f, _ = ACTIVATIONS[self.act]
        if h.ndim == 2:
            return f(h, self.alpha)
        gate, up = self._cut(*h.unbind(2 if interleaved else 1))
        return f(gate, self.alpha) * (up + self.shift if self.shift else up)

    def slope_(self, g: Tensor, h: Tensor, interleaved: bool = False) -> Tensor:
        """The gradient of h, given that of the value: in place of h, which it returns. g is overwritten too."""
        f, df = ACTIVATIONS[self.act]
        if h.ndim == 2:
            return h.copy_(df(g, h, self.alpha))
        gate, up = h.unbind(2 if interleaved else 1)
        cut_gate, cut_up = self._cut(gate, up)
        dup = f(cut_gate, self.alpha).mul_(g)
        dgate = df(g.mul_(cut_up + self.shift if self.shift else cut_up), cut_gate, self.alpha)
        if self.limit is not None:
            dgate.masked_fill_(gate > self.limit, 0)
            dup.masked_fill_(up.abs() > self.limit, 0)
        gate.copy_(dgate)
        up.copy_(dup)
        return h

    def _cut(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
