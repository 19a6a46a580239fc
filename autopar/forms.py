"""Other programs for the parameters of a first one: of other shapes of batches (buckets), and of other steps (entries).

The plan of the first program, for the largest of its batches, decides on which ranks and how every parameter is stored, and
with it meshes and stages. Each other form is captured and planned by itself with these given: its own microbatches, shardings
of values, recompute, messages and schedule. At run time all of them use one set of tensors
(`autopar.runtime.step.shape_variants`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.capture.examples.trees import shapes_text
from autopar.capture.exported import Captured
from autopar.errors import AutoparError, CaptureError
from autopar.ir.memory_levers import offload_name
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.optimizer.examine import examine_on
from autopar.passes.search.layout import Layout, apart
from autopar.program import ParallelProgram
from autopar.request import Request

Compile = Callable[[Request], ParallelProgram]
"""Makes the program of a request for the parameters of a first one."""


def with_forms(first: ParallelProgram, compile_form: Compile) -> ParallelProgram:
    """The first program with those of its other shapes, and of its entries, beside it. compile_form: of a request that
    `form_request` made."""
    program = _with_buckets(first, first, first.request, compile_form)
    entries = {}
    for name, asked in first.request.entries.items():
        try:
            own = compile_form(form_request(first, asked, asked.inputs))
            entries[name] = _with_buckets(first, own, asked, compile_form)
        except AutoparError as error:
            error.add_note(f"This is of entries[{name!r}], planned for how the program stores its parameters.")
            raise
        _check_buffers(first, entries[name])
        _check_trained(first, entries[name])
        _check_averaged(first, entries[name], first.request.averaged.get(name, ()))
    timings = _added(program.timings, *(one.timings for one in entries.values()))
    return replace(program, entries=entries, timings=timings)


def form_request(first: ParallelProgram, asked: Request, inputs: Any) -> Request:
    """The request for a program of the first one's parameters: its own plan on the same meshes. asked: the step; inputs: of a
    bucket of it."""
    given, stages = asked.options, first.plan.stages
    options = replace(
        given,
        mesh=dict(stages[0].mesh.axes) if len(stages) == 1 else None,
        axes=None,
        strategy="auto",
        pp=None,
        chunks=None,
        schedule="auto" if len(stages) == 1 else given.schedule,
        stage_boundaries=None,
        microbatches=None,
        offload=offload_name(first.setting.offload),
    )
    request = replace(
        asked,
        cluster=first.request.cluster,
        inputs=inputs,
        options=options,
        plan=None,
        buckets=(),
        pad_values={},
        entries={},
    )
    if given.microbatches and request.batch % given.microbatches == 0:
        return replace(request, options=replace(options, microbatches=given.microbatches))
    return request


def captured_for(first: ParallelProgram, request: Request) -> Captured:
    """The capture that a form is planned of: calls that read parameters that lie otherwise have templates of their own, and
    what no call reads is where the first program has it."""
    captured = request.capture()
    stored = {name: p for stage in first.plan.stages for name, p in stage.parameters.items()}
    homes: dict[str, frozenset[int]] = {}
    for stage in first.stages:
        for name in (*stage.parameters, *stage.buffers):
            homes[name] = homes.get(name, frozenset()) | {stage.index}
    return captured._replace(program=replace(apart(captured.program, stored), homes=homes))


def setting_for(first: ParallelProgram, own: Setting) -> Setting:
    """A form's setting: the state of all optimizers of the program rests beside it."""
    kept = first.setting.kept | {*first.ir.trained}
    return replace(own, optimizer=first.setting.optimizer, kept=kept, averaged=first.setting.averaged)


def with_others(request: Request, program: Program, own: Setting, ranks: int) -> Setting:
    """The first program's setting: the state of the optimizers of entries rests beside that of its own. Raises InputError."""
    for entry in request.entries.values():
        if entry.gives == "step":
            names = entry.trained
            other = examine_on(entry.update, names, ranks)
            state = own.optimizer.joined({*program.trained, *own.kept}, other, names)
            own = replace(own, optimizer=state, kept=own.kept | {*names})
    return replace(own, averaged=Counter(name for names in request.averaged.values() for name in names))


def laid_out_as(first: ParallelProgram, request: Request, program: Program) -> Layout:
    """Where the first program has the parameters that another form's is to compute with. Raises CaptureError where that has
    others."""
    compared = [("computes with", {*program.parameters}, {*first.ir.parameters})]
    if not request.entry:
        compared.append(("trains", {*program.trained}, {*first.ir.trained}))
    for what, ours, theirs in compared:
        if ours != theirs:
            raise CaptureError(
                f"each bucket of a program {what} the same parameters; this model {what} {', '.join(sorted(ours ^ theirs))} in "
                "one of them alone: use all of them whatever the shapes are, or compile these shapes as programs of their own"
            )
    return Layout.of(first.plan, first.ir)


def _with_buckets(
    first: ParallelProgram, program: ParallelProgram, asked: Request, compile_form: Compile
) -> ParallelProgram:
    """The program of a step with those of its other shapes beside it."""
    others = tuple(_bucket(first, asked, inputs, compile_form) for inputs in asked.buckets)
    request = replace(program.request, buckets=asked.buckets, pad_values=asked.pad_values)
    timings = _added(program.timings, *(one.timings for one in others))
    return replace(program, request=request, buckets=others, timings=timings)


def _bucket(first: ParallelProgram, asked: Request, inputs: Any, compile_form: Compile) -> ParallelProgram:
    """The program of a step for one of its other shapes."""
    try:
        return compile_form(form_request(first, asked, inputs))
    except AutoparError as error:
        error.add_note(
            f"This is of a bucket, {shapes_text(inputs)}: buckets= names sizes for every input whose size changes with another's."
        )
        raise


def _check_buffers(first: ParallelProgram, entry: ParallelProgram) -> None:
    """Raises CaptureError where a buffer that some step writes is in stages to which nobody would bring what another wrote."""
    written = {*first.ir.buffer_updates}.union(*(form.ir.buffer_updates for form in entry.of_buckets))
    for form in entry.of_buckets:
        for name in sorted(written):
            ours, theirs = (_holders(one, name) for one in (form, first))
            writes = name in form.ir.buffer_updates and len(theirs) > 1
            if not ours <= theirs <= ({*form.lowered.shared.get(name, ())} if writes else theirs):
                raise CaptureError(
                    f"entries[{entry.request.entry!r}] has the buffer {name}, which steps write, in stages {sorted(ours)}, and "
                    f"the program's own step in {sorted(theirs)}; use Options(pp=1), or read it in the module that writes it"
                )


def _check_trained(first: ParallelProgram, entry: ParallelProgram) -> None:
    """Raises CaptureError where an entry trains a parameter of several stages, and would not bring it to all that have it, or
    one that rests in a memory tier."""
    for form in entry.of_buckets:
        for name in form.ir.trained if form.training else ():
            if form.lowered.shared.get(name) != first.lowered.shared.get(name):
                raise CaptureError(
                    f"entries[{entry.request.entry!r}] trains {name}, which other stages have than those in which the program's "
                    "own step uses it; use Options(pp=1)"
                )
            if any(
                p.tier or p.optimizer_tier for stage in first.plan.stages for p in [stage.parameters.get(name)] if p
            ):
                raise CaptureError(
                    f"entries[{entry.request.entry!r}] trains {name}, which rests in a memory tier, or its optimizer's state "
                    "does, and the program's own step alone trains such parameters; use Options(offload='none')"
                )


def _check_averaged(first: ParallelProgram, entry: ParallelProgram, names: Sequence[str]) -> None:
    """Raises CaptureError where a parameter that an entry averages is in other stages there, or rests in a memory tier."""
    for name in names:
        if any(form.lowered.shared.get(name) != first.lowered.shared.get(name) for form in entry.of_buckets):
            raise CaptureError(
                f"entries[{entry.request.entry!r}] averages {name}, which other stages have than those in which the program's "
                "own step uses it; use Options(pp=1)"
            )
        if any(p.tier for stage in first.plan.stages for p in [stage.parameters.get(name)] if p):
            raise CaptureError(
                f"entries[{entry.request.entry!r}] averages {name}, which rests in a memory tier; use Options(offload='none')"
            )


def _holders(program: ParallelProgram, name: str) -> set[int]:
    """The stages that have a buffer."""
    return {stage.index for stage in program.stages if name in stage.buffers}


def _added(*timings: Any) -> dict[str, float]:
    """Seconds by name, those of several programs together."""
    return {name: sum(one[name] for one in timings) for name in timings[0]}
