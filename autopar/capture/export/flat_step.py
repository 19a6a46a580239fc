"""The user's model and loss as one module over flat tensor leaves, which is what is traced.

A run of it gives the outputs and the conditions under which the step is the example's, and tells beside them what a trace
cannot: which Python state changed, what the loss depends on, and the structure of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture.before.state import Change, state_of
from autopar.capture.examples.trees import flatten, rebuild, tensors_of_extras
from autopar.capture.export.parameters_with_grad import parameters_reached
from autopar.capture.exported import Gives
from autopar.capture.known.known_transformers import without_cache
from autopar.capture.while_traced.alike import Repeats
from autopar.capture.while_traced.decisions import Condition, Decisions
from autopar.capture.while_traced.scalar_outputs import NoLoss, loss_and_extras, path_among_others
from autopar.capture.while_traced.watch import memory_of, watched
from autopar.errors import CaptureError, InputError


@dataclass
class Seen:
    """The facts that a run of the step tells beside its outputs, as far as it came. changes: of Python state. conditions:
    values under which the step is the example's, lines that ask, and the numbers of the questions. structure: of outputs, of
    a training step those beside the loss (extras: so many). reached: parameters that the loss depends on. selects: whether a
    mask selected rows."""

    changes: list[Change] = field(default_factory=list)
    training: bool = False
    structure: Any = None
    extras: int = 0
    loss_path: str = ""
    no_loss: NoLoss | None = None
    reached: frozenset[str] = frozenset()
    conditions: list[tuple[bool, str, int | None]] = field(default_factory=list)
    selects: bool = False


class FlatStep(nn.Module):
    """The user's model and loss as one module over flat tensor leaves."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        structure: Any,
        names: Sequence[str],
        targets: int,
        pieces: int,
        to_train: bool = False,
        gives: Gives = "step",
    ) -> None:
        """names: of the leaves. to_train: see `capture_program`."""
        super().__init__()
        self.owned: dict[int, str] | None = memory_of(model)
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure
        self.names = [str(name) for name in names]
        self.targets = targets
        self.pieces = pieces
        self.to_train = to_train
        self.gives = gives
        self.seen = Seen()
        self.decisions: Decisions | None = None
        self.repeats: Repeats | None = None

    def _asked(self) -> int:
        """How many questions about data were answered so far."""
        return 0 if self.decisions is None else self.decisions.given

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs, then the conditions under which the step is the example's."""
        with self.decisions.taken() if self.decisions is not None else nullcontext():
            outputs, conditions = self._outputs(leaves)
        self.seen.conditions = [(condition.value, condition.asked, None) for condition in conditions]
        if self.decisions is not None:
            conditions = [*conditions, *self.decisions.conditions]
            self.seen.conditions += [(c.value, c.asked, i) for i, c in enumerate(self.decisions.conditions)]
        return (*outputs, *(condition.tensor for condition in conditions))

    def _outputs(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], list[Condition]]:
        args, kwargs, targets = split_inputs(rebuild(self.structure, list(leaves)), self.targets, self.model)
        state = state_of(self.model, self.loss_fn)
        ask = None if self.decisions is None else self.decisions.answer
        with watched(self.model, self.owned, dict(zip(self.names, leaves, strict=True)), ask) as watch:
            if self.repeats is not None:
                self.repeats.noted = lambda: (watch.noted(), self._asked())
                self.repeats.is_followed = watch.follows
            with _assigned_buffers_written(self.model):
                asked = without_cache(self.model, kwargs) if self.loss_fn is None and self.gives == "step" else kwargs
                out = self.model(*args, **asked)
            loss, extras = loss_and_extras(out, self.loss_fn, targets, self.to_train)
            if asked is not kwargs and (loss is None or not loss.requires_grad):
                out = self.model(*args, **kwargs)  # nothing is trained, and the cache is what the step gives
        self.seen.changes = state.changes()
        self.seen.selects = any(watch.masks.noted())
        has_loss = self.loss_fn is not None or (loss is not None and loss.requires_grad)
        self.seen.training = has_loss and self.gives == "step"
        if not self.seen.training:
            if watch.in_inference:
                raise watch.in_inference[0]
            if self.gives != "step":
                return self._evaluated(loss, out if extras is None else extras), watch.held
            tensors, _, structure = flatten(out)
            if not tensors:
                raise InputError(f"the model returned no tensor ({_describe(out)}); pass a loss_fn or return tensors")
            self.seen.structure, self.seen.no_loss = structure, NoLoss.of(out)
            return tuple(tensors), watch.held
        loss = _scalar(loss)
        self.seen.reached = parameters_reached(loss, self)
        self.seen.loss_path = path_among_others(out, loss) if self.loss_fn is None else ""
        beside, self.seen.structure = tensors_of_extras(extras)
        self.seen.extras = len(beside)
        return (self._piece(loss), *(tensor.detach() for tensor in beside)), watch.held

    def _evaluated(self, loss: Any, out: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of the pair (loss or None, outputs or None)."""
        if loss is None and self.gives == "loss":
            raise InputError(f"the loss alone is asked for, and the model has none ({_describe(out)}); pass a loss_fn")
        pair = None if loss is None else _scalar(loss).reshape(()), None if self.gives == "loss" else out
        tensors, _, self.seen.structure = flatten(pair)
        if not tensors:
            raise InputError(f"the model returned no tensor ({_describe(out)}); pass a loss_fn or return tensors")
        return tuple(tensors)

    def _piece(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.reshape(()) / self.pieces if self.pieces > 1 else loss.reshape(())


def _scalar(loss: Any) -> torch.Tensor:
    """The loss. Raises InputError where it is no real number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError(
            f"loss_fn must return a scalar tensor, or (scalar, what the step is to give beside it), it returned "
            f"{_describe(loss)}"
        )
    if loss.is_complex():
        raise InputError(f"the loss is complex ({loss.dtype}); take its real part or its magnitude")
    return loss


@contextmanager
def _assigned_buffers_written(model: nn.Module) -> Iterator[None]:
    """`self.buffer = value` becomes a write to the buffer: export would forget the assignment without a word. A buffer that no
    checkpoint has may become one of another size (a mask that grows with the sequence), as other state that a step leaves."""
    before = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    yield
    assigned = [(m, name, old, m._buffers[name]) for m, name, old in before if m._buffers.get(name) is not old]
    same_size = [(m, name, old, new) for m, name, old, new in assigned if new is not None and new.shape == old.shape]
    for module, name, old, new in assigned:
        kept_or_grown = new is not None and (new.shape == old.shape or name in module._non_persistent_buffers_set)
        if not kept_or_grown:
            raise CaptureError(
                f"forward replaces the buffer {name} of shape {tuple(old.shape)} by {_describe(new)}; a buffer keeps its shape "
                "from step to step, unless it is none of the state_dict (persistent=False)"
            )
    if not same_size:
        return  # an empty `no_grad` would be a region of the graph, which export rewrites as a whole
    with torch.no_grad():
        values = [new.detach().clone() for *_, new in same_size]
        for (module, name, old, _), value in zip(same_size, values, strict=True):
            old.copy_(value)
            module._buffers[name] = old


def split_inputs(value: Any, targets: int, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, targets) of one batch: the last `targets` entries go to the loss."""
    if isinstance(value, dict):
        names = list(value)
        cut = len(names) - targets
        return (), {k: value[k] for k in names[:cut]}, tuple(value[k] for k in names[cut:])
    cut = len(value) - targets
    return tuple(value[:cut]), {}, tuple(value[cut:])


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
