"""Calls of templates in a stage's functions, held to what the templates take and give out.

What forward saves is a list that no spec describes, so a backward that read another call's list would pass every check of
types. Facts of a call belong to its number: the list that backward reads is the one that the same call's forward saved, and
every gradient reaches its parameter as often as the program uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.errors import CheckError
from autopar.ir.lines import AddGradient, CallBackward, CallForward, CallWeights, Function, Line, Ref, Stored
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.check.steps import check_steps

Typed = tuple[TensorType, Spec]


def check_calls(stage: LoweredStage, typed: Mapping[str, Mapping[str, Typed]]) -> None:
    """Arguments and results of every call, the lists between its functions, and the gradients that reach the store. typed: the
    values of each of the stage's functions. Raises CheckError."""
    saved: dict[int, tuple[str, str]] = {}
    later: dict[int, tuple[str, str]] = {}
    for function in stage.functions:
        known = typed[function.name]
        for line in function.lines:
            where = f"{function.name}: call {getattr(line, 'number', '')} of {getattr(line, 'template', '')}"
            match line:
                case CallForward(template=name, number=number):
                    _takes(stage, where, stage.templates[name].forward, (*line.params, *map(Ref, line.inputs)), known)
                    if line.keeps:
                        saved[number] = name, line.outs[-1]
                case CallBackward(template=name, number=number):
                    _reads_own(where, saved, number, (name, line.saved))
                    backward = _function_of(where, stage.templates[name].backward)
                    _takes(stage, where, backward, (*line.params, *map(Ref, line.tangents)), known)
                    if stage.weights is not None and stage.templates[name].later:
                        later[number] = name, line.outs[-1]
                case CallWeights(template=name, number=number):
                    _reads_own(where, later, number, (name, line.later))
    _check_gradients(stage, typed)


def _function_of(where: str, function: Function | None) -> Function:
    if function is None:
        raise CheckError(f"{where}: this template has no such function")
    return function


def _reads_own(where: str, kept: Mapping[int, tuple[str, str]], number: int, read: tuple[str, str]) -> None:
    """A call reads the list that it kept itself."""
    if kept.get(number) != read:
        own = kept.get(number, ("", "nothing"))[1]
        raise CheckError(f"{where} reads {read[1]}, what it kept is {own}")


def _takes(
    stage: LoweredStage, where: str, function: Function, arguments: Sequence[Ref | Stored], known: Mapping[str, Typed]
) -> None:
    """Arguments have the types and specs that the function was lowered for."""
    if len(arguments) != len(function.args):
        raise CheckError(f"{where} gives {len(arguments)} arguments, {function.name} takes {len(function.args)}")
    for argument, name in zip(arguments, function.args, strict=True):
        if isinstance(argument, Stored):
            parameter = stage.parameters[argument.name]
            given: Typed | None = parameter.type_of(argument), parameter.storage
        else:
            given = known.get(argument.name)
        wanted = function.arg_types[name]
        if given != wanted:
            shown = f"{given[1].show(given[0])}" if given is not None else "no tensor"
            raise CheckError(f"{where} gives {argument.name}, {shown}, where {wanted[1].show(wanted[0])} is taken")


def _check_gradients(stage: LoweredStage, typed: Mapping[str, Mapping[str, Typed]]) -> None:
    """Each use of a parameter adds one gradient of its shape to the store, in one spec; what the store may write to, nobody else
    reads."""
    added: Counter[str] = Counter()
    arrives: dict[str, Spec] = {}
    for function in stage.functions:
        reads = Counter(name for line in function.lines for name in line.reads())
        makers = {value: line for line in reversed(function.lines) for value in line.outs}
        for line in function.lines:
            if not isinstance(line, AddGradient):
                continue
            name, parameter = line.parameter, stage.parameters[line.parameter]
            type_, spec = typed[function.name][line.value]
            if type_.shape != parameter.type.shape or arrives.setdefault(name, spec) != spec:
                raise CheckError(f"{function.name}: {line.value}, {spec.show(type_)}, is no gradient of {name}")
            if line.owned and (reads[line.value] > 1 or not _is_alone(stage, makers[line.value], line.value)):
                raise CheckError(f"{function.name}: {line.value} goes to the store as its own, and is read elsewhere")
            added[name] += 1
    for name, parameter in stage.parameters.items():
        if name in arrives:
            way = arrives[name], parameter.reduce, parameter.optimizer
            check_steps(parameter, "the reduction of the gradient", *way, stage.mesh)
        if added[name] != parameter.contributions:
            raise CheckError(
                f"stage {stage.index}: {added[name]} gradients of {name} are stored, it is used {parameter.contributions} times"
            )


def _is_alone(stage: LoweredStage, call: Line, value: str) -> bool:
    """Whether the line that makes a value is a call that gives it out once and reads it nowhere."""
    if not isinstance(call, (CallBackward, CallWeights)):
        return False
    template = stage.templates[call.template]
    made_by = _maker(template, call)
    name = made_by.returns[call.outs.index(value)]
    read = {one for line in made_by.lines for one in line.reads()}
    return name not in read and name not in made_by.arg_types and made_by.returns.count(name) == 1


def _maker(template: LoweredTemplate, call: CallBackward | CallWeights) -> Function:
    return _function_of(template.name, template.weights if isinstance(call, CallWeights) else template.backward)
