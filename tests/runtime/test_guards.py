"""The checks of a step's data: what is let through, and what the error says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.runtime import GuardError, RuntimeProgramError, Session, run_threads
from autopar.runtime.guards import Guards, InputLike, InputRange, violation
from tests.runtime import stages

IDS = InputLike("ids", (2, 3), (torch.int64,))
VOCABULARY = InputRange(0, 0, 10, (-100,), "model.py:12: self.tokens(ids)")


def ids(last: int = 6) -> torch.Tensor:
    return torch.tensor([1, 2, 3, 4, 5, last]).reshape(2, 3)


@pytest.mark.parametrize("last", [0, 9, -100])
def test_integers_in_range_and_those_that_are_ignored_pass(last: int) -> None:
    Guards().check_batch([ids(last)], [IDS], [VOCABULARY])


@pytest.mark.parametrize("last", [-1, 10, -99, 1 << 40])
def test_an_integer_out_of_range_is_named_with_place_input_and_source_line(last: int) -> None:
    with pytest.raises(GuardError) as raised:
        Guards().check_batch([ids(last)], [IDS], [VOCABULARY])
    for part in (f"input ids: the value {last} at [1, 2]", "0 to 9", "-100", "model.py:12: self.tokens(ids)"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (torch.zeros(1, 3, dtype=torch.int64), r"input ids: shape \(1, 3\)"),
        (torch.zeros(4, 3, dtype=torch.int64), r"input ids: shape \(4, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int32), "input ids: dtype torch.int32"),
        (torch.zeros(2, 3), "input ids: dtype torch.float32"),
    ],
)
def test_a_batch_of_another_shape_or_dtype_is_refused(leaf: torch.Tensor, said: str) -> None:
    with pytest.raises(GuardError, match=said):
        Guards().check_batch([leaf], [IDS], [])
    with pytest.raises(RuntimeProgramError, match="a batch of 2 tensors"):
        Guards().check_batch([leaf, leaf], [IDS], [])


def test_a_computed_index_is_given_back_or_named() -> None:
    x = ids()
    assert Guards().in_range(x, 0, 10) is x
    with pytest.raises(GuardError, match=r"the value 6 at \[1, 2\] is out of range; model.py:3 takes 0 to 4"):
        Guards().in_range(x.where(x > 5, 0), 0, 5, "model.py:3")


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4)])
def test_the_first_violation_is_told_by_place_and_value(shape: tuple[int, ...]) -> None:
    x = torch.arange(24)[: torch.Size(shape).numel()].reshape(shape)
    for least in (0, 5, 30):
        bad = x >= least
        found, place, value = violation(bad, x).tolist()
        assert bool(found) == bool(bad.any())
        if found:
            assert (place, value) == (least, least)


def test_conditions_are_given_back_or_named() -> None:
    assert Guards().expect(torch.tensor(True), True, "model.py:3")
    with pytest.raises(GuardError, match=r"model.py:3: this depends on the data and was False for the example"):
        Guards().expect(torch.tensor(True), False, "model.py:3")


def test_empty_tensors_and_tensors_without_data_pass() -> None:
    Guards().in_range(torch.zeros(0, dtype=torch.int64), 0, 1)
    Guards().in_range(torch.zeros(2, dtype=torch.int64, device="meta"), 0, 1)


def test_a_step_on_a_bad_batch_sends_nothing_and_leaves_the_session_usable() -> None:
    program = stages.mlp(2, 1, 0, microbatches=2)
    (batch,) = stages.batches(1)

    def body(comm):
        session = Session(program.pipeline, program.modules, comm, stages.adamw)
        session.load_weights(stages.weights())
        part = [leaf[: leaf.shape[0] // 2] for leaf in batch]
        said = []
        for rows in [part, part] if comm.rank else [part, [leaf.half() for leaf in batch]]:
            with pytest.raises(GuardError) as raised:  # each rank by itself: none waits for the other
                session.train_step(rows)
            said.append(str(raised.value))
        return said, session.train_step(batch).item()

    for said, loss in run_threads(program.ranks, program.mesh, body):
        assert "the program was compiled for the global shape" in said[0]
        assert loss == pytest.approx(stages.reference(1)["losses"][0])


class OnGpu(torch.Tensor):
    """A report that a GPU has written down, for a host without one."""

    device = torch.device("cuda")


class Event:
    """An event of a device that has passed it when somebody has waited."""

    def __init__(self) -> None:
        self.recorded = self.passed = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.passed = True


def test_what_a_gpu_wrote_down_is_raised_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **given: empty(*size, **given))

    def say(value: int, place: tuple[int, ...]) -> str:
        assert [event.passed for event in events] == [
            True,
            True,
            False,
        ]  # what was found is read, what was not is not awaited
        return f"{value} at {list(place)}"

    def seen(*values: int) -> tuple[OnGpu, tuple[int, ...], Any]:
        x = torch.tensor(values).reshape(-1, 2)
        return violation(x > 5, x).as_subclass(OnGpu), tuple(x.shape), say

    guards = Guards()
    guards.look([seen(1, 2, 3, 4), seen(1, 2, 3, 7, 8, 0)])
    guards.look([seen(9, 1)])
    assert len(events) == 3
    assert not any(event.passed for event in events)
    with pytest.raises(GuardError, match=r"7 at \[1, 1\]"):
        guards.end_step()
    guards.end_step()  # of a step without any
    guards.look([seen(1, 2)])
    guards.end_step()
    assert all(event.passed for event in events[3:])


def test_what_a_gpu_wrote_down_may_be_raised_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, events = torch.empty, list[Event]()
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **given: empty(*size, **given))

    def step(value: int) -> None:
        x = torch.tensor([[1, value]])
        guards.look(
            [(violation(x > 5, x).as_subclass(OnGpu), (1, 2), lambda value, place: f"{value} at {list(place)}")]
        )
        guards.end_step()

    guards = Guards()
    guards.late = 1
    for value in (2, 7):
        step(value)
    assert [event.passed for event in events] == [True, False]
    with pytest.raises(GuardError, match=r"7 at \[0, 1\]"):
        step(9)
    with pytest.raises(GuardError, match=r"9 at \[0, 1\]"):
        guards.settle()
    step(8)
    guards.forget()
    guards.settle()
    assert [event.passed for event in events] == [True, True, True, False]


def test_what_is_not_to_be_looked_at_yet_is_raised_by_whoever_looks() -> None:
    guards = Guards()
    with guards.unread() as reports:
        guards.in_range(ids(), 0, 5, "model.py:3")
        guards.in_range(ids(3), 0, 10, "model.py:4")
        guards.expect(torch.tensor(True), False, "model.py:5")
    assert len(reports) == 3
    for report, said in zip(reports, (r"value 5 at \[1, 1\]", None, r"model\.py:5"), strict=True):
        if said is None:
            guards.look([report])
        else:
            with pytest.raises(GuardError, match=said):
                guards.look([report])
    with pytest.raises(GuardError, match=r"model\.py:6"):
        guards.in_range(ids(), 0, 5, "model.py:6")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_index_that_is_named_later_may_be_used_until_then(dtype: torch.dtype) -> None:
    """A kernel that reads outside its table would end a GPU's context before anybody reads what was written down."""
    guards, bad = Guards(), torch.tensor([[-1, 2, 10], [9, -100, 1 << 20]], dtype=dtype)
    with guards.unread() as reports:
        (batch,) = guards.check_batch([bad], [InputLike("ids", (2, 3), (dtype,))], [VOCABULARY])
        computed = guards.in_range(bad, 2, 10)
    assert (batch.dtype, computed.dtype) == (dtype, dtype)
    assert batch.tolist() == [[0, 2, 0], [9, -100, 0]]
    assert computed.tolist() == [[2, 2, 2], [9, 2, 2]]
    assert [int(report[0]) for report, *_ in reports] == [1, 1]
