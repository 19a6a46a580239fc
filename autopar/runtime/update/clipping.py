"""The norm of all gradients of the program, although each rank holds shards and copies of some of them.

    ||g||_p  =  ( Σ over ranks, over the gradients counted there:  ||shard||_p ^ p ) ^ (1/p)         max for p = ∞

A shard is counted on one of the ranks that hold the same one (`counts`: the first along every axis that does not shard
it), a parameter of several stages where its owner is. So one small all-reduce makes the norm of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.mesh import SpecDims
from .update_rule import norm_power


def counts(spec: SpecDims, comm: Comm) -> bool:
    """Whether this rank is the one that counts its shard under a spec."""
    sharding = {axis for dim in spec for axis in dim}
    return all(index == 0 for axis, index in comm.position.items() if axis not in sharding)


def powered_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """This rank's part of the sum above (of the maximum), in float64; shape (1,)."""
    kind, power = norm_power(norm_type)
    nonempty = [grad for grad in grads if grad.numel()]
    if not nonempty:
        return torch.zeros(1, dtype=torch.float64, device=device)
    lists = []
    for (_, dtype), members in alike(nonempty).items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        lists.append(torch.stack(torch._foreach_norm(members, norm_type, dtype=wide)).to(device, torch.float64))
    norms = torch.cat(lists)
    return (norms.amax() if kind == "max" else (norms**power).sum()).reshape(1)


def count_not_finite(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """How many of these tensors have an entry that is no number, or infinite; float64, shape (1,). One pass, which reads."""
    real = [torch.view_as_real(v) if v.is_complex() else v for v in values if v.numel()]
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(real, math.inf)] if real else []
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return (~torch.stack(norms).isfinite()).sum().to(torch.float64).reshape(1)


def both_nan(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Where both tensors of a pair, none of them empty, have an entry that is no number: 1, else 0; float64, shape (pairs,)."""
    found = []
    for values in zip(*pairs, strict=True):
        norms = torch._foreach_norm([torch.view_as_real(v) if v.is_complex() else v for v in values], math.inf)
        found.append(torch.stack([norm.to(device, torch.float64) for norm in norms]).isnan())
    return (found[0] & found[1]).double() if found else torch.zeros(0, dtype=torch.float64, device=device)


def joined_norm(total: Tensor, norm_type: float) -> Tensor:
    """The norm of the whole from the reduced parts."""
    return total ** (1.0 / norm_power(norm_type)[1])


def alike(values: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors by where they lie and their dtype: those of one list go into one kernel, on devices that have such kernels."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        lists.setdefault((value.device, value.dtype), []).append(value)
    return lists


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which gradients are multiplied (torch.nn.utils.clip_grad_norm_ has the same 1e-6)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
