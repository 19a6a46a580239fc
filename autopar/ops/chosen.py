"""Parts of a model that only some rows take: whose gradient there is in some steps only, and how many rows took which part.

In eager an expert that no row chose has no gradient, which is not a gradient of zeros: optimizers leave it alone. A captured
graph says so at the place where a tensor is used: `gradient_if` is the tensor itself, and its gradient exists if the integers
`choices` say so (`autopar.capture.templates.gradient_conditions` takes these nodes out again). At run time the counts decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.dialect import captured_op, differentiable, empty_like, graph_op
from autopar.ops.labels import Maker
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor


@captured_op("gradient_if(Tensor x, Tensor[] choices, int module, str slot) -> Tensor", empty_like)
def gradient_if(x: Tensor, choices: Sequence[Tensor], module: int, slot: str) -> Tensor:
    """x. module: number of the module that it is given to, or a parameter of; slot: which of its tensors it is."""
    return x.clone()


def _count(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.choices = len(inputs[1])


def _passed_on(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return g, [None] * ctx.choices, None, None


differentiable(gradient_if, _passed_on, _count)


@graph_op(
    "count_chosen(Tensor chosen, SymInt n, bool one_hot, ScalarType dtype) -> Tensor",
    local.count_chosen,
    lambda chosen, n, one_hot, dtype: chosen.new_empty([n], dtype=dtype),
    fresh=True,
)
def count_chosen(call: OpCall) -> Rule:
    """Blocks of rows leave partial sums; what is counted stays whole."""
    make, (shape,) = Maker(), call.shapes
    rows = shape[:-1] if call["one_hot"] else shape
    lead = make.dims(rows, "t")
    numbers = make.add("e", int(call["n"]), whole=True)
    return make.rule([(*lead, numbers) if call["one_hot"] else lead], [(numbers,)])
