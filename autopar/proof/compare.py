"""How far tensors are from what they should be."""

from __future__ import annotations

import torch

Values = dict[str, torch.Tensor]
"""Tensors by name: "loss/0", "grad/…", "param/…", "buffer/…", "output/…"."""


def compare(ours: Values, reference: Values) -> dict[str, float]:
    """Relative error per tensor; tensors that are zero at the scale of the largest of their kind use that scale."""
    scales: dict[str, float] = {}
    for name, value in reference.items():
        kind = name.split("/")[0]
        scales[kind] = max(scales.get(kind, 0.0), largest(value))
    errors = {}
    for name, expected in reference.items():
        if name not in ours or ours[name].shape != expected.shape:
            errors[name] = float("inf")
            continue
        scale, scale_of_kind = largest(expected), scales[name.split("/")[0]]
        scale = scale_of_kind if scale < 1e-10 * scale_of_kind else scale
        off = difference(ours[name], expected)
        errors[name] = off / scale if scale > 0 else (0.0 if off == 0 else float("inf"))
    for name in ours.keys() - reference.keys():
        errors[name] = float("inf")
    return errors


def largest(x: torch.Tensor) -> float:
    """The largest finite absolute value."""
    x = x.detach()
    if not x.numel():
        return 0.0
    finite = x.double().abs() if not x.is_complex() else x.abs().double()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; NaN equals NaN, and infinity the same infinity."""
    if not a.numel():
        return 0.0
    a, b = (t.detach().double() if not t.is_complex() else t.detach() for t in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs()
    return float(torch.where(same, torch.zeros_like(gap), gap).max())
