"""Every rule is tested by execution: random shapes, run on shards, recombine, equal to the whole."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops.registry import OPS
from tests.ops.all_generators import GENERATORS, Draw
from tests.ops.execution import MESHES, check_case

NEVER_SHARDED = {
    "autopar.expect",
    "aten.arange",
    "aten.linspace",
    "aten.eye",
    "aten.scalar_tensor",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.masked_scatter",
    "aten.masked_scatter_backward",
}
every_op = pytest.mark.parametrize("op", sorted(GENERATORS))


def sweep(op: str, examples: int) -> int:
    """Number of strategies tried."""
    tried = 0

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal tried
        draw = Draw(data)
        tried += check_case(GENERATORS[op](draw), draw.pick(*MESHES), data.draw(st.integers(0, 99)))

    check()
    return tried


@every_op
def test_shards_of_the_op_recombine_to_the_whole(op: str) -> None:
    assert bool(sweep(op, 4)) == (op not in NEVER_SHARDED)


@pytest.mark.slow
@every_op
def test_shards_of_the_op_recombine_to_the_whole_at_length(op: str) -> None:
    sweep(op, 400)


def test_every_op_in_the_table_is_exercised() -> None:
    ours = {op for op in OPS if OPS[op].rule is not None and op.split(".")[0] in ("aten", "autopar", "pointwise")}
    assert ours == set(GENERATORS)


def test_every_op_in_the_table_exists() -> None:
    for op in OPS:
        if op.startswith("aten."):
            assert attrgetter(op)(torch.ops), op
