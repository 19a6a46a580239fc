"""One plain step of a zoo model on one device: how a batch meets the model and its loss."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.zoo.models import Batch, ZooModel


def split_batch(model: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, targets): what forward has no place for goes to the loss."""
    if isinstance(batch, dict):
        return (), batch, ()
    places = len(inspect.signature(model.forward).parameters)
    return batch[:places], {}, batch[places:]


def loss_of(zoo: ZooModel, model: nn.Module, batch: Batch) -> Tensor:
    args, kwargs, targets = split_batch(model.module if isinstance(model, DistributedDataParallel) else model, batch)
    output = model(*args, **kwargs)
    if zoo.loss_fn is not None:
        return zoo.loss_fn(output, *targets)
    return output if isinstance(output, Tensor) else output.loss
