"""The oracle can fail: every mistake planted in a lowered program makes `verify` say no."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.lines import AddGradient, Compute, Convert, Function, Line, Ref, Site, SumLoss, WriteBuffer
from autopar.ir.lowered import LoweredStage
from autopar.proof.compare import compare
from autopar.proof.verify import Verification, verify
from tests.capture.equal import SGD

BATCH = (torch.randn(8, 8), torch.arange(8))
Mutate = Callable[[Line], Line | None]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))


def program_of(model: nn.Module, strategy: str = "dp", **mesh: int) -> autopar.Program:
    options = autopar.Options(strategy=strategy, mesh=mesh or {"dp": 2})
    return autopar.compile(
        model, autopar.ClusterSpec.local(2), BATCH, loss_fn=F.cross_entropy, optimizer=SGD, options=options
    )


def mutated(
    program: autopar.Program, change: Mutate, where: str = "forward backward step", most: int = 1
) -> autopar.Program:
    """The program with the first `most` lines that `change` wants otherwise (None: removed) changed."""
    left = most

    def lines(function: Function | None, name: str) -> Any:
        nonlocal left
        if function is None or name not in where:
            return function
        kept = []
        for line in function.lines:
            other = change(line) if left else line
            left -= other is not line
            if other is not None:
                kept.append(other)
        return replace(function, lines=tuple(kept))

    stage: LoweredStage = program.stages[0]
    templates = {
        name: replace(t, forward=lines(t.forward, "forward"), backward=lines(t.backward, "backward"))
        for name, t in stage.templates.items()
    }
    changed = replace(
        stage, templates=templates, forward=lines(stage.forward, "step"), backward=lines(stage.backward, "step")
    )
    assert left < most, "nothing to change: the mutation tests nothing"
    return with_stage(program, changed)


def with_stage(program: autopar.Program, stage: LoweredStage) -> autopar.Program:
    """The program with another first stage."""
    lowered = replace(program.lowered, stages=(stage, *program.stages[1:]))
    return replace(program, emitted=replace(program.emitted, lowered=lowered))


def refuted(program: autopar.Program, model: nn.Module) -> dict[str, float]:
    """Errors above tolerance; there must be some."""
    result = autopar.verify(program, model, BATCH)
    assert not result.ok
    return {name: e for name, e in result.errors.items() if not e <= result.tolerance}


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [plain, with_dropout, with_batch_norm])
def test_what_is_mutated_below_is_right_before(make: Callable[[], nn.Module]) -> None:
    model = make()
    result = autopar.verify(program_of(model), model, BATCH)
    assert result.ok
    assert result.max_error <= 1e-9


def test_parts_of_a_model_that_are_in_eval_mode_stay_in_it() -> None:
    """A frozen backbone is in eval mode while its head is trained."""
    model = with_batch_norm()
    model[1].eval()
    assert autopar.verify(program_of(model), model, BATCH).ok


def test_a_dropped_gradient_reduction_is_found_at_that_parameter() -> None:
    model = plain()
    program = program_of(model)
    stage = program.stages[0]
    parameters = {**stage.parameters, "0.weight": replace(stage.parameters["0.weight"], reduce=())}
    errors = refuted(with_stage(program, replace(stage, parameters=parameters)), model)
    assert "grad/0.weight" in errors
    assert "grad/2.weight" not in errors
    assert "loss/0" not in errors


def test_a_dropped_all_reduce_inside_a_template_is_found() -> None:
    def keep_own_part(line: Line) -> Line:
        if not _is_all_reduce(line):
            return line
        kwargs = {"self": Ref(next(line.reads()))}
        return Compute("aten.clone.default", kwargs, outs=line.outs, types=line.types, specs=line.specs)

    model = plain()
    program = program_of(model)
    program = program.with_plan(plan_with(program, _all_reduces))
    assert refuted(mutated(program, keep_own_part, "forward"), model)


def _all_reduces(program: autopar.Program) -> bool:
    return any(_is_all_reduce(line) for t in program.stages[0].templates.values() for line in t.forward.lines)


def _is_all_reduce(line: Line) -> bool:
    return isinstance(line, Convert) and line.step.kind == "all_reduce"


def changed(line: Line, op: str, **changes: Any) -> Line:
    """The line with `changes` of its arguments, where it is that op."""
    return replace(line, kwargs={**line.kwargs, **changes}) if isinstance(line, Compute) and line.op == op else line


def other_op(line: Line, op: str, other: str) -> Line:
    """The line with the op `other` in place of `op`."""
    return replace(line, op=other) if isinstance(line, Compute) and line.op == op else line


def plan_with(program: autopar.Program, wanted: Callable[[autopar.Program], bool]) -> autopar.Plan:
    """The first random plan whose lowered program is as wanted."""
    for seed in range(200):
        plan = autopar.random_plan(program, seed, pp=1)
        if wanted(program.with_plan(plan)):
            return plan
    raise AssertionError("no random plan of 200 is as wanted")


def test_a_wrongly_scaled_gradient_is_found() -> None:
    def scale(line: Line) -> Line:
        return other_op(line, "aten.div.Tensor", "aten.mul.Tensor")

    model = plain()
    errors = refuted(mutated(program_of(model), scale, "backward"), model)
    assert {"grad/0.weight", "grad/2.bias"} <= errors.keys()
    assert "loss/0" not in errors


def test_a_loss_that_is_not_summed_over_ranks_is_found() -> None:
    def alone(line: Line) -> Line:
        return replace(line, axes=()) if isinstance(line, SumLoss) else line

    model = plain()
    errors = refuted(mutated(program_of(model), alone, "step"), model)
    assert "loss/0" in errors
    assert not any(name.startswith("grad/") for name in errors)


def test_another_dropout_mask_in_backward_than_in_forward_is_found() -> None:
    def other_key(line: Line) -> Line:
        return changed(line, "autopar.dropout", key=Site(7))

    model = with_dropout()
    errors = refuted(mutated(program_of(model), other_key, "backward"), model)
    assert {"grad/0.weight"} <= errors.keys()
    assert not any(name.startswith("without dropout/") for name in errors)


def test_ranks_that_draw_the_same_mask_for_different_rows_are_found() -> None:
    def same_rows(line: Line) -> Line:
        return changed(line, "autopar.dropout", offsets=(0, 0))

    model = with_dropout()
    program = program_of(model)
    assert "loss/0" in refuted(mutated(program, same_rows, "forward backward", most=2), model)


def test_dropout_of_the_wrong_strength_is_found_without_it() -> None:
    def unscaled(line: Line) -> Line:
        if not isinstance(line, Compute) or line.op != "autopar.linear" or "dropout" not in str(line.kwargs["x"]):
            return line
        return replace(line, op="aten.mul.Tensor", kwargs={"self": line.kwargs["x"], "other": 0.5})

    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    batch = (torch.randn(8, 16), torch.arange(8))
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=F.cross_entropy,
        optimizer=SGD,
        options=autopar.Options(strategy="dp", mesh={"dp": 2}),
    )
    assert not autopar.verify(mutated(program, unscaled, "forward"), model, batch).ok


def test_a_lost_buffer_update_is_found() -> None:
    model = with_batch_norm()
    errors = refuted(
        mutated(program_of(model), lambda l: None if isinstance(l, WriteBuffer) else l, "step", most=3), model
    )
    assert "buffer/1.running_var" in errors
    assert not any(name.startswith(("loss/", "grad/")) for name in errors)


def test_a_gradient_that_is_never_handed_over_stops_the_run() -> None:
    def lose(line: Line) -> Line | None:
        return None if isinstance(line, AddGradient) and line.parameter == "2.bias" else line

    model = plain()
    with pytest.raises(Exception, match=r"gradient of '2\.bias': 0 of 1 contributions"):
        autopar.verify(mutated(program_of(model), lose, "step"), model, BATCH)


def test_verify_against_another_architecture_is_not_ok() -> None:
    assert not autopar.verify(
        program_of(plain()), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), BATCH
    ).ok


def test_inference_of_a_wrong_program_is_found() -> None:
    model = plain().eval()
    program = autopar.compile(model, autopar.ClusterSpec.local(2), BATCH[:1])
    wrong = mutated(program, lambda l: other_op(l, "aten.tanh.default", "aten.sigmoid.default"))
    assert not autopar.verify(wrong, model, BATCH[:1]).ok


# --- the measure itself ------------------------------------------------------------------------------------------------


def values(**tensors: Tensor) -> dict[str, Tensor]:
    return {name.replace("_", "/"): t for name, t in tensors.items()}


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_infinitely_wrong() -> None:
    one = torch.ones(2)
    assert compare({}, values(grad_a=one)) == {"grad/a": float("inf")}
    assert compare(values(grad_a=one), {}) == {"grad/a": float("inf")}
    assert compare(values(grad_a=torch.ones(3)), values(grad_a=one)) == {"grad/a": float("inf")}


def test_nan_is_wrong_and_an_empty_comparison_proves_nothing() -> None:
    errors = compare(values(loss_0=torch.tensor(float("nan"))), values(loss_0=torch.tensor(1.0)))
    assert not Verification(errors, 1e-9).ok
    assert not Verification({}, 1e-9).ok
    assert Verification({"loss/0": 0.0}, 1e-9).ok


def test_a_tensor_that_is_mathematically_zero_is_measured_at_the_scale_of_its_kind() -> None:
    reference = values(grad_a=torch.ones(2), grad_b=torch.full((2,), 1e-18))
    assert compare(values(grad_a=torch.ones(2), grad_b=torch.zeros(2)), reference)["grad/b"] < 1e-12
    assert compare(values(grad_a=torch.ones(2), grad_b=torch.full((2,), 1e-3)), reference)["grad/b"] > 1e-4


def test_a_gradient_of_zeros_is_not_none() -> None:
    """An expert that no row chose has no gradient in eager, so that optimizers leave it alone."""
    zeros = torch.zeros(3)
    assert compare({"grad/a": zeros}, {}) == {"grad/a": math.inf}
    assert compare({}, {"grad/a": zeros}) == {"grad/a": math.inf}


class Scaled(nn.Module):
    """Multiplies by the root of a number, as float32 holds it. of: how the constant is made."""

    def __init__(self, of: Callable[[float, Tensor], Tensor]) -> None:
        super().__init__()
        self.of, self.lin = of, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return (h * self.of(37**0.5, h)).sin().square().mean()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "of",
    [
        lambda value, h: torch.tensor(value, dtype=h.dtype),
        lambda value, h: torch.tensor(value),
        lambda value, h: torch.tensor([value] * 6, dtype=torch.float32),
        lambda value, h: torch.as_tensor(value, dtype=h.dtype),
    ],
)
def test_constants_that_a_model_makes_have_its_rounding(of: Callable[[float, Tensor], Tensor]) -> None:
    model, batch = Scaled(of), (torch.randn(4, 6),)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), batch, optimizer=SGD)
    assert verify(program, model, batch).max_error < 1e-13


class Quantized(nn.Module):
    """Latents of 8 bits: integers that are divided have the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).sigmoid()
        levels = z.detach().mul(255).round().to(torch.uint8) / 255.0
        return (self.decoder(levels) + self.decoder(z)).square().mean()


def test_integers_that_are_divided_are_as_wide_as_the_reference() -> None:
    model, batch = Quantized(), (torch.randn(8, 6),)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), batch, optimizer=SGD)
    assert verify(program, model, batch).ok
    assert torch.get_default_dtype() is torch.float32
