"""The checker rejects lowered programs that do not compute what their specs say."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import CheckError
from autopar.ir.lowered import Function, LoweredStage
from autopar.ir.spec import Spec
from autopar.passes.check.lines import check
from tests.passes.shard.test_plans import compiled


def stage_with_collectives() -> tuple[LoweredStage, object]:
    program = compiled("llama", 4, (("dp", 2), ("tp", 2)))
    for seed in range(20):
        made = program.with_plan(autopar.random_plan(program, seed))
        if any(line.op.startswith("comm.all_reduce") for line in made.stages[0].templates["blocks"].forward.lines):
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
    kinds = {line.op for line in stage.templates["blocks"].forward.lines if line.op.startswith("comm.")}
    for kind in kinds:
        at = next(i for i, line in enumerate(stage.templates["blocks"].forward.lines) if line.op == kind)

        def drop(function: Function, at: int = at) -> Function:
            line = function.lines[at]
            source = line.args[0].name
            rest = [x for i, x in enumerate(function.lines) if i != at]

            def rename(value: object) -> object:
                if getattr(value, "name", None) == line.outs[0]:
                    return type(value)(source)
                return [rename(v) for v in value] if isinstance(value, list) else value

            lines = tuple(
                replace(x, args=tuple(map(rename, x.args)), kwargs={k: rename(v) for k, v in x.kwargs.items()})
                for x in rest
            )
            return replace(function, lines=lines)

        with pytest.raises(CheckError):
            check(change(stage, drop), rules)  # type: ignore[arg-type]


def test_wrong_spec_is_found() -> None:
    stage, rules = stage_with_collectives()

    def lie(function: Function) -> Function:
        at = next(i for i, x in enumerate(function.lines) if x.op == "autopar.linear")
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
        at = next(i for i, x in enumerate(function.lines) if x.op.startswith("comm."))
        lines = list(function.lines)
        lines[at] = replace(lines[at], args=(lines[at].args[0], "pp", *lines[at].args[2:]))
        return replace(function, lines=tuple(lines))

    with pytest.raises(CheckError, match="pp"):
        check(change(stage, rename), rules)  # type: ignore[arg-type]
