"""Modules of torch whose forward picks rows by what the data say, by forwards of fixed shapes (`autopar.forward_of`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.known.known_blocks import forward_of

NEVER = torch.iinfo(torch.int64).min
"""A class that no target names, for losses that ignore one."""


def any_cluster(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Classes, those of small clusters as often as those of large ones."""
    edges = torch.tensor([0, *module.cutoffs])
    cluster = torch.randint(0, len(edges) - 1, shape, generator=generator)
    low, high = edges[cluster], edges[cluster + 1]
    return low + (torch.rand(shape, generator=generator) * (high - low)).long()


def cluster_of(module: Any, input_: Tensor, target_: Tensor) -> Tensor:
    """Which cluster each target is in; 0 is named by the head itself. Clusters that no target is in have no gradient."""
    return torch.stack([target_ >= cutoff for cutoff in module.cutoffs]).sum(0)


@forward_of(nn.AdaptiveLogSoftmaxWithLoss, integers=any_cluster, chosen=cluster_of)
def adaptive_log_softmax(self: Any, input_: Tensor, target_: Tensor) -> Any:
    """Every cluster for every row, where torch computes those that the targets are in.

    log p(target) = log p(its cluster, by the head) + log p(target among the cluster). input_: (rows, d); target_: (rows),
    or one row without that dim. A target outside of all clusters is none of the head's classes, an error at run time.
    """
    if target_.ndim > 1 or input_.shape[:-1] != target_.shape:
        return nn.AdaptiveLogSoftmaxWithLoss.forward(self, input_, target_)  # which says what is wrong
    x, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
    cluster = cluster_of(self, x, target)
    output = _log_p(self.head(x), torch.where(cluster == 0, target, self.shortlist_size - 1 + cluster))
    for number, (low, _) in enumerate(pairwise(self.cutoffs), 1):
        inside = cluster == number
        among = _log_p(self.tail[number - 1](x), torch.where(inside, target - low, 0))
        output = output + among.masked_fill(~inside, 0)
    result = torch.nn.modules.adaptive._ASMoutput
    return result(output.reshape(target_.shape), -output.mean())


def _log_p(logits: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(logits, target, reduction="none", ignore_index=NEVER)
