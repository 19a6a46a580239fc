"""Selections by a mask, `x[mask]`: how many rows only the data decides, so they stay in their places until they are used.

A sum or a mean of them is that of all rows with zeros in place of the others, a cross-entropy ignores the others, and the
CTC loss reads targets row by row. Whatever else is asked of the rows is an error at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.explain import refusal

_INSTEAD = (
    "which only sum(), mean(), cross_entropy and ctc_loss may read; keep all rows and give those outside the mask no weight: "
    "torch.where(mask, x, 0), ignore_index, or sums of x * mask. A loop over the experts that a batch chose: autopar.grouped_mm, "
    "or another forward to trace the module by: @autopar.forward_of(TheModule)"
)


class Selected:
    """The rows of `x` where `mask`, which has the leading dims of x, is true."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x, self.mask = x, mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        use = _USES.get(func)
        if use is None:
            raise _refused(getattr(func, "__name__", str(func)))
        return use(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise _refused(name)

    def sum(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The sum over all rows (dim 0 of them), or over all elements."""
        if dim not in (None, 0, (0,), [0]) or keepdim:
            raise _refused(f"sum over dim {dim}")
        kept = self.filled()
        return kept.sum() if dim is None else kept.sum(tuple(range(self.mask.ndim)))

    def mean(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The mean over all rows (dim 0 of them), or over all elements."""
        of_a_row = self.x[(0,) * self.mask.ndim].numel() if dim is None else 1
        return self.sum(dim, keepdim) / (self.mask.sum() * of_a_row)

    def filled(self, value: float = 0) -> Tensor:
        """All rows, those that are not selected filled: neither their values nor their gradients are seen."""
        mask = self.mask.reshape(*self.mask.shape, *[1] * (self.x.ndim - self.mask.ndim))
        return self.x.masked_fill(~mask, value)


def selected(func: Any, args: Any) -> Selected | None:
    """The selection of a call of torch by a mask of x's leading dims; None for any other call."""
    if func not in (Tensor.masked_select, torch.masked_select, Tensor.__getitem__) or len(args) != 2:
        return None
    x, mask = args
    mask = mask[0] if isinstance(mask, (tuple, list)) and len(mask) == 1 else mask
    if not (isinstance(x, Tensor) and isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim):
        return None
    whole = x.shape == mask.shape or (func is Tensor.__getitem__ and x.shape[: mask.ndim] == mask.shape)
    return Selected(x, mask) if whole else None


def _refused(what: str) -> Exception:
    return refusal(f"asks {what} of the rows that a mask selects, whose number depends on the data", _INSTEAD)


def _ctc_loss(
    log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **options: Any
) -> Tensor:
    """Targets that a mask of (batch, labels) selects, row by row; lengths must be those of its rows."""
    if not (isinstance(targets, Selected) and isinstance(target_lengths, Tensor) and targets.mask.ndim == 2):
        raise _refused("ctc_loss with lengths that are no tensor, or no mask of rows,")
    lengths = targets.mask.sum(-1)
    surplus = torch.ops.autopar.in_range(target_lengths.long() - lengths, 0, 1)
    order = (~targets.mask).to(torch.int8).argsort(dim=1, stable=True)
    return F.ctc_loss(log_probs, targets.x.gather(1, order), input_lengths, lengths + surplus, *rest, **options)


def _cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, *, ignore_index: int = -100, **options: Any
) -> Tensor:
    """The cross-entropy of the selected rows; rows outside the mask are ignored."""
    if not (isinstance(input, Selected) and isinstance(target, Selected) and input.mask is target.mask):
        raise _refused("cross_entropy (which takes scores and targets selected by one and the same mask)")
    if options.get("reduction", "mean") == "none" or target.x.ndim != target.mask.ndim:
        raise _refused("cross_entropy of every row")
    scores, targets = input.filled().reshape(-1, input.x.shape[-1]), target.filled(ignore_index).reshape(-1)
    return F.cross_entropy(scores, targets, weight, ignore_index=ignore_index, **options)


_USES: dict[Any, Callable[..., Tensor]] = {
    F.ctc_loss: _ctc_loss,
    F.cross_entropy: _cross_entropy,
    torch.sum: Selected.sum,
    torch.mean: Selected.mean,
}


def _operator(name: str) -> Callable[..., Any]:
    def asked(self: Selected, *_: Any) -> Any:
        raise _refused(name)

    return asked


for _name in (
    *(
        f"__{side}{op}__"
        for op in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")
        for side in ("", "r")
    ),
    *(f"__{op}__" for op in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "invert")),
    *(f"__{op}__" for op in ("len", "bool", "int", "float", "index", "iter", "getitem", "setitem")),
):
    setattr(Selected, _name, _operator(_name))
