"""Cut a program into stages: each stage of a program is a program again.

A stage takes a run of calls, which may be empty where another program's plan says what lies on the stage's ranks. Values that it
reads and another stage makes become inputs of it, values of it that others read are sent; a value read by three stages crosses
three times, straight from where it is made. Whatever works on a program (sharding, lowering, accounting) works on a stage. Inputs
of the batch cross nothing: every rank has the batch.

A parameter that several stages use lives in each of them and is owned by the first that trains it: the others hand it
their gradient and take the updated value. Parameters and buffers that no call uses rest in the first stage, or where the program
says that they are at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.names import fresh_name
from autopar.ir.program import Boundary, BoundaryTensor, Call, Program, ValueRef

Range = tuple[int, int]


def cut(program: Program, ranges: Sequence[Range]) -> tuple[Program, ...]:
    """The programs of the stages that run calls [first, last) each, in order. Raises PlanError for impossible cuts."""
    check_ranges(program, ranges)
    if len(ranges) == 1:
        return (program,)
    stage_of = {i: s for s, (first, last) in enumerate(ranges) for i in range(first, last)}
    boundary_tensors = _boundary_tensors(program, stage_of)
    owners = shared_parameters(program, ranges)
    return tuple(_stage(program, s, ranges[s], boundary_tensors, owners, stage_of) for s in range(len(ranges)))


def check_ranges(program: Program, ranges: Sequence[Range]) -> None:
    """Raises PlanError unless the ranges follow each other, cover all calls, and part no buffer from its update."""
    ends = [0, *(last for _, last in ranges)]
    firsts = [first for first, _ in ranges]
    if firsts != ends[:-1] or ends[-1] != len(program.calls) or any(a > b for a, b in ranges):
        raise PlanError(
            f"stages must follow each other and cover the {len(program.calls)} calls of the program; the plan's ranges are "
            f"{', '.join(f'{a}–{b}' for a, b in ranges)}"
        )
    allowed = cut_points(program)
    for first, last in ranges[1:]:
        if 0 < first < last and first not in allowed:
            names = ", ".join(sorted(program.buffer_updates)[:3])
            raise PlanError(
                f"no stage can start at call {first} ({program.calls[first].path or 'no path'}): it would part a buffer "
                f"({names}, …) from the calls that read and update it; start a call earlier or later"
            )


def cut_points(program: Program) -> frozenset[int]:
    """Calls at which a stage may start: every call but the first, unless a buffer is read before and updated after."""
    points = set(range(1, len(program.calls)))
    for name, ref in program.buffer_updates.items():
        places = [i for i, _ in program.readers.get(ValueRef("buffer", name=name), ())]
        if ref.kind == "call":
            places.append(ref.index)
        points -= set(range(min(places, default=0) + 1, max(places, default=0) + 1))
    for i, call in enumerate(program.calls):
        if call.prologue:
            readers = [
                c
                for o in range(len(program.template_of(call).outputs))
                for c, _ in program.readers.get(ValueRef("call", i, o), ())
            ]
            points -= set(range(i + 1, max(readers, default=i) + 1))
    return frozenset(points)


def shared_parameters(program: Program, ranges: Sequence[Range]) -> dict[str, tuple[int, ...]]:
    """Parameters and buffers that several stages hold: their stages, the owner first."""
    holders: dict[str, dict[int, bool]] = {}
    for s, (first, last) in enumerate(ranges):
        for i in range(first, last):
            call = program.calls[i]
            grads = program.template_of(call).param_grads
            for slot, name in enumerate(call.params):
                trains = i in program.backward_calls and grads[slot] is not None
                held = holders.setdefault(name, {})
                held[s] = held.get(s, False) or trains
            for ref in call.inputs:
                if ref.kind == "buffer":
                    holders.setdefault(ref.name, {}).setdefault(s, False)
    for name, ref in program.buffer_updates.items():
        if ref.kind == "call":
            s = next(s for s, (first, last) in enumerate(ranges) if first <= ref.index < last)
            holders.setdefault(name, {})[s] = True
    return {
        name: tuple(sorted(stages, key=lambda s: (not stages[s], s)))
        for name, stages in holders.items()
        if len(stages) > 1
    }


def _boundary_tensors(program: Program, stage_of: dict[int, int]) -> list[BoundaryTensor]:
    sends_gradient: dict[tuple[ValueRef, int], bool] = {}
    for i, call in enumerate(program.calls):
        template = program.template_of(call)
        for slot, ref in enumerate(call.inputs):
            if ref.kind != "call" or stage_of[ref.index] == stage_of[i]:
                continue
            owner = program.template_of(program.calls[ref.index])
            back = (
                i in program.backward_calls
                and template.input_grads[slot] is not None
                and owner.tangents[ref.output] is not None
                and ref.index in program.backward_calls
            )
            key = (ref, stage_of[i])
            sends_gradient[key] = sends_gradient.get(key, False) or back
    boundary_tensors: list[BoundaryTensor] = []
    for (ref, target), gradient in sends_gradient.items():
        outputs = program.template_of(program.calls[ref.index]).outputs
        stem = outputs[ref.output]
        place = (
            f"{ref.index}" if outputs.count(stem) == 1 else f"{ref.index}_{ref.output}"
        )  # one value may be given out twice
        name = fresh_name(f"{stem}_{place}_to_{target}", {c.name for c in boundary_tensors})
        boundary_tensors.append(BoundaryTensor(name, ref, stage_of[ref.index], target, gradient))
    return boundary_tensors


def _stage(
    program: Program,
    s: int,
    span: Range,
    boundary_tensors: list[BoundaryTensor],
    owners: dict[str, tuple[int, ...]],
    stage_of: dict[int, int],
) -> Program:
    first, last = span
    received = tuple(c for c in boundary_tensors if c.target == s)
    sent = tuple(c for c in boundary_tensors if c.source == s)
    calls = program.calls[first:last]
    refs = [ref for call in calls for ref in call.inputs]
    outputs = tuple(i for i, ref in enumerate(program.outputs) if _home(ref, stage_of) == s)
    batch = tuple(
        sorted(
            {r.index for r in refs if r.kind == "input"}
            | {program.outputs[i].index for i in outputs if program.outputs[i].kind == "input"}
        )
    )
    slot = {ValueRef("input", i): ValueRef("input", k) for k, i in enumerate(batch)}
    slot |= {c.value: ValueRef("input", len(batch) + k) for k, c in enumerate(received)}

    def local(ref: ValueRef) -> ValueRef:
        if ref in slot:
            return slot[ref]
        return replace(ref, index=ref.index - first) if ref.kind == "call" else ref

    used = {name for call in calls for name in call.params}
    elsewhere = {name for call in program.calls for name in call.params} - used
    read = {r.name for r in refs if r.kind == "buffer"}
    updates = {n: local(r) for n, r in program.buffer_updates.items() if r.kind == "call" and stage_of[r.index] == s}
    kept = {r.name for call in program.calls for r in call.inputs if r.kind == "buffer"} | {*program.buffer_updates}
    sizes = [program.type_of(c.value) for c in received]
    first_stage = frozenset({0})

    def at_home(name: str, used_elsewhere: bool) -> bool:
        return s in program.homes.get(name, frozenset() if used_elsewhere else first_stage)

    return replace(
        program,
        templates={name: t for name, t in program.templates.items() if any(c.template == name for c in calls)},
        calls=tuple(
            Call(c.template, c.params, tuple(map(local, c.inputs)), c.path, c.prologue, c.start) for c in calls
        ),
        parameters={n: p for n, p in program.parameters.items() if n in used or at_home(n, n in elsewhere)},
        buffers={n: b for n, b in program.buffers.items() if n in read or n in updates or at_home(n, n in kept)},
        inputs=(*(program.inputs[i] for i in batch), *((c.name, t) for c, t in zip(received, sizes, strict=True))),
        outputs=tuple(local(program.outputs[i]) for i in outputs),
        buffer_updates=updates,
        batch_dims=(*(program.batch_dims[i] for i in batch), *(None for _ in received)),
        boundary=Boundary(
            s,
            first,
            batch,
            outputs,
            received,
            sent,
            tuple(local(c.value) for c in sent),
            frozenset(n for n, held in owners.items() if s in held[1:]),
        ),
    )


def _home(ref: ValueRef, stage_of: dict[int, int]) -> int:
    """The stage that gives an output."""
    return stage_of[ref.index] if ref.kind == "call" else 0
