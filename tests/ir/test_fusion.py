"""Casts to a wider dtype that kernels do themselves are left out; all others stay."""

from __future__ import annotations

import torch

from autopar.ir.fusion import without_widening
from autopar.ir.lines import Compute, Function, Ref
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType

NARROW, WIDE, NUMBER = TensorType((4,), torch.bfloat16), TensorType((4,), torch.float32), TensorType((), torch.float32)
WHOLE = Spec.replicated(1)
CAST = Compute("aten._to_copy.default", {"self": Ref("x"), "dtype": torch.float32}, outs=("c",), types=(WIDE,))


def pointwise(out: str, op: str = "aten.mul.Tensor", **operands: object) -> Compute:
    kwargs = {key: Ref(value) if isinstance(value, str) else value for key, value in operands.items()}
    return Compute(op, kwargs, outs=(out,), types=(WIDE,), specs=(WHOLE,))


def ops_of(*lines: Compute, returns: tuple[str, ...] = ("y",), saved: tuple[str, ...] = ()) -> list[str]:
    arguments = {"x": NARROW, "w": WIDE, "n": NUMBER}
    types = {name: (type_, Spec.replicated(len(type_.shape))) for name, type_ in arguments.items()}
    cast = Compute(CAST.op, CAST.kwargs, outs=CAST.outs, types=CAST.types, specs=(WHOLE,))
    function = Function("f", ("x", "w", "n"), (cast, *lines), returns, types)
    made = without_widening(function, saved)
    return [f"{line.op} {','.join(line.reads())}" for line in made.lines if isinstance(line, Compute)]


def test_a_cast_is_left_to_kernels_whose_other_operand_is_wide() -> None:
    twice = pointwise("z", self="c", other="w"), pointwise("y", "aten.sub.Tensor", self="w", other="c")
    assert ops_of(*twice) == ["aten.mul.Tensor x,w", "aten.sub.Tensor w,x"]


def test_a_cast_stays_that_something_else_reads() -> None:
    stays = "aten._to_copy.default x"
    assert ops_of(pointwise("z", self="c", other="w"), pointwise("y", "aten.exp.default", self="c"))[0] == stays
    assert ops_of(pointwise("y", self="c", other="w"), returns=("y", "c"))[0] == stays
    assert ops_of(pointwise("y", self="c", other="w"), saved=("c",))[0] == stays


def test_a_cast_stays_where_no_other_operand_makes_the_result_wide() -> None:
    """A tensor without dims, and a number, do not decide the dtype of a result; nor does the value itself."""
    stays = "aten._to_copy.default x"
    assert ops_of(pointwise("y", self="c", other="n"))[0] == stays
    assert ops_of(pointwise("y", self="c", other=2.0))[0] == stays
    assert ops_of(pointwise("y", self="c", other="c"))[0] == stays
