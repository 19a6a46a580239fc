"""Comments of emitted lines say what the line makes, in the order in which it makes it."""

from __future__ import annotations

import torch

from autopar.codegen.printer import Printer, show_types, statement
from autopar.ir.lines import Compute, Ref
from autopar.ir.spec import parse_spec
from autopar.ir.types import TensorType

FLOATS, PLACES = TensorType((8, 4), torch.float32), TensorType((8, 4), torch.int64)
CUT, WHOLE = parse_spec("[@dp, .]"), parse_spec("[., .]")


def largest(**changes: object) -> Compute:
    given = {"outs": ("values", "places"), "types": (FLOATS, PLACES), "specs": (CUT, WHOLE)}
    return Compute("aten.topk.default", {"self": Ref("x"), "k": 4}, **{**given, **changes})  # type: ignore[arg-type]


def test_results_and_their_types_stand_in_the_same_order() -> None:
    text = statement(largest(), Printer())
    assert text == "values, places = aten.topk(x, 4)  # f32[8@dp, 4], i64[8, 4]"


def test_a_result_that_is_not_used_has_no_type() -> None:
    text = statement(largest(outs=("_", "places"), types=(None, PLACES), specs=(None, WHOLE)), Printer())
    assert text == "_, places = aten.topk(x, 4)  # i64[8, 4]"
    assert show_types(largest(types=(FLOATS, None))) == "f32[8@dp, 4]"
