"""The part `equality`: a step's loss and gradients against eager PyTorch on the same device, in float32 and in bf16.

Three programs compute each of some batches: the emitted one, eager in the same dtypes (bf16: under autocast), and eager in
float64. A tensor's *error* is the distance from float64's, relative to that tensor: ‖x - x64‖ / ‖x64‖, its root mean square over
the batches. What rounding comes to on this device eager's errors say:

    limit = max(2, chance) · eager's error + √L · u

    2        the emitted program may round up to four times as often, and k roundings come to √k
    chance   how far apart two such root mean squares lie that come from one distribution, of as many roundings as there are
             elements in all batches; more than 2 for a few elements, such as the loss (`chance`)
    u        the rounding of float32, in which all sum; √L · u is how far a sum of L terms is off in the worst order
    L        the longest sum there can be: over all elements of an input, or a dim of a parameter

A tensor that is zero by cancellation (the gradient of a bias before a norm) is rounding alone, so it is measured against the
largest tensor of its batch (`NOISE`).
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.capture.known.promoted import cast
from autopar.proof.casts import map_tensors, promoted
from autopar.proof.reference import loss_of
from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.parts import Found

ZOO = ("mlp", "llama", "gpt2", "t5", "moe", "vit", "resnet", "lstm")
WIDE = ("llama", "gpt", "vit", "resnet")
"""Models of `benchmarks.one_rank`, wide enough for the kernels that a real model gets."""
REHEARSED = ("mlp",)
DRAWS = 8
FALSE_ALARM = 4.75
"""Standard deviations beyond which one of a million draws lies: a report has a few thousand tensors."""
NOISE = 1e-6
"""Tensors so much smaller than the largest of their batch have no scale of their own."""
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its loss and its batches, nothing of which drops by chance."""

    model: nn.Module
    loss_fn: Any
    batch_of: Callable[[int], Any]
    optimizer: Callable[..., torch.optim.Optimizer]


def cases(rehearsal: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The models by name, made when they are asked for."""
    for name in REHEARSED if rehearsal else ZOO:
        yield name, lambda name=name: zoo_case(name)  # type: ignore[misc]
    for name in () if rehearsal else WIDE:
        yield f"wide {name}", lambda name=name: wide_case(name)  # type: ignore[misc]


def zoo_case(name: str) -> Case:
    from tests.proof.precise import without_dropout
    from tests.zoo.models import BY_NAME

    zoo = BY_NAME[name]
    return Case(without_dropout(zoo.make()), zoo.loss_fn, zoo.batch, zoo.optimizer)


def wide_case(name: str) -> Case:
    from benchmarks.one_rank import MODELS, OPTIMIZER

    make, batch_of, loss_fn = MODELS[name]
    torch.manual_seed(0)
    return Case(make().train(), loss_fn, batch_of, OPTIMIZER)


def measure(machine: Machine) -> Found:
    for name, make in cases(machine.rehearsal):
        for precision in (None, "bf16"):
            yield f"{name}, {precision or 'float32'}", attempt(judged, machine, make, precision)


def judged(machine: Machine, make: Callable[[], Case], precision: str | None) -> dict[str, Any]:
    """The verdict on a model in these dtypes."""
    case = make()
    program = autopar.compile(
        case.model, machine.described(1), case.batch_of(0), loss_fn=case.loss_fn, optimizer=case.optimizer,
        options=autopar.Options(precision=precision),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        loaded = autopar.load(program.save(folder))
        eager = copy.deepcopy(case.model).to(machine.device)
        errors: dict[str, list[tuple[float, float]]] = {}
        elements: dict[str, int] = {}
        for draw in range(DRAWS):
            batch = map_tensors(case.batch_of(draw), lambda t: t.to(machine.device))
            loaded.session.load_weights(program.weights())
            ours = {"loss": loaded(batch).detach().clone().reshape(())}
            ours |= {f"gradient of {name}": grad for name, grad in loaded.session.full_grads().items()}
            plain = eager_values(eager, case, program, batch, None, precision)
            exact = eager_values(eager, case, program, batch, torch.float64)
            if missing := exact.keys() ^ ours.keys():
                raise AssertionError(f"gradients of one side alone: {', '.join(sorted(missing))}")
            least = NOISE * max(float(value.norm()) for value in exact.values())
            for name, value in exact.items():
                scale = max(float(value.norm()), least)
                errors.setdefault(name, []).append(
                    (distance(ours[name], value) / scale, distance(plain[name], value) / scale)
                )
                elements[name] = value.numel()
    return verdict(errors, elements, longest_sum(program, eager))


def verdict(
    errors: dict[str, list[tuple[float, float]]], elements: dict[str, int], longest: int
) -> dict[str, Any]:  # fmt: skip
    """Whether all tensors are within their limits, and the one that is nearest to it or beyond. errors: by tensor, the emitted
    program's and eager's for every batch."""
    floor = math.sqrt(longest) * torch.finfo(torch.float32).eps / 2
    rows = {}
    for name, draws in errors.items():
        ours, theirs = (math.sqrt(sum(one[side] ** 2 for one in draws) / len(draws)) for side in (0, 1))
        share = ours / (max(2.0, chance(len(draws) * elements[name])) * theirs + floor)
        rows[name] = (share if math.isfinite(share) else math.inf, ours, theirs)
    worst = max(rows, key=lambda name: rows[name][0])
    share, error, of_eager = rows[worst]
    return {
        "equal": share <= 1.0,
        "tensors": len(rows),
        "worst": worst,
        "share_of_limit": share,
        "error": error,
        "eager_error": of_eager,
        "floor": floor,
        "errors": {name: row[1:] for name, row in rows.items()},
    }


def chance(roundings: int) -> float:
    """How many times as large the root mean square of so many roundings may be as another, by chance: the logarithm of their
    ratio is nearly normal (Fisher's z), with a variance of one over their number less one."""
    return math.exp(FALSE_ALARM / math.sqrt(max(roundings - 1, 1)))


def eager_values(
    model: nn.Module, case: Case, program: autopar.Program, batch: Any, dtype: torch.dtype | None, low: str | None = None
) -> Values:  # fmt: skip
    """The same by autograd. dtype: of everything (None: the model's own); low: "bf16" under autocast."""
    device = next(model.parameters()).device
    model = copy.deepcopy(model).train()
    with torch.device(device):
        if dtype is not None:
            original, model = model, model.to(dtype)
            with promoted(dtype, original):
                loss, _ = loss_of(
                    model, map_tensors(batch, lambda t: cast(t, dtype)), case.loss_fn, program.request.targets
                )
        else:
            with torch.autocast(device.type, torch.bfloat16, enabled=low is not None):
                loss, _ = loss_of(model, batch, case.loss_fn, program.request.targets)
    loss.backward()
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def distance(value: Tensor, exact: Tensor) -> float:
    """‖value - exact‖."""
    return float((value.detach().double() - exact.double()).norm())


def longest_sum(program: autopar.Program, model: nn.Module) -> int:
    """The most terms that a sum of the step may have: elements of an input, or a dim of a parameter."""
    inputs = [math.prod(type_.shape) for _, type_ in program.ir.inputs]
    return max([*inputs, *(max(p.shape, default=1) for p in model.parameters())])


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    for name, one in record.items():
        if "error" in one and "equal" not in one:
            told.append(f"{name:24} failed: {one['error']}")
            continue
        word = "equal" if one["equal"] else "DIFFERS"
        told.append(
            f"{name:24} {word}: {one['tensors']} tensors, worst {one['worst']} at {one['share_of_limit']:.2f} of its limit "
            f"(error {one['error']:.1e}, eager's {one['eager_error']:.1e})"
        )
    return told
