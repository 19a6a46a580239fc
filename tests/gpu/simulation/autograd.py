"""Autograd on simulated GPUs, in the few places where a kernel of the runtime differentiates itself.

torch without CUDA cannot record ops of fake CUDA tensors. So what would be recorded runs without a record, and gradients are
new tensors, made by one kernel each from what is known of the results' gradients. While it would be recorded, a recurrent
layer has to be in training mode, without which cuDNN does not differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.gpu.simulation.device import Machine

_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_TRAIN = 6
"""The place among the arguments of a recurrent layer that says whether it is in training mode."""


class _Recurrent(TorchFunctionMode):
    """Reports recurrent layers that are to be differentiated and are not in training mode."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.recording = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.recording and func.__name__ in _RECURRENT and not args[_TRAIN]:
            what = f"{func.__name__} wants to be in training mode where it is differentiated"
            self.machine.report("precondition", what, (self.machine.places.here(),))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The double of torch.enable_grad."""
        before, self.recording = self.recording, True
        try:
            yield
        finally:
            self.recording = before


def _grad(heads: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], **_: Any) -> list[Tensor]:
    """The double of torch.autograd.grad."""
    known = torch.stack([seed.sum() for seed in seeds]).sum()
    return [known.expand(x.shape).clone() for x in inputs]


@contextmanager
def autograd_doubles(machine: Machine) -> Iterator[None]:
    """Inside, nothing is recorded for autograd."""
    with ExitStack() as stack:
        recurrent = stack.enter_context(_Recurrent(machine))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mock.patch.object(torch, "enable_grad", recurrent.recorded))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", _grad))
        yield
