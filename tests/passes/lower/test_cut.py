"""Cutting a program: who sends what to whom, what comes back, who owns what is shared, and where no stage can start."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.ir.program import Program, ValueRef
from autopar.passes.check.lines import check_program
from autopar.passes.lower import lower
from autopar.passes.lower.cut import Range, cut, cut_points, shared_parameters
from autopar.passes.price.pricer import Pricers
from tests.capture.equal import SGD
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import on_ranks

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Skipping(nn.Module):
    """The first block's value is read by the second, third and last; a mask without gradient goes along everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        mask = (first.detach() > 0).to(x.dtype)
        for i, block in enumerate(self.blocks):
            if i:
                x = block(x + first) * mask if i in (1, 2, 7) else block(x)
        return x


def compiled(model: nn.Module, **others: Any) -> autopar.Program:
    given = {"loss_fn": F.mse_loss, "optimizer": SGD, **others}
    return autopar.compile(model, autopar.ClusterSpec.local(1), (torch.randn(4, 8), torch.randn(4, 8)), **given)


def even(program: Program, stages: int) -> list[Range]:
    """Ranges of about the same number of calls."""
    n = len(program.calls)
    ends = [n * s // stages for s in range(stages + 1)]
    return list(itertools.pairwise(ends))


def random_ranges(program: Program, stages: int, seed: int) -> list[Range]:
    points = sorted(cut_points(program))
    chosen = sorted(random.Random(seed).sample(points, min(stages - 1, len(points))))
    ends = [0, *chosen, len(program.calls)]
    return list(itertools.pairwise(ends))


def reads_of(program: Program, ranges: list[Range]) -> set[tuple[ValueRef, int]]:
    """(value, stage) where a call of the stage reads a value that an earlier stage makes, straight from the calls."""
    found = set()
    for s, (first, last) in enumerate(ranges):
        for call in program.calls[first:last]:
            found |= {(ref, s) for ref in call.inputs if ref.kind == "call" and ref.index < first}
    return found


def carries_gradient(program: Program, ref: ValueRef, span: Range) -> bool:
    """Whether the loss reaches the value through a call of the span, over paths along which gradients flow."""
    assert program.loss is not None
    useful: set[ValueRef] = {program.loss}
    hit = False
    for i in reversed(range(len(program.calls))):
        call, template = program.calls[i], program.template_of(program.calls[i])
        alive = any(ValueRef("call", i, o) in useful and t is not None for o, t in enumerate(template.tangents))
        for slot, read in enumerate(call.inputs):
            if alive and template.input_grads[slot] is not None and read.kind == "call":
                useful.add(read)
                hit |= read == ref and span[0] <= i < span[1]
    owner = program.template_of(program.calls[ref.index])
    return hit and owner.tangents[ref.output] is not None


def check_boundaries(program: Program, ranges: list[Range]) -> None:
    parts = cut(program, ranges)
    received = [c for part in parts if part.boundary for c in part.boundary.received]
    sent = [c for part in parts if part.boundary for c in part.boundary.sent]
    assert sorted(received, key=repr) == sorted(sent, key=repr)
    assert {(c.value, c.target) for c in sent} == reads_of(program, ranges)
    assert len({(c.value, c.target) for c in sent}) == len(sent), "a value is sent to a stage once"
    assert len({c.name for c in sent}) == len(sent)
    for c in sent:
        assert ranges[c.source][0] <= c.value.index < ranges[c.source][1]
        assert c.gradient == carries_gradient(program, c.value, ranges[c.target]), c


def test_a_value_is_sent_once_to_every_stage_that_reads_it() -> None:
    program = compiled(Skipping()).ir
    ranges = even(program, 4)
    sent = [c for part in cut(program, ranges) if part.boundary for c in part.boundary.sent]
    from_first = {c.target for c in sent if c.source == 0}
    assert 3 in from_first, "what the last stage reads comes straight from the first"
    check_boundaries(program, ranges)


def test_a_gradient_comes_back_exactly_where_the_value_carries_one() -> None:
    program = compiled(Skipping()).ir
    kinds = {c.gradient for part in cut(program, even(program, 4)) if part.boundary for c in part.boundary.sent}
    assert kinds == {True, False}, "the mask carries none"


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_crossings_are_what_the_calls_read(zoo: ZooModel, stages: int) -> None:
    program = on_ranks(zoo.name, 4, 4).ir
    for seed in range(4):
        check_boundaries(program, random_ranges(program, stages, seed))


@pytest.mark.few(2)
@every_model
def test_stages_hold_every_call_parameter_and_buffer_of_the_program(zoo: ZooModel) -> None:
    program = on_ranks(zoo.name, 4, 4).ir
    for seed in range(4):
        ranges = random_ranges(program, 3, seed)
        parts = cut(program, ranges)
        assert [c.template for part in parts for c in part.calls] == [c.template for c in program.calls]
        assert {n for part in parts for n in part.parameters} == program.parameters.keys()
        assert {n for part in parts for n in part.buffers} == program.buffers.keys()
        updates = [n for part in parts for n in part.buffer_updates]
        assert sorted(updates) == sorted(program.buffer_updates)
        assert [part.loss is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert {n for part in parts for n in part.trained} == set(program.trained)
        assert frozenset().union(*({part.first_call + i for i in part.backward_calls} for part in parts)) == (
            program.backward_calls
        )


def test_one_range_is_the_program_itself() -> None:
    program = compiled(Skipping()).ir
    assert cut(program, [(0, len(program.calls))]) == (program,)


# --- what several stages hold -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and head share a weight; a table that is not trained is read by the first and the last block."""

    def __init__(self, frozen_first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("table", torch.rand(8))
        self.frozen_first = frozen_first

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first.weight.detach() if self.frozen_first else self.first.weight) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.table)


def test_a_shared_parameter_is_owned_by_the_first_stage_that_trains_it() -> None:
    for frozen, held in ((False, (0, 2)), (True, (2, 0))):
        program = compiled(Tied(frozen)).ir
        ranges = even(program, 3)
        shared = shared_parameters(program, ranges)
        assert shared["first.weight"] == held
        parts = cut(program, ranges)
        owner, other = held
        assert "first.weight" not in parts[owner].boundary.foreign  # type: ignore[union-attr]
        assert "first.weight" in parts[other].boundary.foreign  # type: ignore[union-attr]


def test_a_buffer_that_two_stages_read_is_held_by_both() -> None:
    program = compiled(Tied()).ir
    parts = cut(program, even(program, 3))
    assert shared_parameters(program, even(program, 3))["table"] == (0, 2)
    assert ["table" in part.buffers for part in parts] == [True, False, True]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.spare = nn.Linear(8, 8)
        self.register_buffer("idle", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_no_call_uses_rests_in_the_first_stage() -> None:
    program = compiled(Unused()).ir
    parts = cut(program, even(program, 2))
    assert ["spare.weight" in part.parameters for part in parts] == [True, False]
    assert ["idle" in part.buffers for part in parts] == [True, False]


# --- cuts that cannot be -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer is read by the first block and updated by the last: no cut may part them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x) + self.seen
        for block in list(self.blocks)[2:5]:
            x = block(x)
        self.seen.add_(x.detach().mean(0))
        return self.blocks[5](x)


def test_no_cut_parts_a_buffer_from_its_update() -> None:
    program = compiled(Counting()).ir
    readers = [i for i, _ in program.readers[ValueRef("buffer", name="seen")]]
    update = program.buffer_updates["seen"].index
    first, last = min(*readers, update), max(*readers, update)
    assert first < last, "the model keeps reader and update in different calls"
    assert cut_points(program) == frozenset(range(1, len(program.calls))) - frozenset(range(first + 1, last + 1))
    with pytest.raises(PlanError, match=rf"no stage can start at call {last} .*part a buffer \(seen"):
        cut(program, [(0, last), (last, len(program.calls))])
    allowed = min(cut_points(program))
    assert len(cut(program, [(0, allowed), (allowed, len(program.calls))])) == 2


def test_batch_norm_can_be_cut_everywhere() -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())))
    program = compiled(model).ir
    assert program.buffer_updates
    for point in cut_points(program):
        parts = cut(program, [(0, point), (point, len(program.calls))])
        for part in parts:
            assert part.buffer_updates.keys() <= part.buffers.keys()


def test_an_early_call_stays_with_its_readers() -> None:
    program = on_ranks("gpt2", 4, 4).ir
    (early,) = [i for i, call in enumerate(program.calls) if call.prologue]
    assert early + 1 not in cut_points(program)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "change",
    [
        lambda n: [(0, 2), (3, n)],
        lambda n: [(0, 3), (2, n)],
        lambda n: [(0, 2), (2, n - 1)],
        lambda n: [(1, 2), (2, n)],
        lambda n: [(0, 3), (3, 2), (2, n)],
        lambda n: [(2, n), (0, 2)],
        lambda n: [(0, n + 1)],
        lambda n: [],
    ],
    ids=["gap", "overlap", "end", "start", "back", "order", "beyond", "none"],
)
def test_ranges_that_do_not_cover_the_calls_in_order(change: Callable[[int], list[Range]]) -> None:
    program = compiled(Skipping()).ir
    n = len(program.calls)
    with pytest.raises(PlanError, match=f"must follow each other and cover the {n} calls"):
        cut(program, change(n))


def test_a_stage_without_calls_reads_and_sends_nothing() -> None:
    program = compiled(Skipping()).ir
    n = len(program.calls)
    _, empty, _ = parts = cut(program, [(0, 2), (2, 2), (2, n)])
    assert not any((empty.calls, empty.parameters, empty.inputs, empty.outputs))
    assert {(c.source, c.target) for part in parts if part.boundary for c in part.boundary.sent} == {(0, 2)}


# --- lowering what was cut ---------------------------------------------------------------------------------------------


def lowers(zoo: ZooModel, training: bool, seeds: range, m: int = 3) -> None:
    program = on_ranks(zoo.name, 4, m, training=training)
    for seed in seeds:
        plan = autopar.random_plan(program, seed)
        lowered = lower(program.ir, plan, Pricers(program.cluster), program.rules)
        check_program(lowered, program.rules)
        assert len(lowered.stages) == len(plan.stages)
        ends = {(t.name, t.kind) for t in lowered.transfers}
        assert len(ends) == len(lowered.transfers)
        gradients = {t.name.removeprefix("d_") for t in lowered.transfers if t.kind == "gradient"}
        assert gradients <= {t.name for t in lowered.transfers if t.kind == "value"}


@pytest.mark.few(2)
@every_model
@pytest.mark.parametrize("training", [True, False])
def test_lowering_any_cut_passes_the_checker(zoo: ZooModel, training: bool) -> None:
    lowers(zoo, training, range(6))


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("training", [True, False])
def test_lowering_many_cuts_passes_the_checker(zoo: ZooModel, training: bool) -> None:
    lowers(zoo, training, range(6, 60))


def test_a_value_that_a_block_gives_out_twice_is_sent_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.lin(a + 2 * b))
            return h, h.clone()

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Twice() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            a = b = x
            for layer in self.layers:
                a, b = layer(a, b)
            return a * b

    model, batch = Chain(), (torch.randn(8, 8), torch.randn(8, 8))
    options = autopar.Options(pp=2, microbatches=2)
    program = autopar.compile(
        model, autopar.ClusterSpec.local(2), batch, loss_fn=F.mse_loss, optimizer=SGD, options=options
    )
    assert autopar.verify(program, model, batch).ok
