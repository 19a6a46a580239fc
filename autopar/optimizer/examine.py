"""The facts of the user's optimizer that `compile` needs, found by running it on small parameters with the program's names.

    how much state it keeps and needs for a moment     the planner's memory
    which parameters it needs whole                    the planner keeps those replicated

torch's own elementwise optimizers are listed; every other optimizer is tested: it is elementwise for a parameter if
updating the two halves of it apart gives what updating it whole gives. One whose update of a parameter depends on
other parameters cannot run on ranks that see some of them, and is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.counter import ByteCounter
from autopar.errors import InputError
from autopar.ir.program import Program
from autopar.ir.setting import OptimizerState
from autopar.runtime.data.origin import package_of
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.update.optimizer_forms import is_fusible
from autopar.runtime.update.scheduler_steps import step_scheduler
from autopar.runtime.update.update_rule import (
    REFUSED_OPTIMIZERS,
    WHOLE_TENSOR_OPTIMIZERS,
    Named,
    OptimizerFactory,
    UpdateRule,
    make_optimizers,
    stand_in,
)

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
STEPS = 3
ELEMENTS = 4096  # the size of a parameter on which the scratch memory of a step is measured
Shapes = Mapping[str, tuple[int, ...]]


def examine(rule: UpdateRule, program: Program, ranks: int) -> OptimizerState:
    """The state of the rule's optimizer on a program's trained parameters. Raises InputError where it cannot be used."""
    if not program.training:
        return OptimizerState()
    return examine_on(rule, {name: program.parameters[name].type.shape for name in program.trained}, ranks)


def examine_on(rule: UpdateRule, sizes: Shapes, ranks: int) -> OptimizerState:
    """The state of the rule's optimizer on parameters of these shapes. Raises InputError where it cannot be used."""
    factory = rule.optimizer
    if factory is None or not sizes:
        return OptimizerState()
    shapes = {name: tuple(4 + 2 * dim for dim in range(len(shape))) for name, shape in sizes.items()}
    try:
        parameters = _random(shapes)
        optimizers = _made(factory, list(parameters.items()))
        for optimizer in optimizers:
            check_kind(optimizer)
        parameters = _with_gradients(parameters)
        optimizers = _made(factory, list(parameters.items()))
        alike = _updated_alike(optimizers)
        for parameter in parameters.values():
            if alike.get(id(parameter), parameter) is not parameter:
                parameter.grad = None  # one of them tells the state of all
        for optimizer in optimizers:
            optimizer.step()
        if rule.scheduler is not None:
            _check_schedulers(rule.scheduler, optimizers)
        whole = _whole(factory, optimizers, parameters, shapes, ranks)
        scratch = _scratch(factory, sizes)
    except InputError:
        raise
    except RuntimeProgramError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        raise InputError(
            f"the optimizer factory cannot make a working optimizer: {type(error).__name__}: {error}"
            + (
                ""
                if "2D" not in str(error)
                else "; a factory of `named_parameters` can give it some of them, and the "
                "others to a second optimizer: return both"
            )
        ) from error
    kept, each = _state(optimizers, parameters, alike)
    total = sum(math.prod(shape) for shape in sizes.values())
    ratio = sum(kept[name] * math.prod(shape) for name, shape in sizes.items()) / max(total, 1)
    other = {name: count for name, count in kept.items() if count != ratio}
    fused = all(map(is_fusible, optimizers))
    return OptimizerState(ratio, each, scratch, fused, frozenset(whole), other, _groups(optimizers, parameters))


def _random(shapes: Shapes, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for n, shape in shapes.items()
    }


def _with_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Copies in float32 with a gradient."""
    copies = {name: nn.Parameter(p.detach().float()) for name, p in parameters.items()}
    for parameter in copies.values():
        parameter.grad = torch.ones_like(parameter)
    return copies


def _made(factory: OptimizerFactory, named: Named) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a factory as the host can step them: what `capturable` asks for is a GPU, and changes no number."""
    optimizers = make_optimizers(factory, named)
    for group in (group for one in optimizers for group in one.param_groups if group.get("capturable")):
        group["capturable"] = False
    return optimizers


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError for an optimizer that cannot train a program, whatever its parameters."""
    kind = type(optimizer).__name__
    if _is_torchs(optimizer) and kind in REFUSED_OPTIMIZERS:
        raise InputError(f"{kind} cannot train a compiled program: {REFUSED_OPTIMIZERS[kind]}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            f"this {kind} has a step hook (register_step_pre_hook, register_step_post_hook), which would see the shards "
            "of a rank; leave it out: clipping is an option of compile, and what is looked at goes after program.step"
        )


def _check_schedulers(scheduler: Callable[[Any], Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    try:
        schedulers = [scheduler(optimizer) for optimizer in optimizers]
    except Exception as error:
        raise InputError(f"the scheduler factory failed: {type(error).__name__}: {error}") from error
    if not all(hasattr(s, "step") and hasattr(s, "state_dict") for s in schedulers):
        raise InputError(
            f"the scheduler factory must return a torch.optim.lr_scheduler, not {type(schedulers[0]).__name__}"
        )
    for one in schedulers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the scheduler was made after its optimizer's step
                step_scheduler(one, lambda: 1.0)
        except RuntimeProgramError:
            raise
        except Exception as error:
            raise InputError(
                f"{type(one).__name__}.step fails after the first step of the optimizer: {type(error).__name__}: {error}"
            ) from error


def _updated_alike(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, nn.Parameter]:
    """By id of a parameter that torch's own elementwise optimizer updates the first one of its group with as many dims."""
    alike: dict[int, nn.Parameter] = {}
    for optimizer in optimizers:
        if _is_torchs(optimizer) and type(optimizer).__name__ in ELEMENTWISE:
            for group in optimizer.param_groups:
                first: dict[int, nn.Parameter] = {}
                alike |= {id(p): first.setdefault(p.dim(), p) for p in group["params"]}
    return alike


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return package_of(type(optimizer)) == "torch"


def _state(
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    alike: Mapping[int, nn.Parameter],
) -> tuple[dict[str, float], int]:
    """Per parameter the state elements per element, and the bytes of one. Single numbers count for nothing. alike: by id of a
    parameter the one whose state is like its own."""
    kept: dict[int, list[torch.Tensor]] = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            kept[id(p)] = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() and v.shape == p.shape]
    each = max((v.dtype.itemsize for values in kept.values() for v in values), default=0)
    most = {len(values) for values in kept.values() if values}
    usual = float(most.pop()) if len(most) == 1 else 0.0
    told = {n: kept.get(id(alike.get(id(p), p)), []) for n, p in parameters.items()}
    return {n: float(len(told[n])) if p.dim() else usual for n, p in parameters.items()}, each


def _groups(optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Which group every parameter is in; nothing where there is one group."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    place = {id(p): number for number, members in enumerate(groups) for p in members}
    return {name: place[id(p)] for name, p in parameters.items() if id(p) in place} if len(groups) > 1 else {}


def _scratch(factory: Any, sizes: Shapes) -> tuple[float, float, float]:
    """Elements of scratch memory that a step needs for one parameter, and how many more for a second and a third one like it."""
    largest = sorted((n for n, s in sizes.items() if s), key=lambda n: (-len(sizes[n]), -math.prod(sizes[n])))[:3]
    scratch_by_count = []
    for count in range(1, len(largest) + 1):
        chosen = {name: nn.Parameter(torch.zeros(_square(len(sizes[name])))) for name in largest[:count]}
        named = [(n, chosen.get(n, stand_in(len(s), torch.float32, torch.device("cpu")))) for n, s in sizes.items()]
        optimizers, counter = _made(factory, named), ByteCounter()
        for parameter in chosen.values():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        with counter:
            for optimizer in optimizers:
                optimizer.step()
        scratch_by_count.append(float(counter.peak // (4 * ELEMENTS)))  # whole tensors: numbers count for nothing
    while len(scratch_by_count) < 3:
        scratch_by_count.append(scratch_by_count[-1] if scratch_by_count else 0.0)
    alone, two, three = scratch_by_count
    return alone, max(two - alone, 0.0), max(three - two, 0.0)


def _square(ndim: int) -> tuple[int, ...]:
    """A shape of ELEMENTS elements."""
    side = math.isqrt(ELEMENTS)
    return (ELEMENTS,) if ndim == 1 else (side, side, *(1,) * (ndim - 2))


# --- elementwise or not ---------------------------------------------------------------------------------------------------


def _whole(
    factory: Any,
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    shapes: Shapes,
    ranks: int,
) -> set[str]:
    """Names of the parameters whose update needs whole tensors."""
    names = {id(p): name for name, p in parameters.items()}
    whole: set[str] = set()
    unknown: set[str] = set()
    for optimizer in optimizers:
        taken = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        kind, own = type(optimizer).__name__, _is_torchs(optimizer)
        if own and kind in WHOLE_TENSOR_OPTIMIZERS:
            whole |= taken
        elif not (own and kind in ELEMENTWISE):
            unknown |= taken
            if ranks > 1:
                _refuse_coupled(factory, kind, sorted(taken), shapes)
    return whole | (_not_elementwise(factory, shapes) & unknown if unknown else set())


def _not_elementwise(factory: Any, shapes: Shapes) -> set[str]:
    together, cut = _trained(factory, shapes), set()
    for dim in (0, -1):
        for half in (0, 1):

            def part(x: torch.Tensor, dim: int = dim, half: int = half) -> torch.Tensor:
                return x.chunk(2, dim)[half] if x.dim() else x

            for name, value in _trained(factory, shapes, part).items():
                if not torch.allclose(value, part(together[name]), rtol=1e-9, atol=1e-12):
                    cut.add(name)
    return cut


def _refuse_coupled(factory: Any, kind: str, names: list[str], shapes: Shapes) -> None:
    every_second = set(names[::2])
    if len(names) > len(every_second):
        among_all, alone = _trained(factory, shapes), _trained(factory, shapes, only=every_second)
        if not all(torch.allclose(among_all[name], alone[name], rtol=1e-9, atol=1e-12) for name in every_second):
            raise InputError(
                f"{kind} lets the update of one parameter depend on others ({names[0]} moves differently without gradients of "
                "the rest), which ranks that hold parts of the model cannot; use an optimizer that treats parameters apart"
            )


def _trained(
    factory: Any,
    shapes: Shapes,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    only: set[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters after some steps. part: what is trained of each. only: those that get a gradient (None: all)."""
    parameters = {name: nn.Parameter(part(p.detach()).clone()) for name, p in _random(shapes).items()}
    optimizers = _made(factory, list(parameters.items()))
    for step in range(STEPS):
        for name, grad in _random(shapes, 1 + step).items():
            parameters[name].grad = part(grad.detach()).clone() if only is None or name in only else None
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}
