"""An op that is said to commute with an order does: on operands in order it makes its results in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.call import OpCall
from autopar.ir.program import op_call, set_argument
from autopar.ir.rule import Labels, Rule
from autopar.ops.order import reorder
from autopar.passes.batch.dims import Part, part_in
from autopar.passes.order.commutes import changes_in_order
from autopar.passes.order.dims import joined
from tests.ops.execution import Case, as_node, rule_of, same
from tests.ops.generators import GENERATORS, Draw
from tests.ops.test_rules_by_execution import NEVER_SHARDED

COMMUTE = ("pointwise", "aten.reshape", "aten.permute", "aten.mm", "autopar.linear", "autopar.attention")
every_op = pytest.mark.parametrize("op", sorted(GENERATORS))


def in_order(x: Tensor, labels: Labels | None, held: dict[str, Part], rule: Rule, order: int) -> Tensor:
    """A tensor with these labels, every factor that holds the sequence in order."""
    for d, dim in enumerate(labels or ()):
        for f, part in held.items():
            here = part_in(dim, f, part, rule)
            if here is not None:
                x = reorder(x, d, order, False, here.size, here.inner)
    return x


def holding(call: OpCall, rule: Rule, draw: Draw) -> tuple[dict[str, Part], int]:
    """A factor, and where in it a sequence may be; and an order that divides it."""
    spans = [
        (f, size, inner)
        for f, factor in rule.factors.items()
        for inner in range(1, factor.size + 1)
        for size in range(2, factor.size // inner + 1)
        if factor.size % (inner * size) == 0 and size % 2 == 0
    ]
    if not spans:
        return {}, 1
    factor, size, inner = draw.pick(*spans)
    order = draw.pick(*(n for n in range(1, size // 2 + 1) if size % (2 * n) == 0))
    own = next((group for group in joined(call) if factor in group), (factor,))
    return {f: Part(inner, size) for f in own}, order


def agrees(case: Case, draw: Draw) -> bool:
    """Whether a factor of the op commutes with an order. Raises AssertionError where that is not so."""
    whole = case.whole()
    node, tensors = as_node(case, whole)
    call = op_call(node)
    rule = rule_of(call)
    held, order = holding(call, rule, draw)
    changes = changes_in_order(call, rule, held, order) if held else None
    if changes is None:
        return False
    for name, value in changes.items():
        set_argument(node, name, value)
    read = iter(in_order(x, labels, held, rule, order) for x, labels in zip(tensors, rule.operands, strict=True))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: next(read))
    got: Any = node.target(*args, **kwargs)
    results = got if isinstance(got, (tuple, list)) else [got]
    for result, expected, labels in zip(results, whole, rule.results, strict=False):
        if expected is not None and not case.shapes_only:
            wanted = in_order(expected, labels, held, rule, order)
            assert same(result, wanted), f"{held} in order {order}: {result} is not {wanted}"
    return True


def sweep(op: str, examples: int) -> int:
    """How often an op commuted."""
    count = 0

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal count
        draw = Draw(data)
        count += agrees(GENERATORS[op](draw), draw)

    check()
    return count


@every_op
def test_what_is_said_to_commute_does(op: str) -> None:
    commutes = sweep(op, 5)
    assert not (commutes and op in NEVER_SHARDED)


@pytest.mark.slow
@every_op
def test_what_is_said_to_commute_does_at_length(op: str) -> None:
    sweep(op, 300)


@pytest.mark.parametrize("op", COMMUTE)
def test_ops_commute_that_should(op: str) -> None:
    assert sweep(op, 60)
