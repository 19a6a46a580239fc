"""Outputs of a model that could be its loss, as one writes them: `out[1]`, `out["loss"]`, `out.loss`.

A model is trained on the scalar that it returns, on `.loss`, on what loss_fn makes of its output, or, where it is meant to be
trained, on the only scalar with a gradient in a tuple, list or dict. One that returns something else is told which of its
outputs to name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.examples.trees import flatten
from autopar.errors import InputError


@dataclass(frozen=True)
class ScalarOutput:
    """One real number of a model's output. path: from `out` on. has_grad: whether a gradient reaches a parameter from it."""

    path: str
    has_grad: bool


def loss_and_extras(out: Any, loss_fn: Any, targets: Sequence[Any], to_train: bool) -> tuple[Any, Any]:
    """The loss of what a model returned, if there is one, and what loss_fn gave beside it. to_train: see `capture_program`."""
    if loss_fn is None:
        return own_loss(out, to_train), None
    given = loss_fn(out, *targets)
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.Tensor)
    return given if is_pair and given[0].numel() == 1 else (given, None)


def own_loss(out: Any, among_others: bool) -> torch.Tensor | None:
    """The loss that a model is trained on where no loss_fn is given, if it returned one. among_others: it may be the only scalar
    with a gradient in a tuple, list or dict that calls nothing a loss."""
    if isinstance(out, torch.Tensor):
        return out if out.ndim == 0 and out.is_floating_point() else None
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.numel() == 1 else None
    if not among_others or not isinstance(out, (tuple, list, dict)) or _calls_something_a_loss(out):
        return None
    scalars = [tensor for _, tensor in _scalars(out, "out") if tensor.ndim == 0 and tensor.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


def path_among_others(out: Any, loss: torch.Tensor) -> str:
    """The place of a loss that `own_loss` takes only among others, as one writes it; "" where that is plain."""
    if own_loss(out, among_others=False) is not None:
        return ""
    return next((path for path, tensor in _scalars(out, "out") if tensor is loss), "")


def _calls_something_a_loss(out: Any) -> bool:
    return hasattr(out, "loss") or (isinstance(out, dict) and "loss" in out)


def scalar_outputs(out: Any, path: str = "out") -> tuple[ScalarOutput, ...]:
    """The scalars in an output, what is called a loss first."""
    found = (ScalarOutput(place, tensor.requires_grad) for place, tensor in _scalars(out, path))
    return tuple(sorted(found, key=lambda one: "loss" not in one.path.lower()))


def _scalars(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.is_floating_point():
            yield path, value
        return
    for part, item in _parts(value):
        yield from _scalars(item, path + part)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, and how one gets there from it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]".replace("'", '"'), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))


@dataclass(frozen=True)
class NoLoss:
    """The output of a model that has no loss: in words, and the scalars in it."""

    returned: str
    scalars: tuple[ScalarOutput, ...]

    @staticmethod
    def of(out: Any) -> NoLoss:
        leaves, _, _ = flatten(out)
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves[:4]) + (", …" if len(leaves) > 4 else "")
        made = "a tensor" if isinstance(out, torch.Tensor) else f"a {type(out).__name__} with tensors"
        return NoLoss(f"{made} of shape {shapes}", scalar_outputs(out))

    def error(self, asked: Sequence[str]) -> InputError:
        """The error for a model that was meant to be trained. asked: for what means nothing in inference."""
        named = [one for one in self.scalars if one.has_grad]
        if named:
            first, *others = named
            also = f" (or {', '.join(one.path for one in others[:3])})" if others else ""
            how = f"if {first.path}{also} is the loss, pass loss_fn=lambda out: {first.path}"
        elif self.scalars:
            how = (
                f"{self.scalars[0].path} is a scalar, but depends on no parameter that requires a gradient: is it detached, "
                "computed under no_grad, or is every parameter frozen?"
            )
        else:
            how = "let it return a scalar, or pass loss_fn(output, *targets), such as torch.nn.functional.cross_entropy"
        return InputError(
            f"{' and '.join(asked)}: that is for training, and there is no loss. A model is trained on the scalar it "
            f"returns, on `.loss` of what it returns, or on the only scalar with a gradient in it; this one returned "
            f"{self.returned}; {how}. To compile it for inference leave {'that' if len(asked) == 1 else 'these'} out"
        )
