"""Functions of torch that export does not see through, as functions that it does.

They compute the same; a torch function mode (`autopar.capture.while_traced.watch`) puts them in place of a call while a
model is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.while_traced.windows import as_strided

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Hold = Callable[[Tensor, bool], None]
"""Called with a tensor without dims and its truth, which is checked when the program runs."""


def rewritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Hold) -> Call:
    """The call (function, arguments, named arguments) that is traced instead of this one. hold: called with what must be so
    when the program runs."""
    other = _REWRITTEN.get(func)
    return (func, args, kwargs) if other is None else (other(func, hold), args, kwargs)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}


def _ctc_loss(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """Lengths as tensors: with lists torch computes the mean with a tensor of its own that has no fake."""

    def run(
        log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **named: Any
    ) -> Tensor:
        return func(log_probs, targets, _numbers(input_lengths), _numbers(target_lengths), *rest, **named)

    return run


def _assert_async(func: Any, hold: Hold) -> Callable[..., None]:
    """An assertion that no host waits for is one of the program's guards."""

    def run(condition: Tensor, *message: str) -> None:
        hold((condition != 0).reshape(()), True)

    return run


def _numbers(values: Tensor | Sequence[int]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.int64)


def _gaussian_nll_loss(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """The loss without its branch on negative variances, which are an error at run time instead."""

    def run(
        input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
    ) -> Tensor:
        if isinstance(var, (int, float)):
            return func(input, target, var, full, eps, reduction)
        hold((var < 0).any(), False)
        if var.shape != input.shape and input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        differ = [m for n, m in zip(input.shape, var.shape, strict=False) if n is not m and n != m]
        if input.ndim != var.ndim or differ not in ([], [1]) or reduction not in _REDUCTIONS:
            raise ValueError(
                f"gaussian_nll_loss of {tuple(input.shape)} takes no var of {tuple(var.shape)}, {reduction!r}"
            )
        var = torch.where(var < eps, eps + (var - var.detach()), var)  # torch clamps unseen by autograd
        loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
        loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
        return _REDUCTIONS[reduction](loss)

    return run


def _linear_cross_entropy(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """The loss over logits, whatever eager PyTorch is told of computing it in chunks: a program does so where that pays
    (`autopar.capture.graph.head_losses`)."""

    def run(*args: Any, options: Any = None, **named: Any) -> Tensor:
        return func(*args, **named)

    return run


def _instance_norm(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """The norm with the update of running statistics, which torch hides in the op: means over samples of what each has."""

    def run(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not use_input_stats or running_mean is None or running_var is None:
            return func(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        with torch.no_grad():
            var, mean = torch.var_mean(input.detach(), tuple(range(2, input.ndim)))
            for running, now in ((running_mean, mean), (running_var, var)):
                running.mul_(1 - momentum).add_(now.mean(0).to(running.dtype), alpha=momentum)
        return func(input, None, None, weight, bias, True, momentum, eps)

    return run


def _cov(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """Covariances without the branches on the sums of weights, which torch takes on the tensor of their number too."""

    def run(
        input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
    ) -> Tensor:
        inexact = input.is_floating_point() or input.is_complex()
        if fweights is not None or aweights is not None or input.ndim > 2 or input.numel() == 0 or not inexact:
            return func(input, correction=correction, fweights=fweights, aweights=aweights)
        rows = input.reshape(-1, input.shape[-1]) if input.ndim else input.reshape(1, 1)
        apart = rows - rows.mean(1, keepdim=True)
        return (apart @ apart.t().conj() / max(rows.shape[1] - correction, 0)).squeeze()

    return run


def _corrcoef(func: Any, hold: Hold) -> Callable[..., Tensor]:
    """Correlations by way of covariances: within the unit circle along both of its axes, as torch clips them."""

    def run(input: Tensor) -> Tensor:
        cov = _cov(torch.cov, hold)(input)
        if not cov.ndim:
            return cov / cov
        spread = cov.diagonal().sqrt().real if cov.is_complex() else cov.diagonal().sqrt()
        scaled = cov / spread.unsqueeze(1) / spread.unsqueeze(0)
        if scaled.is_complex():
            return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
        return scaled.clip(-1, 1)

    return run


def cumulative(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of torch's batch norms: without a momentum the running statistics are means over all batches so far, and the
    number of these is no number in Python, but the buffer that counts them."""

    def run(self: Any, input: Tensor) -> Tensor:
        if self.momentum is not None or not (self.training and self.track_running_stats):
            return forward(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # these become the batch's
        with torch.no_grad():
            share = 1.0 / self.num_batches_tracked.to(mean.dtype)
            for running, now in ((self.running_mean, mean), (self.running_var, var)):
                running.mul_(1 - share).add_(now * share)
        return y

    return run


_REWRITTEN: dict[Any, Callable[[Any, Hold], Callable[..., Any]]] = {
    torch._assert_async: _assert_async,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.linear_cross_entropy: _linear_cross_entropy,
    F.instance_norm: _instance_norm,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.as_strided: lambda func, hold: as_strided,
    Tensor.as_strided: lambda func, hold: as_strided,
}
