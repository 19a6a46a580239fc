"""Compiled programs stop on data that eager refuses, on every plan, and never stop on data that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import SGD

ROWS, CLASSES = 10, 4


class Words(nn.Module):
    """A table read at the ids, and at ids that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids)
        return self.last(h + self.rows(ids * 2 // 3 + 1))  # computed


def loss(scores: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())  # classes


def batch() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    return torch.randint(0, ROWS, (4, 6), generator=make), torch.randint(0, CLASSES, (4, 6), generator=make)


@pytest.fixture(scope="module")
def model() -> Words:
    torch.manual_seed(0)
    return Words()


@pytest.fixture(scope="module")
def program(model: Words) -> autopar.Program:
    options = autopar.Options(microbatches=2, pp=1)
    return autopar.compile(model, autopar.ClusterSpec.local(2), batch(), loss_fn=loss, optimizer=SGD, options=options)


def with_value(which: int, value: int) -> tuple[Tensor, ...]:
    changed = tuple(leaf.clone() for leaf in batch())
    changed[which][3, 5] = value
    return changed


def test_the_program_computes_the_same_with_its_guards(model: Words, program: autopar.Program) -> None:
    for plan in (program.plan, autopar.random_plan(program, 1, pp=2)):
        one = program.with_plan(plan)
        assert "rt.guards.in_range(" in "".join(one.sources)
        assert one.pipeline.count("low=") == 2
        assert autopar.verify(one, model, batch()).ok


@pytest.mark.parametrize(
    ("which", "value", "line"),
    [(0, ROWS, "self.rows(ids)"), (0, -1, "self.rows(ids)"), (1, CLASSES, "# classes"), (1, -1, "# classes")],
)
def test_an_input_out_of_range_stops_the_step_at_its_entry(
    program: autopar.Program, which: int, value: int, line: str
) -> None:
    with pytest.raises(autopar.GuardError) as raised:
        program.run([with_value(which, value)])
    assert f"input {which}: the value {value} at [3, 5]" in str(raised.value)
    assert line in str(raised.value)


def test_what_a_loss_ignores_is_let_through(model: Words, program: autopar.Program) -> None:
    assert autopar.verify(program, model, with_value(1, -100)).ok


def test_a_computed_index_out_of_range_stops_the_step_where_it_is_used() -> None:
    class Shifted(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.rows(ids + 1))  # shifted

    program = autopar.compile(Shifted(), autopar.ClusterSpec.local(2), (batch()[0] % 4,))
    with pytest.raises(autopar.GuardError, match=r"the value 10 at .* is out of range; .*# shifted.* takes 0 to 9"):
        program.run([with_value(0, 9)[:1]])


def test_a_part_of_the_batch_is_refused(program: autopar.Program) -> None:
    part = tuple(leaf[:2] for leaf in batch())
    with pytest.raises(autopar.InputError, match="shape"):
        program.run([part])
    with pytest.raises(autopar.GuardError, match="global shape"):
        program.on_ranks(lambda session: session.train_step(list(part)))


def test_guards_can_be_left_out(model: Words) -> None:
    options = autopar.Options(guards=False)
    program = autopar.compile(
        model, autopar.ClusterSpec.local(2), batch(), loss_fn=loss, optimizer=SGD, options=options
    )
    assert "rt.guards" not in "".join(program.sources)
    assert "source=" not in program.pipeline
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):  # of torch's kernel, on a CPU
        program.run([with_value(1, -1)])
