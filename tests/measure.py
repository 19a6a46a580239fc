"""Bytes alive on every rank of a program while it runs: what `predicted.peak_bytes` promises, counted.

The emitted files run with every rank as a thread, each under a dispatch mode of its own that sees every tensor the rank
makes: a storage counts from the op that made it until it is freed, whoever frees it; views share their storage. So
everything that a rank owns is counted: parameters, buffers, gradients, optimizer state, activations, gathered
parameters, buckets, receive buffers. The user's batch belongs to nobody (all threads read one), copies of its slices
to the rank that made them; a message under way belongs to the transport, as it does in NCCL's or Gloo's own buffers.
What kernels use inside one op is not a tensor and not seen; the prediction counts it for GPUs, whose kernels do not run here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from autopar.counter import ByteCounter
from autopar.program import ParallelProgram
from autopar.runtime.comm.comm import Comm
from autopar.runtime.program.run_options import DEFAULTS
from autopar.runtime.step.session import Session

T = TypeVar("T")


def measure_peak(program: ParallelProgram, batch: Any, steps: int = 2) -> tuple[float, ...]:
    """The most bytes alive on every rank during the last of `steps` steps (or forwards) on a global batch.

    With two steps the optimizer state of the first is there in the second, and buffers that are kept are reused. What
    rests in memory tiers is not counted (`measure_tiers`).
    """
    return tuple(peak for peak, _ in measure_tiers(program, batch, steps))


def measure_tiers(program: ParallelProgram, batch: Any, steps: int = 2) -> tuple[tuple[float, dict[str, float]], ...]:
    """The same with the most bytes in every memory tier: (on the device, by tier) per rank."""
    leaves = program.leaves(batch)

    def body(session: Session, counter: ByteCounter) -> tuple[float, dict[str, float]]:
        for _ in range(steps):
            counter.restart()
            _step(session, leaves, program.training)
        return float(counter.peak), {tier: float(peak) for tier, peak in counter.parked_peak.items()}

    return tuple(_counted(program, body))


def measure_in_turn(program: ParallelProgram, batches: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
    """The most bytes alive on every rank during the step on each of these global batches, of any buckets, in turn; counted the
    second time round, when the optimizer state is there."""
    leaves = [program.leaves(batch) for batch in batches]

    def body(session: Session, counter: ByteCounter) -> list[float]:
        peaks: list[float] = []
        for i, batch in enumerate([*leaves, *leaves]):
            counter.restart()
            _step(session, batch, program.training)
            peaks += [float(counter.peak)] if i >= len(leaves) else []
        return peaks

    return tuple(zip(*_counted(program, body), strict=True))


def measure_turns(program: ParallelProgram, turns: Sequence[tuple[str, Any]]) -> tuple[tuple[float, ...], ...]:
    """The most bytes alive on every rank during each of these steps, (entry, global batch) in turn; counted the second time
    round."""
    prepared = [(name, (program.entry(name) if name else program).leaves(batch)) for name, batch in turns]

    def body(session: Session, counter: ByteCounter) -> list[float]:
        peaks: list[float] = []
        for i, (name, batch) in enumerate([*prepared, *prepared]):
            counter.restart()
            if session.entry(name).training:
                session.train_step(batch, name)
            else:
                session.forward(batch, local=True, entry=name)
            peaks += [float(counter.peak)] if i >= len(prepared) else []
        return peaks

    return tuple(zip(*_counted(program, body), strict=True))


def train_within(
    program: ParallelProgram, batches: Sequence[Any], limit_bytes: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train one step on each batch with every rank held to a limit: (losses, the most bytes alive on every rank).

    Raises MemoryLimitError, which names the rank, the op and what it asked for, where a rank needs more.
    """
    leaves_of_batches = [program.leaves(batch) for batch in batches]

    def body(session: Session, counter: ByteCounter) -> tuple[list[float], float]:
        return [session.train_step(leaves).item() for leaves in leaves_of_batches], float(counter.peak)

    ranks = _counted(program, body, limit_bytes)
    return tuple(ranks[0][0]), tuple(peak for _, peak in ranks)


def _counted(
    program: ParallelProgram, body: Callable[[Session, ByteCounter], T], limit_bytes: float | None = None
) -> list[T]:
    """Run `body` on every rank, a thread each with its own counter, from the start of the session on."""
    weights = program.weights()
    modules = replace(program.in_process, options=DEFAULTS)  # a compiler's buffers are not seen

    def rank(comm: Comm) -> T:
        counter = ByteCounter(limit_bytes, f"rank {comm.rank}")
        _send_uncounted(comm, counter)
        with counter:
            session = modules.session(comm, program.request.update, program.options.seed)
            session.load_weights(weights)
            return body(session, counter)

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # what only the garbage collector would free counts as alive
    try:
        return modules.run_bare(rank)
    finally:
        if collecting:
            gc.enable()


def _step(session: Session, batch: Sequence[torch.Tensor], training: bool) -> None:
    session.train_step(batch) if training else session.forward(batch, local=True)


def _send_uncounted(comm: Comm, counter: ByteCounter) -> None:
    """The thread backend copies a message when it is sent; the copy is the transport's."""
    start = comm.start_messages

    def start_messages(messages: Any) -> Any:
        with counter.paused():
            return start(messages)

    comm.start_messages = start_messages  # type: ignore[method-assign]
