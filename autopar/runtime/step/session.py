"""A program with its state: weights in, training steps, forwards and full tensors out (checkpoints: state.py).

One optimizer step: take the form of the batch's bucket (shapes.py, shape_variants.py), run the group's row of actions over the
microbatches (pipeline.py), finish the gradients, bring those of shared parameters to their owners (which may all be one
CUDA graph: cuda_graphs.py), update this rank's optimizer shards of all its stages (update.py), gather
the new shards back into storage, and tell everyone the loss, and what the step gives beside it. A program without pipeline is
one stage on all ranks, with a row like `F0.0 B0.0 F1.0 B1.0`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..comm.backends import backend_of
from ..comm.calls import Handle
from ..comm.comm import Comm
from ..comm.recorder import Recorder, recorded, spanned
from ..compiled.inductor import compile_met, compiler_on
from ..errors import RuntimeProgramError
from ..gradients.bucket_sizes import MIB
from ..guards import Guards, InputLike
from ..memory.tiers import Tiers
from ..program.extras import filled, numbers_of
from ..program.layout import holds
from ..program.run_options import DEFAULTS, RunOptions
from ..program.shapes import PadValues
from ..program.tables import Modules, Pipeline
from ..rank import Rank
from ..update.optimizer_parts import Parts
from ..update.update_rule import OptimizerFactory, UpdateRule, as_rule
from .buffer_copies import BufferCopies
from .cuda_graphs import Capture, CudaCapture, StepGraph, say_why, why_not
from .entries import FIRST, EntryForms, EntryModules
from .full_tensors import full_gradients, full_value
from .outputs import Outputs, arrived, full_outputs, local_outputs, start_loss
from .own_rows import Taking
from .pending import NOT_IN_TIERS
from .pipeline import Executor
from .ready import NextInputs
from .rebalance import rebalancer
from .same_data import SameData
from .shape_variants import Form
from .stage import Inputs, SliceReader
from .state import State


@dataclass(frozen=True)
class _Computed:
    """The results of forward and backward on a rank. borrowed: gradients that somebody else may hold too; counts: of
    what rows chose, where parameters have a gradient in some steps only; outputs: by stage and microbatch, where the step gives
    some beside the loss."""

    grads: dict[str, Tensor]
    loss: Handle[Tensor]
    borrowed: frozenset[str]
    counts: Tensor | None
    outputs: Outputs


class Session(State):
    """A running program on one rank. Every method is called by all ranks together."""

    def __init__(
        self,
        pipeline: Any,
        stages: Modules,
        comm: Comm,
        update: UpdateRule | OptimizerFactory | None = None,
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 * MIB,
        tier_directory: str | os.PathLike[str] | None = None,
        buckets: Sequence[tuple[Any, Modules]] = (),
        pad: PadValues | None = None,
        entries: Mapping[str, EntryModules] = MappingProxyType({}),
        options: RunOptions = DEFAULTS,
        compare: bool = False,
    ) -> None:
        """pipeline: the module of pipeline.py; stages: the stage modules by index (all, or a function that imports
        one); comm: of all ranks; update: how parameters follow from gradients, or an optimizer factory alone; dtype: hold
        every floating tensor in it instead of the tables'; tier_directory: for the files of what rests in "nvme"; buckets:
        pipeline and stages for batches of other shapes; pad: what inputs are padded with up to the next of these, by name;
        entries: other steps over the same parameters; options: those that the program was compiled with; compare: see that all
        ranks are given the same batches."""
        rule, self.options = as_rule(update), options
        options.set_in_torch()
        compiler = compiler_on(comm.device, options.compiler, options.cuda_graphs or options.rebalance)
        self.pipeline = Pipeline(pipeline, stages, dtype, compiler)
        self.comm = comm
        if comm.world_size != self.pipeline.world:
            raise RuntimeProgramError(
                f"the program is for {self.pipeline.world} ranks ({self.pipeline.show()}), the ranks form {comm.mesh}"
            )
        if len(self.pipeline.meshes) == 1 and list(comm.mesh.items()) != list(self.pipeline.meshes[0][0].items()):
            raise RuntimeProgramError(
                f"the program is for the mesh {self.pipeline.meshes[0][0]}, the ranks form {comm.mesh}"
            )
        self.training = self.pipeline.training
        self.group = self.pipeline.group_of(comm.rank)
        tiers = Tiers(comm.device, tier_directory)
        self.guards = Guards()
        forms: list[Form] = []
        self.entries: dict[str, EntryForms] = {}
        own_modules = EntryModules(((pipeline, stages), *buckets), pad or {}, rule)
        for name, modules in {FIRST: own_modules, **entries}.items():
            begun, of_entry, averaging = len(forms), as_rule(modules.update), modules.averaging
            apart = frozenset(averaging.names if averaging is not None else ())
            for of_shape in modules.forms:
                own = Pipeline(*of_shape, dtype, compiler) if forms else self.pipeline
                compensated = of_entry.compensated
                forms.append(Form(own, comm, seed, bucket_bytes, compensated, tiers, self.guards, forms, apart))
            self.entries[name] = EntryForms(forms[begun:], modules.pad, of_entry, comm, averaging, forms[0])
        self.forms, self._last = tuple(forms), forms[0]
        self.stages, self.shared = forms[0].stages, forms[0].shared
        several = any(len(entry.forms) > 1 for entry in self.entries.values())
        self.same_data = SameData(comm, every=several) if compare and comm.world_size > 1 else None
        if comm.in_order:
            comm.barrier(site="start")  # NCCL makes its communicator when all ranks come together
        self.grads: dict[str, Tensor] = {}
        self.extras: Any = None
        self.absent: frozenset[str] = frozenset()
        self.next_inputs = NextInputs(comm.device)
        self.rebalancer = rebalancer(comm, self.entries[FIRST].forms) if options.rebalance else None
        self.opt_params, self.updater = self.entries[FIRST].opt_params, self.entries[FIRST].updater
        self.parts = self._parts(tiers)
        self.buffer_copies: BufferCopies | None = None
        self.step_graph: StepGraph[_Computed] | None = None
        if options.cuda_graphs and not backend_of(comm.device).graphs:
            say_why(f"they run on a device of kind {comm.device.type!r}")
        elif options.cuda_graphs:
            self.capture_steps(partial(CudaCapture, comm.device))

    @property
    def rts(self) -> list[Rank]:
        """The `rt` of every stage of this rank."""
        return [stage.rt for stage in self.stages.values()]

    @property
    def rt(self) -> Rank:
        """The `rt` of this rank's first stage."""
        return self.rts[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer, the first where there are several (`updater.optimizers`)."""
        return next(iter(self.updater.optimizers), None)

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last step's gradients before they were clipped."""
        return self.updater.grad_norm

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the steps that are to come, actions, messages and all; None unless it is set."""
        return self.executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.comm.watch(recorder)
        for form in self.forms:
            form.executor.recorder = recorder

    @property
    def executor(self) -> Executor:
        """The executor of the last step's form, at first of the first one."""
        return self._last.executor

    def taking(self, own_rows: bool, entry: str = FIRST) -> Taking:
        """How batches of an entry are taken. own_rows: they have this rank's rows alone. Raises RuntimeProgramError where there
        are no such."""
        if own_rows and self.rebalancer is not None:
            raise RuntimeProgramError(
                "rows move between ranks (rebalance), so which ones a rank is to read changes while it reads ahead; give every "
                "rank global batches, or compile and run without rebalance"
            )
        return self.entries[entry].own_rows if own_rows else self.entries[entry].whole_batches

    @property
    def last_inputs(self) -> Sequence[InputLike]:
        """The inputs of the global batch of the last step's form."""
        return self._last.pipeline.inputs

    # ---- weights

    @torch.no_grad()
    def load_weights(self, full: Mapping[str, Tensor] | SliceReader) -> None:
        """Fill parameters and buffers: from full tensors by name, or from `reader(name, slices) -> Tensor`.

        Only this rank's slice of each tensor is read and kept. Tied parameters appear once, under their table name.
        """
        self.settle_tiers()
        for form in self.forms:
            for stage in form.stages.values():
                stage.load(full)

    # ---- steps

    def skip_not_finite(self) -> None:
        """From now on a step whose loss or gradients are no numbers leaves parameters, optimizers, schedulers and buffers as they
        were (`updater.not_finite` says so); it counts as a step, and its batch as taken."""
        for entry in self.entries.values():
            entry.updater.skip_not_finite = True
        self.buffer_copies = BufferCopies(b for rt in self.rts for b in rt.buffers.values())

    def capture_steps(self, make_capture: Callable[[], Capture]) -> None:
        """From now on forward and backward are captured once and played; where they cannot be, a warning says why."""
        own, tiers = self.forms[0], any(rt.in_tier for rt in self.rts)
        ranks, scaled = self.comm.world_size, self.updater.scaler is not None
        if why := why_not(self.training, ranks, len(self.forms), scaled, tiers, self.pipeline.compiler):
            say_why(why)
            return
        self.step_graph = StepGraph(partial(self._compute, own), own.stages, own.pipeline.microbatches, make_capture)

    @recorded
    def train_step(
        self, batch: Sequence[Tensor], entry: str = FIRST, *, update: bool = True, own_rows: bool = False
    ) -> Tensor:
        """One optimizer step on a global batch (its leaves in input order); the loss, over all microbatches. entry: the step,
        one that trains. Raises TooManySkips.

        update: False adds this batch's gradients to those of the next one instead. It counts as a step, and its batch as taken.
        own_rows: the batch has this rank's rows alone, of the inputs that it takes (`DataShard`).

        `self.grads` holds the reduced local gradients, unscaled and clipped, until the next step, but those of parameters that
        have none in eager (`self.absent`), and `self.extras` what the step gives beside the loss, full on every rank and nested
        as loss_fn returned it. Without an optimizer nothing is updated.
        """
        if not self.entry(entry).training:
            raise RuntimeProgramError("this program was compiled for inference; use forward()")
        own = self.entries[entry]
        updater, stages, pending = own.updater, own.stages, own.pending
        if not update and updater.away:
            raise RuntimeProgramError(f"no update after this batch: {NOT_IN_TIERS}")
        if self.buffer_copies is not None:
            self.buffer_copies.take()
        form, inputs = self._begin(batch, own_rows, entry)
        graph = None if self.recorder is not None else self.step_graph
        computed = self._compute(form, inputs) if graph is None else graph(inputs)
        try:
            form.executor.overflows.end()
        except RuntimeProgramError:
            computed.loss.wait()  # all ranks are here, and what one has begun to send must leave
            raise
        self.absent = form.absent.names(computed.counts)
        self.grads = {n: grad for n, grad in computed.grads.items() if n not in self.absent}
        loss, borrowed, outputs = computed.loss, computed.borrowed, computed.outputs
        del computed  # the last to hold gradients that the update copies
        if not update or pending.batches:
            pending.add(self.grads)
            self.grads, self.absent, borrowed = {}, self.absent - pending.names, frozenset()
        if not update:
            self.extras = self._full_extras(form, outputs)
            self._end_step()
            return loss.wait() if self.step_graph is None else loss.wait().clone()
        if pending.batches:
            self.grads = pending.taken()
        self.comm.at(self.rt.step + 1, "update")
        with spanned(self.recorder, "update"):
            updated = updater.step(self.grads, loss, borrowed)
        if updated:
            with spanned(self.recorder, "parameters"):
                for wait in [stage.start_regather() for stage in stages.values()]:
                    wait()
                self.shared.spread_parameters()
        for one in self.entries.values() if not updater.not_finite else ():
            one.follow(self.entries[entry].trained)
        if updater.not_finite:
            for stage in form.stages.values():
                stage.rt.grads.unsent.forget()
            if self.buffer_copies is not None:
                self.buffer_copies.put_back()
        self.extras = self._full_extras(form, outputs)
        self._end_step()
        if (said := updater.judge(self.rt.step, loss)) and self.comm.rank == 0:
            print(said, file=sys.stderr, flush=True)
        return loss.wait() if self.step_graph is None else loss.wait().clone()

    def _full_extras(self, form: Form, outputs: Outputs) -> Any:
        """The extras of a step, full on every rank; None where loss_fn returned the loss alone."""
        if (extras := form.pipeline.extras) is None:
            return None
        given = full_outputs(form, self.comm, outputs, numbers_of(extras))
        return filled(extras, {n: one if self.step_graph is None else one.clone() for n, one in given.items()})

    def run_entry(
        self, name: str, batch: Sequence[Tensor], *, own_rows: bool = False, update: bool = True
    ) -> Tensor | list[Tensor | None]:
        """A step of an entry on a batch, "" being the program's own: the loss of one that trains, else the outputs, full on every
        rank. own_rows, update: as of `train_step`."""
        if self.entry(name).training:
            return self.train_step(batch, name, own_rows=own_rows, update=update)
        return self.forward(batch, entry=name, own_rows=own_rows)

    def entry(self, name: str) -> EntryForms:
        """The forms of an entry. Raises RuntimeProgramError where there is none of that name."""
        if name not in self.entries:
            known = ", ".join(one for one in self.entries if one) or "none"
            raise RuntimeProgramError(
                f"this program has no entry {name!r}; it has {known}; entries= names steps beside its own when it is compiled"
            )
        return self.entries[name]

    @recorded
    def forward(
        self, batch: Sequence[Tensor], *, local: bool = False, own_rows: bool = False, entry: str = FIRST
    ) -> list[Tensor | None]:
        """The outputs for a global batch: full tensors on every rank, or this rank's shards (None elsewhere). entry: the step,
        one without gradients; own_rows: as of `train_step`."""
        if self.entry(entry).training:
            raise RuntimeProgramError("this program was compiled for training; use train_step()")
        form, inputs = self._begin(batch, own_rows, entry)
        runs = arrived(form.executor.run(inputs))
        results: Sequence[Tensor | None] = (
            local_outputs(form, runs) if local else [*full_outputs(form, self.comm, runs).values()]
        )
        self._end_step(advance=False)
        return list(results)

    def _begin(self, batch: Sequence[Tensor], own_rows: bool, entry: str = FIRST) -> tuple[Form, Inputs]:
        """The form that is for a batch of an entry, and the inputs that it takes, before the actions of a step. Gradients of the
        last step go, as this one needs their room."""
        self.grads, self.extras = {}, None
        for one in self.entries.values():
            one.updater.forget_gradients()
        for stage in self._last.stages.values():
            stage.rt.grads.forget()
        if self.rebalancer is not None and entry == FIRST:
            self.rebalancer.begin_step()
        taking = self.taking(own_rows, entry)
        if self.same_data is not None:
            self.same_data.take(batch, self.rt.step + 1, taking.readers, self.entries[entry].updater.settings(), entry)
        taken = self.entries[entry].of(batch, taking, self.rt.step + 1)
        form, like = taken.form, taking.inputs[taken.place]
        checked = self.guards.check_batch(taken.inputs, like, form.pipeline.ranges, form.pipeline.inputs)
        inputs = self.next_inputs.of(batch, taken.inputs, checked, taken.rows)
        for stage in form.stages.values():
            stage.rt.step, stage.rt.loss_scale = self.rt.step, self.entries[entry].updater.loss_scale
        self._last = form
        form.shared.before_step()
        return form, inputs

    def _compute(self, form: Form, inputs: Inputs) -> _Computed:
        """Forward and backward of a step, up to reduced gradients and the loss of the whole batch."""
        outputs = form.executor.run(inputs)
        self.comm.at(self.rt.step + 1, "gradients")
        with spanned(self.recorder, "gradients"):
            gradients = {index: stage.rt.grads.finish() for index, stage in form.stages.items()}
            form.shared.earn(gradients)
        grads = {
            name: grad
            for index, reduced in gradients.items()
            for name, grad in reduced.items()
            if (info := form.stages[index].tables.parameters[name])
            and holds(info.shape, info.opt_spec, form.stages[index].comm)
        }
        borrowed = frozenset(name for stage in form.stages.values() for name in stage.rt.grads.borrowed)
        given = {} if form.pipeline.extras is None else arrived(outputs)
        return _Computed(grads, start_loss(form, self.comm, outputs), borrowed, form.absent.counts(outputs), given)

    def _end_step(self, advance: bool = True) -> None:
        self._last.executor.finish()
        self.guards.end_step()
        self._last.shared.spread_buffers()
        self.comm.release()
        if met := [region for stage in self._last.stages.values() for region in stage.regions if region.met]:
            self.comm.at(self.rt.step + 1, "compile")
            compile_met(met)
        for rt in self.rts:
            rt.step += advance
        own = self._last in self.entries[FIRST].forms
        if (
            own
            and self.rebalancer is not None
            and (said := self.rebalancer.end_step(self.rt.step))
            and self.comm.rank == 0
        ):
            print(said, file=sys.stderr, flush=True)

    # ---- full tensors

    def gather_full(self, name: str) -> Tensor:
        """A parameter or buffer, full, on every rank."""
        self.settle_tiers()
        return full_value(self.forms[0], self.comm, name)

    def full_grads(self) -> dict[str, Tensor]:
        """The gradients of the last train_step, full, on every rank; nothing of parameters that have none."""
        if not self._last.pipeline.training:
            raise RuntimeProgramError("there are no gradients: the last step was one without")
        self.settle_tiers()
        return full_gradients(self._last, self.comm, self.grads, self.absent)

    # ---- small print

    def _parts(self, tiers: Tiers) -> Parts | None:
        """How the optimizer's step is divided where its state rests in tiers."""
        where = [
            {name: stage.tables.parameters[name].optimizer_tier for name in stage.opt_params}
            for stage in self.stages.values()
        ]
        values = {n: p for stage in self.stages.values() for n, p in stage.opt_params.items() if n in stage.rt.in_tier}
        if not self.updater.optimizers or not (values or any(tier for stage in where for tier in stage.values())):
            return None

        def store(updated: Mapping[str, Tensor]) -> None:
            for stage in self.stages.values():
                stage.store_updated({n: value for n, value in updated.items() if n in stage.opt_params})

        sizes = {name: p.numel() * p.element_size() for name, p in self.opt_params.items()}
        parts = Parts(tiers, where, sizes, self.updater.state_of, values, lambda n: self.grads.get(n), store)
        self.updater.parts, self.updater.bring, self.updater.away = parts.parts, parts.bring, parts.values.keys()
        self.updater.settle = tiers.settle
        return parts
