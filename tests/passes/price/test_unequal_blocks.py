"""Bytes of parameters and gradients where ranks hold unequal blocks: the price's are those of the rank that has most, as every
rank's own tensors have them when the runtime takes the same steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ir.lines import ParameterGather
from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec, parse_spec
from autopar.ir.steps import RuntimeStep, rows
from autopar.ir.types import TensorType
from autopar.passes.lower.convert import table_steps
from autopar.passes.played.gradients import summed_bytes, unreduced_bytes
from autopar.passes.price.lines import gather_messages, gradient_messages
from autopar.passes.price.pricer import Pricer
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.comm.reshard import run_step
from autopar.runtime.comm.threads import run_threads

from .stages import CLUSTER

MESH = Mesh((("dp", Shares((3, 2, 2))), ("tp", 2)))
PRICER = Pricer(CLUSTER, MESH)
SEVENS, UNEVEN_RUNS = TensorType((42, 4), torch.float32), TensorType((14, 3), torch.float32)
SPECS = ("[., .]", "[@dp, .]", "[@dp.tp, .]", "[@dp, @tp]", "[., @tp]", "[@tp, .]")
OWED = ("", " ~sum(dp)", " ~sum(tp)", " ~sum(dp,tp)")


def steps(type_: TensorType, before: Spec, after: Spec) -> tuple[RuntimeStep, ...] | None:
    """The steps of a table between specs that fit, or None."""
    if not all(spec.block.divides(type_.shape, MESH) for spec in (before, after)):
        return None
    return table_steps(PRICER, type_, before, after)


def held_before(type_: TensorType, before: Spec, table: tuple[RuntimeStep, ...]) -> tuple[list[float], list[float]]:
    """By rank the bytes before all steps, and of every message the most that a rank holds before it."""

    def run(comm: Comm) -> tuple[float, list[float]]:
        x: Tensor = torch.zeros(before.local_shape(type_.shape, MESH.seen_by(comm.rank)))
        nbytes, sent = float(x.nbytes), []
        for step, row in zip(table, rows(table), strict=True):
            for axis in step.axes:
                if step.facts.sends:
                    sent.append(float(x.nbytes))
                x = x if step.facts.table.of_block else run_step(comm, x, (row[0], (axis,), *row[2:]))
            x = run_step(comm, x, row) if step.facts.table.of_block else x
        return nbytes, sent

    results = run_threads(MESH.size, MESH.sizes, run)
    return [nbytes for nbytes, _ in results], [max(sent) for sent in zip(*(sent for _, sent in results), strict=True)]


@pytest.mark.parametrize("after", [*SPECS, "[., .] run(tp)", "[@dp, .] run(tp)", "[., @tp] run(dp)"])
@pytest.mark.parametrize("owed", OWED)
def test_a_gradient_has_the_bytes_of_the_rank_with_most_before_it_is_reduced(after: str, owed: str) -> None:
    type_ = UNEVEN_RUNS if "run(tp)" in after else SEVENS
    counted = 0
    for text in SPECS:
        if any(axis in text for axis in ("dp", "tp") if axis in owed):
            continue
        before = parse_spec(text + owed)
        table = steps(type_, before, parse_spec(after))
        if not table:
            continue
        p = StoredParameter("w", type_, Spec.replicated(2), parse_spec(after), True, (), 1, table)
        own, sent = held_before(type_, before, table)
        assert summed_bytes(p, MESH) == max(own)
        assert unreduced_bytes(p, MESH) == pytest.approx(max(own))
        messages = [m.nbytes for m in gradient_messages(p, MESH)]
        assert messages == pytest.approx(sent_bytes(table, sent))
        counted += 1
    assert counted or not owed


def sent_bytes(table: tuple[RuntimeStep, ...], most: list[float]) -> list[float]:
    """Bytes of the full arrays of messages; a gather from unequal blocks fills up to the longest. most: a rank's before each."""
    senders = [(step, MESH.sizes[axis]) for step in table for axis in step.axes if step.facts.sends]
    return [step.facts.full_bytes(held, size) for (step, size), held in zip(senders, most, strict=True)]


@pytest.mark.parametrize("storage", [*SPECS[1:], "[@dp, .] run(tp)", "[., @tp] run(dp)"])
def test_a_gather_has_the_bytes_of_the_rank_with_most(storage: str) -> None:
    type_, before = UNEVEN_RUNS if "run(tp)" in storage else SEVENS, parse_spec(storage)
    for text in SPECS:
        table = steps(type_, before, parse_spec(text))
        if not table:
            continue
        p = StoredParameter("w", type_, before, before, True, (), 1, ())
        _, sent = held_before(type_, before, table)
        messages = [m.nbytes for m in gather_messages(ParameterGather("w", table, None), p, MESH)]
        assert messages == pytest.approx(sent_bytes(table, sent))
