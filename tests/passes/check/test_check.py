"""The checker rejects lowered programs that do not compute what their specs say."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import CheckError
from autopar.ir.lines import Compute, Convert, Function, Line, Ref, Start, Wait
from autopar.ir.lowered import LoweredStage
from autopar.ir.spec import Spec
from autopar.passes.check.lines import check
from autopar.passes.search.overlap import overlapping
from tests.passes.shard.test_plans import compiled


def steps_of(stage: LoweredStage) -> list[str]:
    lines = (line.line if isinstance(line, Start) else line for line in stage.templates["blocks"].forward.lines)
    return [line.step.kind for line in lines if isinstance(line, Convert)]


def stage_with_collectives(overlap: str = "") -> tuple[LoweredStage, object]:
    program = compiled("llama", 4, (("dp", 2), ("tp", 2)))
    for seed in range(20):
        made = program.with_plan(overlapping(autopar.random_plan(program, seed), overlap))
        if "all_reduce" in steps_of(made.stages[0]):
            return made.stages[0], made.rules
    raise AssertionError("no random plan with an all-reduce")


def change(stage: LoweredStage, f: object) -> LoweredStage:
    template = stage.templates["blocks"]
    forward: Function = f(template.forward)  # type: ignore[operator]
    return replace(stage, templates={**stage.templates, "blocks": replace(template, forward=forward)})


def test_checker_accepts_what_lowering_makes() -> None:
    stage, rules = stage_with_collectives()
    check(stage, rules)  # type: ignore[arg-type]


def test_dropped_collective_is_found() -> None:
    stage, rules = stage_with_collectives()
    for kind in set(steps_of(stage)):

        def drop(function: Function, kind: str = kind) -> Function:
            gone = next(x for x in function.lines if isinstance(x, Convert) and x.step.kind == kind)

            def rename(value: object) -> object:
                if isinstance(value, Ref):
                    return Ref(gone.value) if value.name == gone.outs[0] else value
                return [rename(v) for v in value] if isinstance(value, list) else value

            def without(line: Line) -> Line:
                if isinstance(line, Compute):
                    return replace(line, kwargs={k: rename(v) for k, v in line.kwargs.items()})
                assert isinstance(line, Convert)
                return replace(line, value=gone.value) if line.value == gone.outs[0] else line

            return replace(function, lines=tuple(without(x) for x in function.lines if x is not gone))

        with pytest.raises(CheckError):
            check(change(stage, drop), rules)  # type: ignore[arg-type]


def test_wrong_spec_is_found() -> None:
    stage, rules = stage_with_collectives()

    def lie(function: Function) -> Function:
        at = next(i for i, x in enumerate(function.lines) if isinstance(x, Compute) and x.op == "autopar.linear")
        line = function.lines[at]
        spec = line.specs[0]
        assert spec is not None
        wrong = Spec(((), *spec.dims[1:])) if spec.dims[0] else Spec((("dp",), *((),) * (len(spec.dims) - 1)))
        lines = list(function.lines)
        lines[at] = replace(line, specs=(wrong,))
        return replace(function, lines=tuple(lines))

    with pytest.raises(CheckError):
        check(change(stage, lie), rules)  # type: ignore[arg-type]


def test_value_used_before_it_is_made_is_found() -> None:
    stage, rules = stage_with_collectives()
    with pytest.raises(CheckError):
        check(change(stage, lambda f: replace(f, lines=f.lines[::-1])), rules)  # type: ignore[arg-type]


def test_unknown_axis_is_found() -> None:
    stage, rules = stage_with_collectives()

    def rename(function: Function) -> Function:
        first = next(x for x in function.lines if isinstance(x, Convert))
        renamed = replace(first, step=replace(first.step, axis="pp"))
        lines = tuple(renamed if x is first else x for x in function.lines)
        return replace(function, lines=lines)

    with pytest.raises(CheckError, match="pp"):
        check(change(stage, rename), rules)  # type: ignore[arg-type]


def test_messages_that_are_not_waited_for_once_are_found() -> None:
    stage, rules = stage_with_collectives("any")

    def forgotten(function: Function) -> Function:
        gone = next(line for line in function.lines if isinstance(line, Wait))
        readers = [line for line in function.lines if gone.outs[0] in line.reads()]
        return replace(function, lines=tuple(x for x in function.lines if x is not gone and x not in readers))

    def twice(function: Function) -> Function:
        at = next(i for i, line in enumerate(function.lines) if isinstance(line, Wait))
        return replace(function, lines=(*function.lines[: at + 1], *function.lines[at:]))

    def early(function: Function) -> Function:
        wait = next(line for line in function.lines if isinstance(line, Wait))
        return replace(function, lines=(wait, *(line for line in function.lines if line is not wait)))

    def another(function: Function) -> Function:
        def changed(line: Line) -> Line:
            if not isinstance(line, Wait):
                return line
            return replace(
                line, line=replace(line.line, step=replace(line.line.step, kind="all_to_all", dim=0, to_dim=1))
            )

        return replace(function, lines=tuple(map(changed, function.lines)))

    def read_unfinished(function: Function) -> Function:
        at = next(i for i, line in enumerate(function.lines) if isinstance(line, Start))
        start, types = function.lines[at], function.lines[at + 1].types
        reader = Compute(
            "aten.relu.default", {"self": Ref(start.outs[0])}, outs=("early",), types=types[:1], specs=(None,)
        )
        return replace(function, lines=(*function.lines[: at + 1], reader, *function.lines[at + 1 :]))

    for wrong in (forgotten, twice, early, another, read_unfinished):
        with pytest.raises(CheckError):
            check(change(stage, wrong), rules)  # type: ignore[arg-type]
