"""Functions that are captured and differentiated compute what eager autograd does, whole and on shards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ir.rule import Rule
from autopar.ops import contraction
from autopar.ops.labels import Maker
from autopar.passes.rules.book import RuleBook
from tests.ops.all_generators import GENERATORS, Draw
from tests.ops.edges import EDGES, f
from tests.ops.execution import Case, as_node, check_strategy
from tests.ops.traced import MESHES, check_gradients, check_shards, of_tensors, traceable

RULES = RuleBook()


@pytest.mark.parametrize("name", EDGES)
def test_at_its_edges_a_function_has_eagers_values_and_gradients(name: str) -> None:
    function, tensors = EDGES[name]
    template, values = check_gradients(function, tensors)
    check_shards(template, values, RULES, MESHES[:1])


def sweep(op: str, examples: int, meshes: Sequence[Mesh]) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = GENERATORS[op](Draw(data))
        if traceable(case):
            check_shards(*check_gradients(*of_tensors(case)), RULES, meshes)

    check()


NO_GRADIENT_IN_TORCH = {"aten.copy", "aten.floor_divide", "aten.soft_margin_loss", "aten.multi_margin_loss"}
"""Ops that torch does not differentiate by every operand of floating point; `EDGES` has the losses among them."""
TORCH_OPS = sorted(
    op for op in GENERATORS.keys() - NO_GRADIENT_IN_TORCH if not op.startswith("autopar.") and "backward" not in op
)


@pytest.mark.parametrize("op", TORCH_OPS)
def test_every_op_has_eagers_gradient_and_so_have_its_shards(op: str) -> None:
    sweep(op, 1, MESHES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("op", TORCH_OPS)
def test_every_op_has_eagers_gradient_and_so_have_its_shards_at_length(op: str) -> None:
    sweep(op, 100, MESHES)


def test_a_rule_that_trusts_equal_sizes_is_refuted() -> None:
    """`pad` that cuts one element and adds another keeps the size of a dim whose elements it moves."""
    case = Case(torch.ops.aten.constant_pad_nd.default, (f(4, 4).detach(), [-1, 1]), {})
    make = Maker()
    labels = make.dims((4, 4))
    naive: Rule = make.rule([labels], [labels])
    mesh, generator = Mesh.of(a=2), torch.Generator().manual_seed(0)
    check_strategy(case, case.whole(), mesh, ("d0",), generator, naive)
    with pytest.raises(AssertionError):
        check_strategy(case, case.whole(), mesh, ("d1",), generator, naive)
    assert RULES.rule(op_call(as_node(case, case.whole())[0])).shardable == ("d0",)


def test_a_gradient_that_is_not_conjugated_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction, "conjugate", lambda x: x)
    for name in ("complex mm", "complex linear", "complex einsum"):
        with pytest.raises(AssertionError, match="gradient"):
            check_gradients(*EDGES[name])
