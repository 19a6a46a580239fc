"""The machine and its tapes: by hand on a few storages, and against real tensors under a counter of bytes.

Functions are taped from hand-made lines and from random ones; a runner without a tape, which executes the lines on real
tensors and deletes each name after its last use, says what is alive, what the peak is and which storages are shared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.ir.lines import Compute, Convert, Function, Line, Ref, Start, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.steps import Step
from autopar.passes.memory.probe import Probe
from autopar.passes.memory.tape import NOTHING, LiveValue, Machine, Tape, dropped_after, play, tape
from autopar.passes.played.tensors import Effect, Layout, Out

F32 = torch.float32
ALONE = Mesh.of()
X = Layout.dense((4, 4), F32)
B = 64
"""Bytes of X."""


def held(machine: Machine, *sizes: int) -> list[int]:
    """New storages, each held once."""
    blocks = [machine.new(n) for n in sizes]
    for block in blocks:
        machine.hold(block)
    return blocks


# --- the machine


def test_a_storage_lives_until_its_last_holder_drops_it() -> None:
    machine = Machine()
    (block,) = held(machine, 10)
    machine.hold(block)
    machine.drop(block)
    assert (machine.alive, machine.refs[block]) == (10, 1)
    machine.drop(block)
    assert (machine.alive, machine.refs[block]) == (0, 0)


def test_what_has_no_storage_is_held_and_dropped_for_nothing() -> None:
    machine = Machine()
    machine.hold(-1)
    machine.drop(NOTHING.block)
    assert (machine.alive, machine.refs) == (0, [])


def test_the_peak_is_the_most_ever_beside_what_is_alive() -> None:
    machine = Machine()
    (first,) = held(machine, 10)
    machine.peak(7)
    machine.drop(first)
    machine.peak(9)
    assert (machine.top, machine.alive) == (17, 0)


def test_an_alias_holds_the_storage_of_its_operand() -> None:
    machine = Machine()
    (x,) = held(machine, B)
    (view,) = machine.bind(Effect((Out(0, -1, X),), (), 0), [x])
    assert (view, machine.refs[x], machine.alive) == (LiveValue(x, X), 2, B)
    machine.drop(x)
    assert machine.alive == B
    machine.drop(view.block)
    assert machine.alive == 0


def test_an_alias_of_what_rests_anyway_has_no_storage() -> None:
    machine = Machine()
    assert machine.bind(Effect((Out(0, -1, X),), (), 0), [-1]) == [LiveValue(-1, X)]


def test_results_that_share_a_fresh_storage_are_counted_once() -> None:
    machine = Machine()
    first, second = machine.bind(Effect((Out(-1, 0, X), Out(-1, 0, X)), (B,), 3 * B), [])
    assert (first.block, machine.refs[first.block]) == (second.block, 2)
    assert (machine.alive, machine.top) == (B, 3 * B)


def test_a_result_that_is_no_tensor_has_no_storage() -> None:
    assert Machine().bind(Effect((Out(-1, -1, None),), (), 0), []) == [NOTHING]


def test_what_is_parked_is_alive_in_its_tier_alone() -> None:
    machine = Machine()
    (on_device,) = held(machine, 10)
    blocks = [machine.park(n, tier) for n, tier in ((10, "ddr"), (3, "ddr"), (5, "nvme"))]
    for block in blocks:
        machine.hold(block)
    machine.drop(on_device)
    assert (machine.alive, machine.top, machine.parked) == (0, 0, {"ddr": 13, "nvme": 5})
    fetched = machine.new(10)
    machine.hold(fetched)
    machine.drop(blocks[0])
    assert (machine.alive, machine.parked) == (10, {"ddr": 3, "nvme": 5})


def test_a_view_of_what_is_parked_keeps_it_in_its_tier() -> None:
    machine = Machine()
    block = machine.park(10, "ddr")
    machine.hold(block)
    machine.hold(block)
    machine.drop(block)
    assert machine.parked == {"ddr": 10}


# --- hand-made functions


def line(out: str, op: str, **kwargs: object) -> Compute:
    return Compute(op, {k: Ref(v) if isinstance(v, str) else v for k, v in kwargs.items()}, outs=(out,))


def function(args: str, lines: Sequence[Line], returns: Sequence[str | None]) -> Function:
    return Function("f", tuple(args.split()), tuple(lines), tuple(returns))


RELU = line("y", "aten.relu.default", self="x")
CHAIN = [
    line("a", "aten.relu.default", self="x"),
    line("b", "aten.t.default", self="a"),
    line("c", "aten.mul.Tensor", self="b", other="b"),
    line("d", "aten.neg.default", self="c"),
]
"""x -> a, of which b is a view; c and d are new."""


def taped(of: Function, layouts: Sequence[Layout | None] = (X,)) -> Tape:
    return tape(of, of.returns, layouts, Probe(ALONE))


def test_names_are_dropped_after_the_line_that_reads_them_last() -> None:
    made = function("x", [*CHAIN, line("_", "aten.neg.default", self="d")], ())
    assert dropped_after(made, set()) == [("x",), ("a",), ("b",), ("c",), ("d",)]
    assert dropped_after(made, {"b", "d"}) == [("x",), ("a",), (), ("c",), ()]


def test_what_nobody_reads_is_dropped_where_it_is_made() -> None:
    assert dropped_after(function("x", [RELU], ()), set()) == [("x", "y")]


def test_a_tape_drops_what_was_used_last_and_keeps_what_is_returned() -> None:
    """a and c are alive together, then c and d; x belongs to the caller."""
    machine = Machine()
    (x,) = held(machine, B)
    (d,) = play(machine, taped(function("x", CHAIN, ["d"])), [x])
    assert (machine.alive, machine.top) == (2 * B, 3 * B)
    assert (machine.refs[x], machine.refs[d.block], d.layout) == (1, 1, Layout((4, 4), (1, 4), F32))


def test_a_view_that_is_returned_keeps_the_storage_of_a_dropped_name() -> None:
    machine = Machine()
    (x,) = held(machine, B)
    b, d = play(machine, taped(function("x", CHAIN, ["b", "d"])), [x])
    assert (machine.alive, machine.top) == (3 * B, 4 * B)
    machine.drop(b.block)
    machine.drop(d.block)
    assert machine.alive == B


def test_a_view_of_an_argument_is_returned_in_the_callers_storage() -> None:
    machine = Machine()
    (x,) = held(machine, B)
    (view,) = play(machine, taped(function("x", [line("y", "aten.t.default", self="x")], ["y"])), [x])
    assert (view.block, machine.refs[x], machine.alive) == (x, 2, B)


def test_a_value_that_is_returned_twice_is_held_twice() -> None:
    machine = Machine()
    first, second = play(machine, taped(function("x", [RELU], ["y", "y"])), [-1])
    assert first == second
    assert (machine.refs[first.block], machine.alive) == (2, B)


def test_no_gradient_is_no_value() -> None:
    assert play(Machine(), taped(function("x", [RELU], [None])), [-1]) == [NOTHING]


def test_a_taken_argument_goes_after_its_last_use() -> None:
    """a is made beside x, which the list has given away; c is made beside a alone."""
    machine = Machine()
    (x,) = held(machine, B)
    play(machine, taped(function("x", CHAIN, ["d"])), [x], taken=[x])
    assert (machine.refs[x], machine.alive, machine.top) == (0, B, 2 * B)


def test_an_argument_that_nothing_reads_is_held_until_the_function_ends() -> None:
    machine = Machine()
    x, unread = held(machine, B, 100)
    play(machine, taped(function("x unread", [RELU], ["y"]), [X, X]), [x, unread], taken=[x, unread])
    assert (machine.top, machine.alive) == (100 + 2 * B, B)


def test_a_tape_played_twice_does_the_same_twice() -> None:
    machine, played = Machine(), taped(function("x", CHAIN, ["d"]))
    (x,) = held(machine, B)
    tops = []
    for _ in range(2):
        machine.top, before = machine.alive, machine.alive
        (d,) = play(machine, played, [x])
        tops.append((machine.top - before, machine.alive - before))
        machine.drop(d.block)
        assert machine.alive == before
    assert tops == [(2 * B, B)] * 2


@pytest.mark.parametrize("nbytes", [B, 10 * B])
def test_a_tape_tells_apart_how_its_arguments_are_held(nbytes: int) -> None:
    """After a call whose argument stays, one that takes its argument lets it go, unless others hold that too."""
    played = taped(function("x", CHAIN, ["d"]))
    machine = Machine()
    (stays, goes) = held(machine, nbytes, nbytes)
    play(machine, played, [stays])
    assert (machine.alive, machine.refs[stays]) == (2 * nbytes + B, 1)
    play(machine, played, [goes], taken=[goes])
    assert (machine.alive, machine.refs[goes]) == (nbytes + 2 * B, 0)
    machine.hold(stays)
    play(machine, played, [stays], taken=[stays])
    assert (machine.alive, machine.refs[stays]) == (nbytes + 3 * B, 1)


def test_the_second_of_two_calls_stands_on_what_the_first_returned() -> None:
    machine, played = Machine(), taped(function("x", CHAIN, ["d"]))
    (x,) = held(machine, B)
    (first,) = play(machine, played, [x])
    play(machine, played, [first.block])
    assert (machine.alive, machine.top) == (3 * B, 4 * B)


@pytest.mark.parametrize(("kind", "received"), [("all_reduce", B), ("all_gather", 2 * B), ("reduce_scatter", B // 2)])
def test_what_is_sent_is_held_until_its_message_has_arrived(kind: str, received: int) -> None:
    """a is read last where its message sets out: d is made beside x, a, the message's result and c. Then a goes, and f is made
    beside x, s, d and e."""
    sent = Convert("a", Step(kind, "tp", *([0] if kind != "all_reduce" else [])), outs=("s",))
    lines = [
        line("a", "aten.relu.default", self="x"),
        Start(sent, outs=("h",)),
        line("c", "aten.neg.default", self="x"),
        line("d", "aten.neg.default", self="c"),
        Wait("h", sent, outs=("s",)),
    ]
    more = [line("e", "aten.neg.default", self="d"), line("f", "aten.neg.default", self="e")]
    tops = []
    for of in (function("x", lines, ["s", "d"]), function("x", [*lines, *more], ["s", "d", "f"])):
        machine = Machine()
        (x,) = held(machine, B)
        play(machine, tape(of, of.returns, [X], Probe(Mesh.of(tp=2))), [x])
        tops.append(machine.top)
    assert tops == [4 * B + received] * 2


# --- against real tensors


def run(of: Function, arguments: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Execute the lines, deleting names after their last use; the list of arguments is emptied first."""
    env = dict(zip(of.args, arguments, strict=True))
    arguments.clear()
    for i, one in enumerate(of.lines):
        assert isinstance(one, Compute)
        target = torch.ops.aten
        for part in one.op.split(".")[1:]:
            target = getattr(target, part)
        env[one.outs[0]] = target(**{k: _real(v, env) for k, v in one.kwargs.items()})
        later = {n for other in of.lines[i + 1 :] for n in other.reads()} | set(of.returns)
        for name in {*one.reads(), one.outs[0]} - later:
            del env[name]
    return [env[n] if n else None for n in of.returns]


def _real(value: object, env: dict[str, torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_real(v, env) for v in value]
    return env[value.name] if isinstance(value, Ref) else value


def some_function(seed: int) -> Function:
    """Up to 12 ops on 4×4 matrices: new ones, views, copies of turned ones, and ops that need scratch."""
    rng = random.Random(seed)
    names = ["x", "y"]
    lines = []
    for i in range(rng.randint(3, 12)):
        a, b = rng.choice(names), rng.choice(names[-3:])
        lines.append(
            rng.choice(
                [
                    line(f"v{i}", "aten.add.Tensor", self=a, other=b),
                    line(f"v{i}", "aten.mm.default", self=a, mat2=b),
                    line(f"v{i}", "aten.t.default", self=a),
                    line(f"v{i}", "aten.reshape.default", self=a, shape=[4, 4]),
                    line(f"v{i}", "aten.contiguous.default", self=a),
                    line(f"v{i}", "aten.matmul.default", self=a, other=b),
                    line(f"v{i}", "aten.softmax.int", self=a, dim=0),
                    line(f"v{i}", "aten.addmm.default", self=a, mat1=b, mat2=a),
                ]
            )
        )
        names.append(f"v{i}")
    returns: list[str | None] = [rng.choice(names) for _ in range(rng.randint(1, 3))]
    return function("x y", lines, returns)


@pytest.mark.parametrize("taken", [False, True], ids=["held", "taken"])
@pytest.mark.parametrize("seed", range(40))
def test_a_tape_holds_what_real_tensors_hold(seed: int, taken: bool) -> None:
    of = some_function(seed)
    counter = ByteCounter()
    with counter:
        mine = [torch.ones(4, 4), torch.ones(4, 4)]
        given = list(mine)
        if taken:
            mine.clear()
        counter.restart()
        results = run(of, given)
    machine = Machine()
    blocks = held(machine, B, B)
    machine.top = machine.alive
    values = play(machine, tape(of, of.returns, [X, X], Probe(ALONE)), blocks, blocks if taken else [])
    assert (machine.alive, machine.top) == (counter.alive, counter.peak)
    assert [value.layout for value in values] == [Layout.of(t) for t in results if t is not None]
    pointers = [t.untyped_storage()._cdata for t in results if t is not None]
    assert [[a.block == b.block for a in values] for b in values] == [[a == b for a in pointers] for b in pointers]
