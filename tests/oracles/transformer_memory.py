"""Bytes of transformer training in the formulas of the texts: activations of GPT layers, and model states under ZeRO.

Korthikanti et al. 2022 in their letters (s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks, L layers,
v vocabulary, p pipeline stages, V chunks each), and Rajbhandari et al. 2020; both exact on their tables.
"""

from __future__ import annotations

MIXED_ADAM_K = 12
"""Bytes per parameter of fp32 master weights and Adam's two moments."""


def zero_bytes(
    params: float, ranks: int, stage: int, weight: float = 2, grad: float = 2, K: float = MIXED_ADAM_K
) -> float:
    """Model-state bytes per rank: Z0 (w+g+K)P, Z1 (w+g)P + KP/N, Z2 wP + (g+K)P/N, Z3 (w+g+K)P/N."""
    kept = {0: weight + grad + K, 1: weight + grad, 2: weight, 3: 0.0}[stage]
    return params * (kept + (weight + grad + K - kept) / ranks)


def korthikanti_layer_bytes(
    s: int, b: int, h: int, a: int, t: int = 1, *, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Activation bytes of one GPT layer (16 bits, 4h MLP, scores kept unless recompute is selective or full)."""
    if recompute == "full":
        return 2 * s * b * h
    scores = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    if sequence_parallel:
        return s * b * h * (34 / t + scores)
    return s * b * h * (10 + 24 / t + scores)


def korthikanti_total_bytes(
    s: int, b: int, h: int, a: int, L: int, v: int, t: int, p: int, V: int, *, sequence_parallel: bool, recompute: str
) -> float:
    """Activations of the first stage under 1F1B with V chunks: L layers times 1 + (p-1)/(pV), plus input and output."""
    layers = L * (1 + (p - 1) / (p * V) if V > 1 else 1.0)
    split = t if sequence_parallel else 1
    extras = s * b * h * p / split
    if p == 1:
        extras += 4 * s * b * h / split + 4 * s * b * v / t
    one = korthikanti_layer_bytes(s, b, h, a, t, sequence_parallel=sequence_parallel, recompute=recompute)
    return layers * one + extras
