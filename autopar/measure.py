"""Bytes alive on every rank of a program while it runs: what `predicted.peak_bytes` promises, counted.

The emitted files run with every rank as a thread, each under a dispatch mode of its own that sees every tensor the rank
makes: a storage counts from the op that made it until it is freed, whoever frees it; views share their storage. So
everything that a rank owns is counted: parameters, buffers, gradients, optimizer state, activations, gathered
parameters, buckets, receive buffers. The user's batch belongs to nobody (all threads read one), copies of its slices
to the rank that made them; a message under way belongs to the transport, as it does in NCCL's or Gloo's own buffers.
What kernels use inside one op is not a tensor and not seen, here as little as in the prediction.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from autopar.compiled import ParallelProgram
from autopar.counting import ByteCounter
from autopar.runtime.comm import Comm
from autopar.runtime.session import Session
from autopar.runtime.tables import world_mesh
from autopar.runtime.threads import run_threads


def measure_peak(program: ParallelProgram, batch: Any, steps: int = 2) -> tuple[float, ...]:
    """The most bytes alive on every rank during the last of `steps` steps (or forwards) on a global batch.

    With two steps the optimizer state of the first is there in the second, and buffers that are kept are reused.
    """
    leaves, weights, made = program.leaves(batch), program.weights(), program._program

    def rank(comm: Comm) -> float:
        counter = ByteCounter()
        _send_uncounted(comm, counter)
        with counter:
            session = Session(made.pipeline, made.modules, comm, program.optimizer, program.options.seed)
            session.load_weights(weights)
            for _ in range(steps):
                counter.restart()
                _step(session, leaves, program.training)
            return float(counter.peak)

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    gc.collect()
    gc.disable()  # what only the garbage collector would free counts as alive
    try:
        return tuple(run_threads(made.pipeline.WORLD, world_mesh(made.pipeline), rank))
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _step(session: Session, batch: Sequence[torch.Tensor], training: bool) -> None:
    session.train_step(batch) if training else session.forward(batch, local=True)


def _send_uncounted(comm: Any, counter: ByteCounter) -> None:
    """The thread backend copies a message when it is sent; the copy is the transport's."""
    start = comm.start_messages

    def start_messages(messages: Any) -> Any:
        with counter.paused():
            return start(messages)

    comm.start_messages = start_messages

