"""Example inputs: which of them are the loss's targets, which dim of each is the batch, what one microbatch of them is.

Inputs are a tuple of args or a dict of kwargs of `forward`, with the loss's targets as the last entries. How many targets
there are follows from the loss's signature where it says so, else from what `forward` takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.examples.trees import flatten
from autopar.errors import InputError
from autopar.runtime.data.origin import package_of
from autopar.runtime.program.batches import Plain, fixed_values, is_plain

LossFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, Any]]
"""A loss alone, or the loss and what a step is to give beside it, of the output and the targets."""
MANY = 1 << 30
"""A loss with *args may take this many targets."""
FORGOT = "; did you forget loss_fn=? Without it every entry is an argument of forward"


def split_example(model: nn.Module, inputs: Any, loss_fn: LossFunction | None) -> tuple[Any, int]:
    """(inputs, how many trailing entries are targets for loss_fn). Raises InputError when they fit no split."""
    if isinstance(loss_fn, type):
        raise InputError(f"loss_fn is the class {loss_fn.__name__}; pass one of it, such as {loss_fn.__name__}()")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    if not isinstance(inputs, (tuple, dict)):
        raise InputError(f"example_inputs must be a tuple of args or a dict of kwargs, not {type(inputs).__name__}")
    return _split_kwargs(model, inputs, loss_fn) if isinstance(inputs, dict) else _split_args(model, inputs, loss_fn)


def _split_kwargs(model: nn.Module, inputs: dict[str, Any], loss_fn: LossFunction | None) -> tuple[dict[str, Any], int]:
    """Targets are what `forward` has no parameter for; they go last."""
    signature, targets = inspect.signature(model.forward), 0
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    surplus = {} if takes_all else {k: v for k, v in inputs.items() if k not in signature.parameters}
    if loss_fn is not None and takes_all:
        targets = _target_counts(loss_fn)[0]
    elif loss_fn is not None:
        inputs = {**{k: v for k, v in inputs.items() if k not in surplus}, **surplus}
        targets = len(surplus)
        _check_targets(loss_fn, list(surplus))
    try:
        signature.bind(**{k: inputs[k] for k in list(inputs)[: len(inputs) - targets]})
    except TypeError as error:
        forgot = FORGOT if loss_fn is None and surplus else ""
        raise InputError(
            f"example inputs do not match {type(model).__name__}.forward{signature}: {error}{forgot}"
        ) from error
    return inputs, targets


def fixed_inputs(model: nn.Module, inputs: Any) -> dict[str, Plain]:
    """The plain values that a program of these example inputs is compiled for, by name: those that stand beside tensors, and the
    defaults of arguments of `forward` that are left out (None for a default that is no plain value)."""
    left_out: dict[str, Plain] = {}
    if isinstance(inputs, dict):
        parameters = inspect.signature(model.forward).parameters.values()
        named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in inputs)
        left_out = {p.name: p.default if is_plain(p.default) else None for p in named}
    return left_out | fixed_values(inputs)


def _check_targets(loss_fn: LossFunction, names: Sequence[str]) -> None:
    """Raises InputError where the loss cannot be called with the output and so many targets."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *names)
    except TypeError as error:
        what = f"entries of example_inputs that forward does not take ({', '.join(names) or 'there is none'})"
        raise InputError(f"loss_fn{signature} is called with the output and the {what}: {error}") from error


def _split_args(model: nn.Module, inputs: tuple[Any, ...], loss_fn: LossFunction | None) -> tuple[tuple[Any, ...], int]:
    """The fewest targets that the loss takes and that leave what `forward` takes."""
    signature = inspect.signature(model.forward)
    least, most = _target_counts(loss_fn) if loss_fn is not None else (0, 0)
    problem: Exception | str = f"the loss takes {least} targets"
    for targets in range(least, (min(most, len(inputs)) if loss_fn is not None else least) + 1):
        try:
            signature.bind(*inputs[: len(inputs) - targets])
        except TypeError as error:
            problem = error
        else:
            return inputs, targets
    forgot = FORGOT if loss_fn is None and len(inputs) > 1 and str(problem).startswith("too many") else ""
    raise InputError(
        f"example inputs do not match {type(model).__name__}.forward{signature}: got {len(inputs)} positional inputs"
        f"{f', {least} of them for loss_fn' if least else ''} ({problem}){forgot}"
    )


def _target_counts(loss_fn: LossFunction) -> tuple[int, int]:
    """(fewest, most) targets that the loss takes after the output; optional arguments of torch's own losses (weight,
    reduction, …) are no targets."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return 1, 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    by_torch = package_of(function) == "torch"
    most = required if by_torch else len(positional)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        most = MANY + 1
    return max(required - 1, 0), max(most - 1, 0)


def check_batch_dims(batch_dims: Any, leaves: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises InputError where `Options.batch_dims` names an input, or a dim, that does not exist."""
    if isinstance(batch_dims, dict) and (unknown := batch_dims.keys() - set(names)):
        raise InputError(
            f"Options.batch_dims names {', '.join(map(repr, sorted(unknown)))}; inputs are {', '.join(names)}"
        )
    if isinstance(batch_dims, (list, tuple)) and len(batch_dims) > len(leaves):
        raise InputError(f"Options.batch_dims has {len(batch_dims)} entries for {len(leaves)} inputs")
    for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        dim = batch_dim(batch_dims, index, name, default=None)
        if dim is not None and not 0 <= dim < leaf.ndim:
            raise InputError(f"Options.batch_dims says dim {dim} of input {name}, whose shape is {tuple(leaf.shape)}")


def batch_dim(batch_dims: Any, index: int, name: str, default: int | None = 0) -> int | None:
    """The batch dim of an input as `Options.batch_dims` gives it, by name or in order."""
    if isinstance(batch_dims, dict):
        return batch_dims.get(name, default)
    return batch_dims[index] if batch_dims is not None and index < len(batch_dims) else default


def batch_size(inputs: Any, batch_dims: Any) -> int:
    """Size of the batch dim of the first input that has one; 1 where none has."""
    leaves, names, _ = flatten(inputs)
    for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        dim = batch_dim(batch_dims, index, name)
        if leaf.ndim and dim is not None:
            return int(leaf.shape[dim])
    return 1


def microbatch(inputs: Any, batch_dims: Any, parts: int) -> Any:
    """Example inputs of one of `parts` microbatches (only shapes matter)."""

    def cut(value: torch.Tensor, dim: int) -> torch.Tensor:
        return value.narrow(dim, 0, value.shape[dim] // parts)

    return inputs if parts == 1 else _with_batches(inputs, batch_dims, cut)


def repeated(inputs: Any, batch_dims: Any, times: int) -> Any:
    """Example inputs of a batch that is so many times as large: the samples again and again."""

    def repeat(value: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([value] * times, dim)

    return inputs if times == 1 else _with_batches(inputs, batch_dims, repeat)


def _with_batches(inputs: Any, batch_dims: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """The inputs, those changed that have the batch along a dim."""
    leaves, names, _ = flatten(inputs)
    size = leaves[0].shape[batch_dim(batch_dims, 0, names[0]) or 0]
    indices = iter(range(len(leaves)))

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            index = next(indices)
            dim = batch_dim(batch_dims, index, names[index])
            batched = value.ndim and dim is not None and value.shape[dim] == size
            return change(value, dim or 0) if batched else value
        if isinstance(value, dict):
            return {k: changed(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v) for v in value)
        return value

    return changed(inputs)
