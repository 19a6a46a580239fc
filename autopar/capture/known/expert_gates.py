"""Which activation a module of experts has: its own function beside those that have names, on numbers.

Attributes (`limit`, `alpha`) say what it may be. That it is one is taken from values alone: thousands of numbers in
float64, far out on both sides and beyond every limit, on which both agree to 1e-12. An activation that is none of them
stays what it is, torch ops between two grouped products.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.runtime.kernels.gates import ACTIVATIONS, Gate

TOLERANCE = 1e-12
_NUMBERS = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
QUICK_GELU = 1.702


def gate_of(module: Any) -> tuple[Gate, bool] | None:
    """The activation between the layers of a module with `has_gate`, `_apply_gate` and `act_fn`, and whether gate and up
    are interleaved; None where it is none that has a name."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            own = module._apply_gate(_NUMBERS) if module.has_gate else module.act_fn(_NUMBERS)
        except Exception:  # one that needs more than numbers
            return None
        for interleaved in (False, True) if module.has_gate else (False,):
            h = _NUMBERS
            if module.has_gate:
                h = h.unflatten(1, (-1, 2) if interleaved else (2, -1))
            for gate in _candidates(module):
                if _agree(gate.value(h, interleaved), own):
                    return gate, interleaved
    return None


def _candidates(module: nn.Module) -> list[Gate]:
    """Every activation, with the module's own limits and factors, the plain ones first."""
    if not getattr(module, "has_gate", False):
        return gates_without_limits()
    limits = [None, *_held(module, _LIMITS)]
    alphas = [1.0, *_held(module, _ALPHAS), QUICK_GELU]
    return [
        Gate(act, alpha, limit, shift)
        for shift, limit, act in itertools.product((0.0, 1.0), limits, ACTIVATIONS)
        for alpha in (alphas if act == "silu" else [1.0])
    ]


def gates_without_limits() -> list[Gate]:
    """Every activation by name, plain."""
    return [Gate(act, alpha) for act in ACTIVATIONS for alpha in ((1.0, QUICK_GELU) if act == "silu" else (1.0,))]


def _held(module: nn.Module, names: tuple[str, ...]) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, (int, float))]


def _agree(one: Tensor, other: Any) -> bool:
    same = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    return same and bool(((one - other).abs() <= TOLERANCE * other.abs().clamp_min(1.0)).all())
