"""The reference: the user's model and optimizer, run eagerly on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.examples.trees import flatten
from autopar.capture.export.flat_step import split_inputs
from autopar.capture.known.promoted import cast
from autopar.capture.while_traced.scalar_outputs import loss_and_extras
from autopar.program import ParallelProgram
from autopar.proof.casts import cast_model, map_tensors, promoted
from autopar.proof.compare import Values, nudged
from autopar.runtime.program.extras import named_leaves
from autopar.runtime.step.pipeline import join_microbatches
from autopar.runtime.update.scheduler_steps import step_scheduler
from autopar.runtime.update.update_rule import Named, UpdateRule, make_optimizers


def eager_values(
    program: ParallelProgram, model: nn.Module, batch: Any, steps: int, dtype: torch.dtype, nudge: int = 0
) -> dict[str, torch.Tensor]:
    """The values of the model in `dtype`, by name: outputs, or losses and what is beside them, first gradients, final
    parameters and buffers.

    program: says what the loss and the optimizer's step are. nudge: out of parameters that are a little off (`nudged`).
    """
    reference = cast_model(model, dtype)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(nudged(parameter, dtype, nudge))
    evaluates = program.request.gives != "step"
    if evaluates:
        reference.eval()
    loss_fn = program.request.loss_fn
    loss_fn = cast_model(loss_fn, dtype) if isinstance(loss_fn, nn.Module) else loss_fn
    inputs = map_tensors(batch, lambda t: cast(t, dtype))
    if not program.training:
        with promoted(dtype, model), torch.no_grad():
            if evaluates:
                return {
                    f"output/{i}": t for i, t in enumerate(flatten(_evaluated(program, reference, inputs, loss_fn))[0])
                }
            return {f"output/{i}": t for i, t in enumerate(flatten(run_model(reference, inputs))[0])}
    values: dict[str, torch.Tensor] = {}
    names = names_in_program(program)
    named = {names.get(name, name): p for name, p in reference.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    update = EagerUpdate(program.request.update, list(trained.items()))
    parts = program.plan.microbatches if _apart(program) else 1
    for step in range(steps):
        for p in trained.values():
            p.grad = None
        with promoted(dtype, model):
            total, extras = torch.zeros(()), []
            for piece in microbatches(inputs, parts, program):
                loss, beside = loss_of(reference, piece, loss_fn, program.request.targets)
                (loss / parts).backward()
                total = total + loss.detach() / parts
                extras.append([(name, value.detach().clone()) for name, value in named_leaves(beside)])
        values[f"loss/{step}"] = total.clone()
        values |= {f"output/{step}/{name}": value for name, value in _joined(extras, program).items()}
        update.clip()
        if step == 0:
            values |= {f"grad/{n}": p.grad.clone() for n, p in named.items() if p.grad is not None and p.numel()}
        update.step(total)
    values |= {f"param/{n}": p.detach() for n, p in named.items()}
    persistent = reference.state_dict().keys()
    buffers = dict(reference.named_buffers(remove_duplicate=False))  # casting gave each name of a shared one its own
    values |= {f"buffer/{names.get(n, n)}": buffers[n] for n, _ in model.named_buffers() if n in persistent}
    return values


def names_in_program(program: ParallelProgram) -> Mapping[str, str]:
    """The names that a program has for parameters and buffers of its module, where they are others: those of the first program,
    in an entry of it."""
    held = program.request.held
    return held.names(program.model) if held is not None else {}


def _apart(program: ParallelProgram) -> bool:
    """Whether each microbatch is a batch of its own."""
    return program.ir.microbatched is not None and program.ir.microbatched.separate


def _evaluated(program: ParallelProgram, model: nn.Module, inputs: Any, loss_fn: Any) -> tuple[Any, Any]:
    """The loss, or None, and what the model returns, where that is asked for."""
    args, kwargs, wanted = split_inputs(inputs, program.request.targets, model)
    out = model(*args, **kwargs)
    loss, extras = loss_and_extras(out, loss_fn, wanted, to_train=False)
    outputs = out if extras is None else extras
    return None if loss is None else loss.reshape(()), None if program.request.gives == "loss" else outputs


def run_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a batch without targets."""
    args, kwargs, _ = split_inputs(inputs, 0, model)
    return model(*args, **kwargs)


def loss_of(model: nn.Module, inputs: Any, loss_fn: Any, targets: int) -> tuple[torch.Tensor, Any]:
    """The scalar that is trained on, and what loss_fn gives beside it."""
    args, kwargs, wanted = split_inputs(inputs, targets, model)
    loss, extras = loss_and_extras(model(*args, **kwargs), loss_fn, wanted, to_train=True)
    return loss.reshape(()), extras


def _joined(parts: Sequence[Sequence[tuple[str, torch.Tensor]]], program: ParallelProgram) -> Values:
    """The values by name of batches that are one, as the program joins them."""
    if len(parts) == 1 or program.ir.microbatched is None:
        return dict(parts[0])
    joins = program.ir.microbatched.outputs[1:]
    named = (([value for _, value in same], same[0][0]) for same in zip(*parts, strict=True))
    return {
        name: join_microbatches(values, how.how, how.dim, how.outer)
        for (values, name), how in zip(named, joins, strict=False)
    }


class EagerUpdate:
    """The update by a rule of a model on one device, written with torch's own functions (loss scaling changes no number
    that does not overflow, and is left out)."""

    def __init__(self, rule: UpdateRule, named: Named) -> None:
        self.rule = rule
        self.parameters = [parameter for _, parameter in named]
        self.optimizers = make_optimizers(rule.optimizer, named) if rule.optimizer is not None else ()
        self.schedulers = [rule.scheduler(one) for one in self.optimizers] if rule.scheduler is not None else []

    def clip(self) -> None:
        norm, value = self.rule.clip_norm, self.rule.clip_value
        if value is not None:
            nn.utils.clip_grad_value_(self.parameters, value)
        if norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, norm.max_norm, norm.norm_type)

    def step(self, loss: torch.Tensor) -> None:
        for one in self.optimizers:
            one.step()
        for scheduler in self.schedulers:
            step_scheduler(scheduler, loss.item)


def microbatches(inputs: Any, parts: int, program: ParallelProgram) -> Iterator[Any]:
    """The batch in so many parts along its batch dims."""
    if parts == 1:
        yield inputs
        return
    for k in range(parts):
        shapes = iter(zip(program.ir.inputs, program.ir.batch_dims, strict=True))

        def cut(t: torch.Tensor, k: int = k, shapes: Any = shapes) -> torch.Tensor:
            (_, type_), dim = next(shapes)
            return t if dim is None or tuple(t.shape) == type_.shape else t.chunk(parts, dim)[k]

        yield map_tensors(inputs, cut)
