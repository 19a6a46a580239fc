"""The simulated GPU's own test: what is planted is found, with its kind and its lines, and what is right is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.planted_faults import kernels, messages, streams  # noqa: F401 (they fill the table)
from tests.gpu.planted_faults.table import PLANTED, Planted, on_gpu, on_host
from tests.gpu.simulated import on_ranks
from tests.gpu.simulation.budgets import COPY, LAUNCH, SYNC
from tests.gpu.simulation.findings import KINDS

every_fault = pytest.mark.parametrize("planted", PLANTED, ids=str)


@every_fault
def test_a_planted_fault_is_found_with_its_lines(planted: Planted) -> None:
    found = on_ranks(planted.ranks, lambda rank, _: planted.body(rank, True))
    assert {one.kind for one in found.findings} == {planted.kind}, str(found)
    lines = {int(place.line.rpartition(":")[2]) for one in found.findings for place in one.places}
    assert lines == planted.lines, str(found)


@every_fault
def test_the_same_program_without_its_fault_is_right(planted: Planted) -> None:
    found = on_ranks(planted.ranks, lambda rank, _: planted.body(rank, False))
    assert not found.findings, str(found)


def test_there_are_enough_faults() -> None:
    assert len(PLANTED) >= 30
    assert {planted.kind for planted in PLANTED} == set(KINDS)


WAITS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "an item": (lambda x: x.sum().item(), 1),
    "a comparison": (lambda x: bool(x.sum() > 0), 1),
    "a number": (lambda x: float(x[0]), 1),
    "a list": (lambda x: x.tolist(), 1),
    "a copy to the host": (lambda x: x.cpu(), 1),
    "a copy from the host": (lambda x: torch.zeros(8).to("cuda"), 1),
    "a list of numbers": (lambda x: torch.tensor([1.0, 2.0], device="cuda"), 1),
    "a copy that does not block": (lambda x: x.to("cpu", non_blocking=True), 0),
    "a copy from pinned memory": (lambda x: on_host(8).to("cuda", non_blocking=True), 0),
    "a blocking copy from pinned memory": (lambda x: on_host(8).to("cuda"), 1),
    "a copy to memory that is not pinned": (lambda x: torch.empty(8).copy_(x, non_blocking=True), 1),
    "a mask": (lambda x: x.index_put_((x > 0,), x.new_zeros(())), 1),
    "a mask that keeps the size": (lambda x: torch.where(x > 0, x, 0.0), 0),
    "a product": (lambda x: x @ x, 0),
    "all streams": (lambda x: torch.cuda.synchronize(), 1),
    "a stream": (lambda x: torch.cuda.current_stream().synchronize(), 1),
    "an event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 1),
}


@pytest.mark.parametrize("what", WAITS)
def test_waits_of_the_host_are_counted(what: str) -> None:
    body, waits = WAITS[what]
    (budget,) = on_ranks(1, lambda rank, _: body(on_gpu(8))).budgets
    assert len(budget.of(SYNC, 0)) == waits, budget.asked


def test_kernels_and_copies_are_counted_with_their_bytes() -> None:
    (budget,) = on_ranks(1, lambda rank, _: (on_gpu(8) + 1).view(2, 4).t().to("cpu", non_blocking=True)).budgets
    assert [one.op for one in budget.of(LAUNCH, 0)] == ["zeros", "add"]
    assert [one.op for one in budget.of(COPY, 0)] == ["_to_copy"]
    assert budget.bytes_of(LAUNCH, 0) == 3 * 32
    assert budget.bytes_of(COPY, 0) == 2 * 32
