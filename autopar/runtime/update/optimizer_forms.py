"""An optimizer's step as one kernel over all parameters, where torch has one and the user left the form of the step open.

torch's own default on a GPU is a pass over all tensors per operation, which holds several numbers for every parameter for a
moment; the fused kernel holds none. The form is one of the device, not of the training: checkpoints do not carry it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..kernels.kernels import has_fused_update

FORM_KEYS = ("foreach", "fused")
"""The keys of a parameter group that choose the form of its step."""
_FUSED = (Adam, AdamW, SGD)


def is_fusible(optimizer: Optimizer) -> bool:
    """Whether torch has one kernel for all that this optimizer does, and the user asked for it or for no form."""
    return type(optimizer) in _FUSED and all(
        (group.get("fused") or (group.get("fused") is None and group.get("foreach") is None))
        and not (group.get("capturable") or group.get("differentiable"))
        and all(p.is_floating_point() for p in group["params"])
        for group in optimizer.param_groups
    )


def choose_forms(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Choose, before the first step, the fused kernel on devices where it is the better form."""
    for optimizer in optimizers:
        if has_fused_update(device.type) and is_fusible(optimizer):
            for group in optimizer.param_groups:
                group["fused"] = True
