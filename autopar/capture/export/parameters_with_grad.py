"""The parameters that a backward from the loss reaches, read off autograd's graph without running it."""

from __future__ import annotations

import torch
from torch import nn


def parameters_reached(loss: torch.Tensor, step: nn.Module) -> frozenset[str]:
    """Names (of tied parameters all) whose gradient `loss.backward()` would fill."""
    with torch._C.DisableTorchFunction():
        root = loss.grad_fn
        leaves = {id(loss)} if root is None and loss.requires_grad else set()
        stack, seen = [root], {root}
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.add(id(variable))
            for following, _ in node.next_functions if node is not None else ():
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return frozenset(name for name, p in step.named_parameters(remove_duplicate=False) if id(p) in leaves)
