"""The request of a call of `compile`, checked once: everything after it may rely on a `Request`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture import capture_program
from autopar.capture.before.modes import evaluating, training_alone
from autopar.capture.examples.buckets import Sizes, bucket_examples, checked_pad_values
from autopar.capture.examples.held import Held
from autopar.capture.examples.inputs import LossFunction, batch_size, fixed_inputs, microbatch, repeated, split_example
from autopar.capture.exported import Captured, Gives
from autopar.cluster import ClusterSpec
from autopar.cluster.given import as_cluster
from autopar.errors import AutoparError, InputError, PlanError
from autopar.ir.schedules import SCHEDULES
from autopar.ir.union import of_union
from autopar.optimizer.rule import update_rule
from autopar.options import Entry, Options, checked_entries
from autopar.plan import Plan, checked_plan
from autopar.request.checks import (
    as_computed,
    check_axes,
    check_batch,
    check_compression,
    check_precision,
    planned_compression,
    planned_precision,
)
from autopar.runtime.program.batches import Plain
from autopar.runtime.update.update_rule import UpdateRule


@dataclass(frozen=True, eq=False)
class Request:
    """A model to be compiled for a cluster.

    inputs: the example inputs of the global batch, nested as the user builds batches; the last `targets` entries go to
    the loss. update: what the optimizer's step does. plan: to be replayed instead of searching for one; microbatches,
    precision and gradient compression of the options are then those of the plan. buckets: example inputs of other shapes,
    none of them larger, that the same parameters are to be trained with. pad_values: what inputs are padded with up to the
    next of these shapes. entries: other steps over the same parameters, by name; entry: the name of this one, where it is such a
    step; gives: what is captured of the model, in eval mode where that is not its own step; held: the tensors of all modules,
    where entries have modules of their own; trains: identities of the parameters that require a gradient in this step (None: as
    they do anyway); ema: the decay of the averages that the step computes with.
    """

    model: nn.Module
    cluster: ClusterSpec
    inputs: Any
    targets: int
    loss_fn: LossFunction | None
    update: UpdateRule
    options: Options
    plan: Plan | None = None
    buckets: tuple[Any, ...] = ()
    pad_values: Mapping[str, float] = field(default_factory=dict)
    entries: Mapping[str, Request] = field(default_factory=dict)
    entry: str = ""
    gives: Gives = "step"
    held: Held | None = None
    trains: frozenset[int] | None = None
    ema: float | None = None

    @property
    def fixed(self) -> dict[str, Plain]:
        """The plain values that the program is compiled for, which batches have beside tensors or leave out, by name."""
        return fixed_inputs(self.model, self.inputs)

    @property
    def batch(self) -> int:
        """Samples of the global batch."""
        return batch_size(self.inputs, self.options.batch_dims)

    @property
    def asked_of_training(self) -> tuple[str, ...]:
        """The arguments that mean nothing in inference, as they were written."""
        rule, options = self.update, self.options
        given = {
            "optimizer=": rule.optimizer,
            "scheduler=": rule.scheduler,
            "clip_grad_norm=": rule.clip_norm,
            "clip_grad_value=": rule.clip_value,
            "loss_scaling=": rule.loss_scaling,
            "Options.compensated_sums": rule.compensated or None,
            "Options.gradient_compression": options.gradient_compression,
            "Options.recompute": None if options.recompute in ("auto", "none") else options.recompute,
        }
        return tuple(name for name, value in given.items() if value is not None)

    def capture(self, pieces: int = 1) -> Captured:
        """The step of the whole batch; or of one of so many pieces of it that are batches of their own, the loss divided by
        their number. Raises CaptureError, InputError."""
        with evaluating(self.model) if self.gives != "step" else training_alone(self.model, self.trains):
            captured = capture_program(
                self.model,
                microbatch(self.inputs, self.options.batch_dims, pieces),
                self.loss_fn,
                self.targets,
                *self._capture_options(pieces),
            )
        no_loss = captured.exported.no_loss
        if no_loss is not None and (asked := self.asked_of_training):
            raise no_loss.error(asked)
        if self.held is None:
            return captured
        names, held = self.held.names(self.model), self.held
        return captured._replace(program=of_union(captured.program, names, held.parameters(), held.buffers()))

    def _capture_options(self, pieces: int = 1) -> tuple[Any, ...]:
        """The arguments of a capture beside model, inputs and loss. pieces: as of `capture`."""
        options = self.options
        return (
            options.batch_dims,
            options.stage_boundaries or (),
            options.precision,
            pieces,
            options.guards,
            "guard" if options.branches == "select" and self._cut else options.branches,
            {"expert_imbalance": options.expert_imbalance, "on_overflow": options.on_overflow},
            bool(self.asked_of_training),
            self.gives,
        )

    def captures_like(self, other: Request) -> bool:
        """Whether both requests capture the same step, where nobody has changed the model between them."""
        same = ((r.model, r.inputs, r.loss_fn, r.held) for r in (self, other))
        return (
            all(a is b for a, b in zip(*same, strict=True))
            and (self.targets, self.trains) == (other.targets, other.trains)
            and (self.options.coupled, self._capture_options()) == (other.options.coupled, other._capture_options())
        )

    @property
    def captured_tensors(self) -> tuple[Hashable, ...]:
        """The shapes, kinds and modes of the model that a capture reads, and that whoever has the model may change."""
        tensors = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers())
        kinds = ((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors)
        return (*kinds, *(module.training for module in self.model.modules()))

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that require a gradient in this step, by name."""
        names = (self.held or Held(self.model)).names(self.model)
        return {
            names[name]: tuple(p.shape)
            for name, p in self.model.named_parameters()
            if (p.requires_grad if self.trains is None else id(p) in self.trains)
        }

    @property
    def averaged(self) -> dict[str, tuple[str, ...]]:
        """By entry that computes with averages the parameters that it averages: those of its module that some step trains."""
        trained = {*self.trained}.union(*(one.trained for one in self.entries.values() if one.gives == "step"))
        held = self.held or Held(self.model)
        return {
            entry: tuple(name for name in dict.fromkeys(held.names(one.model).values()) if name in trained)
            for entry, one in self.entries.items()
            if one.ema is not None
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, shared ones under each of their names, and buffers, of this model and of the modules of entries."""
        return (self.held or Held(self.model)).tensors()

    @property
    def _cut(self) -> bool:
        """Whether it is asked for several microbatches or stages."""
        return (self.options.microbatches or 1) > 1 or (self.options.pp or 1) > 1

    @property
    def capture_apart(self) -> Callable[[int], Captured] | None:
        """Captures one of so many microbatches where each is to be a batch of its own."""
        return self.capture if self.options.coupled == "per-microbatch" else None

    def replaying(self, plan: Plan) -> Request:
        """The same request, to be met by this plan. Raises PlanError where it asks for something else, InputError where
        batch or devices do not allow it."""
        options = self.options
        if options.microbatches not in (None, 1, plan.microbatches):
            raise PlanError(
                f"this plan has {plan.microbatches} microbatches, Options ask for {options.microbatches}; set "
                f"Options(microbatches={plan.microbatches})"
            )
        options = replace(
            options,
            microbatches=plan.microbatches,
            precision=planned_precision(plan, options),
            gradient_compression=planned_compression(plan, options),
        )
        request = replace(self, options=options, plan=plan)
        _check(request)
        return request

    def on_cluster(self, cluster: ClusterSpec, microbatches: int | None, order: int | None) -> Request:
        """The same step on another cluster: what the options say of ranks is left to the search there. microbatches, order: of
        the plan, where they are given. Raises InputError where the devices do not allow it."""
        options = replace(
            self.options,
            mesh=None,
            axes=None,
            strategy="auto",
            pp=None,
            chunks=None,
            schedule="auto",
            stage_boundaries=None,
            microbatches=microbatches,
            order=order,
        )
        return self.searched(options, cluster=cluster)

    def where_slower(self, cluster: ClusterSpec, microbatches: int | None, order: int | None) -> Request:
        """The same step, and all that the options say of ranks, on a cluster of the same ranks of which some are slower, none of
        them idle. Groups of several stages, which are to be alike, are left out. microbatches, order: as of `on_cluster`."""
        several = self.options.schedule != "auto" and SCHEDULES[self.options.schedule].stages[0] > 1
        options = replace(
            self.options,
            chunks=None,
            schedule="auto" if several else self.options.schedule,
            idle_ranks=False,
            microbatches=microbatches,
            order=order,
        )
        return self.searched(options, cluster=cluster)

    def on_part(self, cluster: ClusterSpec) -> Request:
        """The same step under the same options on a part of its cluster. Raises InputError where they do not allow it."""
        return self.searched(self.options, cluster=cluster)

    def searched(self, options: Options, *, cluster: ClusterSpec | None = None, times: Fraction | int = 1) -> Request:
        """The same step with other options, its plan to be searched. cluster: another one; times: as large as this batch is the
        other one, of which there are no buckets and no entries. Raises InputError."""
        request = replace(self, cluster=as_computed(cluster or self.cluster, options), options=options, plan=None)
        if times != 1:
            dims = options.batch_dims
            inputs = microbatch(repeated(self.inputs, dims, times.numerator), dims, times.denominator)
            request = replace(request, inputs=inputs, buckets=(), entries={})
        _check(request)
        return request


def make_request(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    loss_fn: LossFunction | None,
    update: UpdateRule,
    options: Options,
    plan: Plan | str | Path | None = None,
    buckets: Sizes | None = None,
    pad_values: Mapping[str, float] | None = None,
    entries: Mapping[str, Entry] | None = None,
) -> Request:
    """The request that the arguments of `compile` make. Raises InputError, ClusterError, PlanError."""
    if plan is not None and not isinstance(plan, (Plan, str, Path)):
        raise InputError(f"plan must be an autopar.Plan or the path of a plan.json, not {type(plan).__name__}")
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}; wrap a function in a Module")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn must be callable (output, *targets) -> scalar or (scalar, extras), not {type(loss_fn).__name__}"
        )
    inputs, targets = split_example(model, example_inputs, loss_fn)
    inputs, *others = [inputs] if buckets is None else bucket_examples(inputs, buckets)
    pad = checked_pad_values(pad_values, inputs)
    request = Request(
        model,
        as_computed(as_cluster(cluster), options),
        inputs,
        targets,
        loss_fn,
        update,
        options,
        buckets=tuple(others),
        pad_values=pad,
    )
    asked = checked_entries(entries)
    modules = {name: entry.module for name, entry in asked.items() if entry.module is not None}
    request = replace(request, held=Held(model, modules) if modules else None)
    request = replace(request, entries={name: _entry(request, name, entry) for name, entry in asked.items()})
    if plan is not None:
        return request.replaying(checked_plan(plan))
    _check(request)
    return request


def _entry(program: Request, name: str, entry: Entry) -> Request:
    """The request for another step over a program's parameters. Raises InputError."""
    loss_fn = program.loss_fn if isinstance(entry.loss_fn, str) else entry.loss_fn
    given = program.inputs if entry.example_inputs is None else entry.example_inputs
    model = entry.module or program.model
    try:
        inputs, targets = split_example(model, given, loss_fn)
        inputs, *others = [inputs] if entry.buckets is None else bucket_examples(inputs, entry.buckets)
        return replace(
            program,
            model=model,
            inputs=inputs,
            targets=targets,
            loss_fn=loss_fn,
            update=update_rule(entry.optimizer, compensated=program.update.compensated)
            if entry.train
            else UpdateRule(),
            options=_entry_options(program.options, entry),
            buckets=tuple(others),
            pad_values=checked_pad_values(entry.pad_values, inputs),
            entry=name,
            gives="step" if entry.train else "loss and outputs" if entry.outputs else "loss",
            trains=_identities(model, entry, name),
            ema=entry.ema,
        )
    except AutoparError as error:
        shared = (
            " Its example inputs are those of the program, targets among them; Entry(example_inputs=…) gives it others."
        )
        error.add_note(f"This is of entries[{name!r}].{shared if entry.example_inputs is None else ''}")
        raise


def _entry_options(options: Options, entry: Entry) -> Options:
    """An entry's options, its own or those of the program, without what speaks of training where it does not train."""
    own = entry.options or replace(options, constraints={})
    if entry.train:
        return own
    microbatches = own.microbatches if entry.options is not None else None
    return replace(
        own,
        microbatches=microbatches,
        recompute="auto",
        compensated_sums=False,
        gradient_compression=None,
        coupled="refuse",
    )


def _identities(model: nn.Module, entry: Entry, name: str) -> frozenset[int] | None:
    """Identities of the parameters that an entry trains. Raises InputError for one that its module has not."""
    if entry.trains is None:
        return None
    given = tuple(entry.trains.parameters() if isinstance(entry.trains, nn.Module) else entry.trains)
    known = {id(parameter) for parameter in model.parameters()}
    if not given or not all(id(parameter) in known for parameter in given):
        raise InputError(
            f"entries[{name!r}]: trains names {'a parameter that its module has not' if given else 'no parameter'}; give "
            "parameters of the module that the step is of"
        )
    return frozenset(map(id, given))


def _check(request: Request) -> None:
    """Raises InputError where options, cluster and batch do not go together."""
    options, ranks = request.options, request.cluster.size
    check_precision(options.precision, request.cluster)
    check_compression(options, request.update, bool(request.buckets))
    groups = options.pp or (None if options.asks_for_pipeline else 1)
    if groups and ranks % groups == 0:  # else the mesh is held against the number of groups once that is known
        options.forced_mesh(ranks // groups, ranks)
    check_axes(options, ranks)
    check_batch(options, request.inputs, ranks)
