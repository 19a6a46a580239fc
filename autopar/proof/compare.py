"""How far tensors are from what they should be, measured so that "ok" means ok and an alarm is one.

Every tensor is measured against what the step makes of it (`_scales`):

    |ours - reference| ≤ tolerance · scale

- A gradient, loss or output is measured against its own largest entry, a parameter or buffer against its largest
  movement: an update that is halved or dropped is as wrong as the update is large, however large the parameter is.
- No tensor is known better than its terms are rounded. One whose value is zero by cancellation (the gradient of a bias in
  front of a normalization) consists of rounding alone, so scales are no smaller than a few roundings of the tensor
  itself, of how it began, and of the largest tensor of its kind.
- What rounding becomes can be larger than that, where a step amplifies it: Adam makes an update of full size out of a
  gradient that is zero, and a running mean follows. So, where a tensor is off, the reference is run again out of
  parameters `nudged` by far less than the tolerance, and how far each of its tensors moves says how large rounding becomes
  there (`noise`). What is not rounding moves by about its share of the nudge, a thousandth of the tolerance: noise excuses
  nothing that is halved or missing. Gradients, losses and outputs, which no optimizer has amplified, are excused up to the
  scale of the largest of their kind only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Values = dict[str, torch.Tensor]
"""Tensors by name: "loss/0", "grad/…", "param/…", "buffer/…", "output/…"."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_ROUNDINGS = 45
"""The number of roundings of its largest term that an entry may be off by."""


def compare(
    ours: Values,
    reference: Values,
    start: Values | None = None,
    noise: Sequence[Values] = (),
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:
    """Error per tensor relative to its scale.

    start: parameters and buffers before the first step. noise: the reference out of nudged parameters. dtype: in which all
    was computed.
    """
    scales = _scales(reference, start or {}, noise, dtype)
    errors = {name: _error(ours.get(name), expected, scales[name]) for name, expected in reference.items()}
    return errors | dict.fromkeys(ours.keys() - reference.keys(), float("inf"))


def _error(ours: torch.Tensor | None, expected: torch.Tensor, scale: float) -> float:
    if ours is None or ours.shape != expected.shape or _sort(ours) != _sort(expected):
        return float("inf")
    off = difference(ours, expected)
    return off / scale if scale > 0 else (0.0 if off == 0 else float("inf"))


def _sort(x: torch.Tensor) -> tuple[bool, bool]:
    return x.is_complex(), x.is_floating_point()


def _scales(reference: Values, start: Values, noise: Sequence[Values], dtype: torch.dtype) -> dict[str, float]:
    rounding = min(_ROUNDINGS * torch.finfo(dtype).eps / TOLERANCE[dtype], 1.0)
    of_kind: dict[str, float] = {}
    for name, value in reference.items():
        of_kind[_kind(name)] = max(of_kind.get(_kind(name), 0.0), largest(value))
    scales = {}
    for name, value in reference.items():
        begun = start.get(name.partition("/")[2]) if _kind(name) in ("param", "buffer") else None
        moved = difference(value, begun) if begun is not None and begun.shape == value.shape else largest(value)
        moved = moved if moved < float("inf") else largest(value)
        scale = max(moved, rounding * of_kind[_kind(name)])
        explained = max((difference(value, other[name]) for other in noise), default=0.0) / _nudge(dtype)
        updated = _kind(name) in ("param", "buffer")
        scales[name] = max(scale, explained if updated else min(explained, of_kind[_kind(name)]))
    return scales


def _kind(name: str) -> str:
    return name.partition("/")[0]


def nudged(x: torch.Tensor, dtype: torch.dtype, nudge: int) -> torch.Tensor:
    """The tensor with every entry a little larger or smaller, by chance (0: the tensor); integers as they are."""
    if nudge == 0 or not (x.is_floating_point() or x.is_complex()):
        return x
    generator = torch.Generator().manual_seed(nudge)
    larger = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    return torch.where(larger, x * (1 + _nudge(dtype)), x * (1 - _nudge(dtype)))


def _nudge(dtype: torch.dtype) -> float:
    """The size of a nudge, relative to each entry: far less than the tolerance, where the dtype knows such numbers."""
    return max(1e-3 * TOLERANCE[dtype], 4 * torch.finfo(dtype).eps)


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
