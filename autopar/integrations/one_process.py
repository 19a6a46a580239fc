"""Every rank runs the loop of one process: what accelerate tells the packages above it about how many there are.

Under torchrun accelerate gives each process a part of the batches, averages losses and sums counts over processes. A program of
autopar takes global batches, the same on every rank, and gives every rank the loss of all of it; so each rank is told to be the
only process, and does what the script would do on one device. Which rank writes files is still that of torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from autopar.errors import InputError

_ELSEWHERE = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that torchrun started."""

    rank: int
    count: int


def ranks_here() -> Ranks:
    """The ranks of the default process group; one where there is none."""
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks(0, 1)


def as_one_process() -> Ranks:
    """Tell accelerate that this process is the only one, from now on, and give where it stands really. Raises InputError where
    accelerate was set up for another way of being parallel."""
    state = PartialState()
    if state.distributed_type in _ELSEWHERE:
        raise InputError(
            f"accelerate is set up for {state.distributed_type.value}, which shards the model in its own way; start the script "
            "with torchrun alone, without an accelerate config or ACCELERATE_USE_… variables"
        )
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared != {}:
            shared["num_processes"], shared["distributed_type"] = 1, DistributedType.NO
    return ranks_here()


@contextmanager
def as_first_rank() -> Iterator[None]:
    """A context in which accelerate takes this process for the first one: what is seeded by rank must be alike on all of them."""
    state = PartialState()
    rank = state.process_index
    state.process_index = 0
    try:
        yield
    finally:
        state.process_index = rank
