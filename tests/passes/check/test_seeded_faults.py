"""Seeded faults in lowered lines: the checker refuses the program, or `autopar.check` finds that it is not equal.

A fault changes one function of a lowered program, as a wrong pass could have: of a small GPT, or of a model with a penalty on its
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.ir.lines import (
    AddGradient,
    CallBackward,
    CallForward,
    Compute,
    Convert,
    Cut,
    Function,
    Join,
    Line,
    Ref,
    Start,
    SumLoss,
    Wait,
)
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.passes.search.overlap import overlapping
from autopar.passes.search.pieces import in_pieces
from autopar.passes.search.task import Task
from autopar.plan import Plan
from autopar.proof.random_plans import insisting
from tests.differential import terms
from tests.zoo.models import ADAMW, token_loss
from tests.zoo.transformers import Gpt2

Fault = Callable[[Function], Function | None]
"""A function with a fault; None where the fault has no place in it."""


@functools.cache
def gpt() -> autopar.Program:
    """Two ranks that share rows and two that share weights, in microbatches and pieces, with lines run beside messages."""
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (16, 8))
    options = autopar.Options(
        mesh={"dp": 2, "tp": 2}, strategy="megatron", microbatches=2, recompute="none", overlap=False
    )
    model = Gpt2(32, 8, 16, 4, 2)
    made = autopar.compile(
        model, autopar.ClusterSpec.local(4), (ids, ids), loss_fn=token_loss, optimizer=ADAMW, options=options
    )
    moved = made.with_plan(insisting(overlapping(made.plan, "any")))
    return made.with_plan(insisting(in_pieces(moved.plan, 2, moved.ir, moved.lowered, moved.rules)))


@functools.cache
def penalized() -> autopar.Program:
    """A penalty on weights joins the loss of the samples, in microbatches; parameters rest in shards."""
    torch.manual_seed(0)
    options = autopar.Options(mesh={"dp": 2}, strategy="zero3", microbatches=2)
    model, batch = terms.Penalized(terms.TERMS["squares"]), (torch.randn(8, 6), torch.randn(8, 4))
    loss = terms.loss_of(terms.JOINS["before"])
    return autopar.compile(model, autopar.ClusterSpec.local(2), batch, loss_fn=loss, optimizer=ADAMW, options=options)


PROGRAMS = (gpt, penalized)


# --- how faults are made


def changed(function: Function, at: int, *lines: Line) -> Function:
    """The function with these lines in the place of line `at`."""
    return replace(function, lines=(*function.lines[:at], *lines, *function.lines[at + 1 :]))


def places(function: Function, *kinds: type[Line]) -> Iterator[tuple[int, Any]]:
    return ((i, line) for i, line in enumerate(function.lines) if isinstance(line, kinds))


def ops(function: Function, name: str) -> Iterator[tuple[int, Compute]]:
    return ((i, line) for i, line in places(function, Compute) if name in line.op)


def renamed(line: Line, old: str, new: str) -> Line:
    """The line with what it makes under another name."""
    return replace(line, outs=tuple(new if out == old else out for out in line.outs))


def reading(line: Compute, old: str, new: str) -> Compute:
    """An op that reads another value."""
    kwargs = {k: Ref(new) if isinstance(v, Ref) and v.name == old else v for k, v in line.kwargs.items()}
    return replace(line, kwargs=kwargs)


def alike(function: Function) -> Iterator[tuple[int, Compute, str, str]]:
    """Ops with an operand in whose place another value of the same type and spec could stand."""
    typed = dict(function.arg_types)
    for i, line in enumerate(function.lines):
        if isinstance(line, Compute):
            for old in line.reads():
                for other, what in typed.items():
                    if other != old and typed.get(old) == what:
                        yield i, line, old, other
        typed |= {name: (t, s) for name, t, s in line.made() if t is not None and s is not None}


# --- the faults


def a_name_made_twice(f: Function) -> Function | None:
    seen: dict[Any, str] = {}
    for i, line in places(f, Compute):
        key = (line.types, line.specs)
        if key in seen and len(line.outs) == 1 and line.outs[0] not in f.returns:
            return changed(f, i, renamed(line, line.outs[0], seen[key]))
        seen[key] = line.outs[0]
    return None


def the_tape_overwritten(f: Function) -> Function | None:
    kept = next((name for name in f.arg_types if name not in f.args), None)
    last = len(f.lines) - 1
    if kept is None:
        return None
    type_, spec = f.arg_types[kept]
    again = Compute("aten.neg.default", {"self": Ref(kept)}, outs=(kept,), types=(type_,), specs=(spec,))
    return changed(f, last, again, f.lines[last])


def an_operand_of_the_same_type(f: Function) -> Function | None:
    found = next(((i, line, old, new) for i, line, old, new in alike(f) if "add" not in line.op), None)
    return found and changed(f, found[0], reading(found[1], *found[2:]))


def pieces_joined_in_another_order(f: Function) -> Function | None:
    found = next(((i, line) for i, line in places(f, Join) if line.dim is not None), None)
    return found and changed(f, found[0], replace(found[1], pieces=found[1].pieces[::-1]))


def one_piece_twice(f: Function) -> Function | None:
    found = next(((i, line) for i, line in places(f, Join) if line.dim is not None), None)
    return found and changed(f, found[0], replace(found[1], pieces=(found[1].pieces[0],) * 2))


def a_sum_that_lacks_a_piece(f: Function) -> Function | None:
    found = next(((i, line) for i, line in places(f, Join) if line.dim is None), None)
    return found and changed(f, found[0], replace(found[1], pieces=(found[1].pieces[0],) * 2))


def pieces_cut_in_another_order(f: Function) -> Function | None:
    found = next(places(f, Cut), None)
    return found and changed(f, found[0], replace(found[1], outs=found[1].outs[::-1]))


def pieces_cut_along_another_dim(f: Function) -> Function | None:
    found = next(((i, line) for i, line in places(f, Cut) if line.dim == 0), None)
    return found and changed(f, found[0], replace(found[1], dim=1))


def a_sum_over_the_other_axis(f: Function) -> Function | None:
    for i, line in places(f, Convert):
        if line.step.kind == "all_reduce":
            return changed(f, i, replace(line, step=replace(line.step, axis="dp" if line.step.axis == "tp" else "tp")))
    return None


def a_sum_made_twice(f: Function) -> Function | None:
    for i, line in places(f, Convert):
        if line.step.kind == "all_reduce":
            once = renamed(line, line.outs[0], "once")
            return changed(f, i, once, replace(line, value="once"))
    return None


def a_message_that_is_waited_for_too_late(f: Function) -> Function | None:
    for i, line in places(f, Wait):
        reader = next((k for k, later in enumerate(f.lines) if k > i and line.outs[0] in later.reads()), None)
        if reader is not None:
            lines = list(f.lines)
            lines.insert(reader, lines.pop(i))
            return replace(f, lines=tuple(lines))
    return None


def a_message_of_another_value(f: Function) -> Function | None:
    starts = [(i, line) for i, line in places(f, Start) if isinstance(line.line, Convert)]
    for i, line in starts:
        for _, other in starts:
            same = (line.line.types, line.line.specs) == (other.line.types, other.line.specs)
            if same and other is not line and other.line.value in _made_before(f, i):
                return changed(f, i, replace(line, line=replace(line.line, value=other.line.value)))
    return None


def _made_before(f: Function, at: int) -> set[str]:
    return {*f.arg_types} | {out for line in f.lines[:at] for out in line.outs}


def a_share_left_out(f: Function) -> Function | None:
    for i, line in ops(f, "div.Scalar"):
        if line.kwargs.get("other") == 2:
            return changed(f, i, replace(line, kwargs=line.kwargs | {"other": 1}))
    return None


def a_share_taken_twice(f: Function) -> Function | None:
    for i, line in ops(f, "div.Scalar"):
        if line.kwargs.get("other") == 2:
            return changed(f, i, replace(line, kwargs=line.kwargs | {"other": 4}))
    return None


def a_share_at_the_other_slot(f: Function) -> Function | None:
    for _, share in ops(f, "div.Scalar"):
        whole = next(iter(share.reads()))
        slots = [k for k, name in enumerate(f.returns) if name in (whole, share.outs[0])]
        if "backward" in f.name and len(slots) == 2:
            returns = list(f.returns)
            returns[slots[0]], returns[slots[1]] = returns[slots[1]], returns[slots[0]]
            return replace(f, returns=tuple(returns))
    return None


def a_share_at_both_slots(f: Function) -> Function | None:
    for _, share in ops(f, "div.Scalar"):
        whole = next(iter(share.reads()))
        if "backward" in f.name and whole in f.returns and share.outs[0] in f.returns:
            return replace(f, returns=tuple(share.outs[0] if r == whole else r for r in f.returns))
    return None


def gradients_given_out_at_the_wrong_slots(f: Function) -> Function | None:
    """The function with two gradients of parameters of one shape returned in each other's place."""
    typed = {name: (t, s) for line in f.lines for name, t, s in line.made()}
    for i, a in enumerate(f.returns):
        for k in range(i + 1, len(f.returns)):
            b = f.returns[k]
            if "backward" in f.name and a and b and a != b and a in typed and typed.get(a) == typed.get(b):
                returns = list(f.returns)
                returns[i], returns[k] = b, a
                return replace(f, returns=tuple(returns))
    return None


def a_gradient_for_another_parameter(f: Function) -> Function | None:
    added = [*places(f, AddGradient)]
    for i, line in added:
        for _, other in added:
            if (
                other.parameter != line.parameter
                and other.parameter.split(".")[2:] == line.parameter.split(".")[2:] != []
            ):
                return changed(f, i, replace(line, parameter=other.parameter))
    return None


def a_gradient_left_out(f: Function) -> Function | None:
    found = next(places(f, AddGradient), None)
    return found and replace(f, lines=tuple(line for line in f.lines if line is not found[1]))


def a_gradient_added_twice(f: Function) -> Function | None:
    found = next(places(f, AddGradient), None)
    return found and changed(f, found[0], found[1], found[1])


def what_another_call_saved(f: Function) -> Function | None:
    calls = [*places(f, CallBackward)]
    for i, line in calls:
        for _, other in calls:
            if other.template == line.template and other.saved != line.saved:
                return changed(f, i, replace(line, saved=other.saved))
    return None


def parameters_of_another_call(f: Function) -> Function | None:
    calls = [*places(f, CallForward)]
    for i, line in calls:
        for _, other in calls:
            if other.template == line.template and other.params != line.params:
                return changed(f, i, replace(line, params=other.params))
    return None


def inputs_of_another_call(f: Function) -> Function | None:
    calls = [*places(f, CallForward)]
    for i, line in calls:
        for _, other in calls:
            if other.template == line.template and other.inputs != line.inputs and i > 0:
                return changed(f, i, replace(line, inputs=other.inputs))
    return None


def a_loss_that_is_not_summed(f: Function) -> Function | None:
    for i, line in places(f, SumLoss):
        return replace(
            f,
            lines=tuple(x for k, x in enumerate(f.lines) if k != i),
            returns=tuple(line.value if r == line.outs[0] else r for r in f.returns),
        )
    return None


def another_op(f: Function) -> Function | None:
    for i, line in ops(f, "aten.add.Tensor"):
        return changed(f, i, replace(line, op="aten.sub.Tensor"))
    return None


def the_shape_of_the_whole(f: Function) -> Function | None:
    """A block is viewed, expanded or filled as it would be on one device."""
    for i, line in enumerate(f.lines):
        for key in ("size", "shape"):
            if (
                isinstance(line, Compute)
                and line.types[0] is not None
                and isinstance(line.kwargs.get(key), (list, tuple))
            ):
                size = [*line.types[0].shape]
                if [*line.kwargs[key]] != size:
                    return changed(f, i, replace(line, kwargs=line.kwargs | {key: size}))
    return None


FAULTS: dict[str, Fault] = {
    name: fault
    for name, fault in list(globals().items())
    if getattr(fault, "__annotations__", {}) == {"f": "Function", "return": "Function | None"}
}
AT_LEAST = 15


def seeded(lowered: LoweredProgram, fault: Fault) -> LoweredProgram | None:
    """The program with the fault in the first function that has a place for it; None where none has."""
    for s, stage in enumerate(lowered.stages):
        bad = _in_templates(stage, fault) or _in_stage(stage, fault)
        if bad is not None:
            return replace(lowered, stages=(*lowered.stages[:s], bad, *lowered.stages[s + 1 :]))
    return None


def _in_templates(stage: LoweredStage, fault: Fault) -> LoweredStage | None:
    for name, template in stage.templates.items():
        for which in ("forward", "backward"):
            function = getattr(template, which)
            bad = fault(function) if function is not None else None
            if bad is not None and bad != function:
                return replace(stage, templates={**stage.templates, name: replace(template, **{which: bad})})
    return None


def _in_stage(stage: LoweredStage, fault: Fault) -> LoweredStage | None:
    for which in ("forward", "backward"):
        function = getattr(stage, which)
        bad = fault(function) if function is not None else None
        if bad is not None and bad != function:
            return replace(stage, **{which: bad})
    return None


def found(plain: autopar.Program) -> bool:
    """Whether a program that is lowered with a fault is refused, not equal, or ended by an error of the rank that meets it, or of
    torch where its lines are played for their memory."""
    try:
        bad = plain.with_plan(plain.plan)
        return autopar.check(bad).outcome == "not equal"
    except autopar.CheckError:
        return True
    except RuntimeError as error:
        return "raised by rank" in "".join(getattr(error, "__notes__", ())) or "is invalid for input" in str(error)


@pytest.mark.parametrize("plain", PROGRAMS)
def test_a_program_without_a_fault_is_equal(plain: Callable[[], autopar.Program]) -> None:
    assert autopar.check(plain()).ok


@pytest.mark.few(7)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = next(one() for one in PROGRAMS if seeded(one().lowered, FAULTS[fault]) is not None)
    real = Task.lower

    def lowered(task: Task, plan: Plan) -> LoweredProgram:
        bad = seeded(real(task, plan), FAULTS[fault])
        assert bad is not None
        return bad

    monkeypatch.setattr(Task, "lower", lowered)
    assert found(plain)


def test_faults_of_many_kinds_are_seeded() -> None:
    assert len(FAULTS) >= AT_LEAST
