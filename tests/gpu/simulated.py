"""An emitted program on simulated GPUs: every rank in turn, then what they said to each other.

Ranks run on fake CUDA tensors through the real communication code (`TorchComm` on torch's `fake` process groups). Nothing is
computed, and no time passes; what is kept is the order of events (simulation/clocks.py), what each of them touches
(accesses.py), what the ranks send (messages.py), and what the host waits for (budgets.py):

    ops.py          every op of torch, as an event of a stream, and     ┐
                    what its kernel demands (preconditions.py)          │
    device.py       torch.cuda's streams and events                     ├─ findings of one rank
    fake_group.py   collectives and messages, as NCCL orders them       ┘
    messages.py     all ranks' messages held against each other         ── findings of all

Rules inside kernels, numbers and time are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import autopar
from autopar.codegen.in_process import InProcess
from autopar.runtime.comm.backends import backend_of
from autopar.runtime.comm.devices import Device
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.program.tables import world_mesh
from autopar.runtime.run.train_loop import LossReader
from autopar.runtime.step.ready import made_ready
from autopar.runtime.step.session import Session
from tests.gpu.fake_cuda import H100, fake_cuda
from tests.gpu.simulation.autograd import autograd_doubles
from tests.gpu.simulation.budgets import Budget
from tests.gpu.simulation.device import Machine, cuda_doubles
from tests.gpu.simulation.fake_group import fake_groups
from tests.gpu.simulation.findings import Finding, told
from tests.gpu.simulation.messages import RankLog, compared
from tests.gpu.simulation.ops import Answer, Ops, zero

STEPS = 2
"""Steps that are simulated: in the second one buffers of the first are used again."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation. findings: of every rank alone, then of all together; budgets: by rank."""

    findings: tuple[Finding, ...]
    budgets: tuple[Budget, ...]
    logs: tuple[RankLog, ...]

    def of(self, kind: str) -> list[Finding]:
        """The findings of one kind."""
        return [one for one in self.findings if one.kind == kind]

    def __str__(self) -> str:
        return told(self.findings)


@contextmanager
def simulated_gpu(
    machine: Machine, ranks: int, device: Device = H100, answer: Answer = zero
) -> Iterator[Callable[[], RankLog]]:
    """Inside, this process is one of so many ranks, on a simulated GPU; what it gives tells the messages so far."""
    with ExitStack() as stack:
        stack.enter_context(fake_cuda(device))
        stack.enter_context(cuda_doubles(machine))
        stack.enter_context(autograd_doubles(machine))
        groups = stack.enter_context(fake_groups(machine, ranks))
        stack.enter_context(mock.patch.object(Tensor, "data_ptr", _address))
        ops = stack.enter_context(Ops(machine, groups, answer))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: ops.listed(tensor)))
        yield groups.log
        groups.end()


def on_ranks(
    ranks: int, body: Callable[[int, Machine], Any], device: Device = H100, answer: Answer = zero
) -> Simulated:
    """Run `body` as every rank, in turn."""
    machines, logs = [], []
    for rank in range(ranks):
        machine = Machine(rank)
        with simulated_gpu(machine, ranks, device, answer) as log:
            result = body(rank, machine)
            machine.settle()
            del result
        machines.append(machine)
        logs.append(log())
    alone = [finding for machine in machines for finding in machine.findings]
    return Simulated((*alone, *compared(logs)), tuple(machine.budget for machine in machines), tuple(logs))


def simulated(
    program: autopar.Program,
    batch: Any,
    steps: int = STEPS,
    body: Callable[[Session], Any] | None = None,
    device: Device = H100,
    answer: Answer = zero,
    before: Callable[[Session], Any] | None = None,
    ahead: bool = True,
) -> Simulated:
    """Training steps of a program on all its ranks, as it is written, whose losses are read as run.py does. batch: a global
    one, in memory of the host; before, body: what comes before and after them; ahead: batches are ready before their steps."""
    options = replace(program.in_process.options, compiler="none")
    modules: InProcess = replace(program.in_process, options=options)
    leaves = program.leaves(batch)

    def rank(_: int, machine: Machine) -> None:
        comm = _watched(machine, TorchComm(world_mesh(modules.pipeline), "cuda"))
        session = modules.session(comm, program.request.update, program.options.seed)
        if before is not None:
            before(session)
        losses = LossReader(session, reads=True, late=backend_of(comm.device).ahead)
        for step in range(1, steps + 1):
            machine.begin_step(step)
            given = [torch.empty(x.shape, dtype=x.dtype) for x in leaves]
            session.next_inputs.ready = made_ready(given, session.taking(False), session.forms) if ahead else None
            loss = session.train_step(given)
            for _ in losses.read(step, None, loss, 0.0, at_once=False):
                pass
        if body is not None:
            body(session)

    return on_ranks(modules.pipeline.WORLD, rank, device, answer)


def _watched(machine: Machine, comm: TorchComm) -> TorchComm:
    """The same, which tells the budget where in a step the rank is."""
    at = comm.at

    def told_at(step: int, action: str) -> None:
        machine.budget.step, machine.budget.action = step, action
        at(step, action)

    comm.at = told_at  # type: ignore[method-assign]
    return comm


def _address(tensor: Tensor) -> int:
    """An address that no other tensor of another storage has. Fake tensors have none."""
    if not isinstance(tensor, FakeTensor):
        return int(torch._C.TensorBase.data_ptr(tensor))
    return (tensor.untyped_storage()._cdata << 14) + tensor.storage_offset() * tensor.element_size()


def by_kind(findings: Sequence[Finding]) -> dict[str, int]:
    """How many there are of each kind."""
    counts: dict[str, int] = {}
    for one in findings:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return counts
