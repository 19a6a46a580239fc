"""Batches that are read ahead: the same bits, none too many, and what goes wrong is said where it belongs."""

from __future__ import annotations

import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from autopar.runtime.comm.backends import HOST, OF_TYPE, Host
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.errors import GuardError
from autopar.runtime.program.arguments import parser
from autopar.runtime.program.batches import BatchInput
from autopar.runtime.run.loaded import LoadedProgram
from autopar.runtime.run.train_loop import Done, Listener, Loop
from tests.runtime import stages
from tests.runtime.scenarios import session_of

STEPS = 6


class Queues(Host):
    """Processors whose loops run as if kernels queued behind the host."""

    ahead: ClassVar[int] = 1


@dataclass
class Run(Listener):
    """A run, and what was heard of it. act: what is done about a loss."""

    act: Callable[[Loop, Done], bool] = lambda loop, done: False
    before: Callable[[Loop], None] = lambda loop: None
    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin(self, loop: Loop) -> None:
        self.before(loop)

    def on_loss(self, loop: Loop, done: Done) -> bool:
        assert done.loss is not None
        self.losses.append(done.loss)
        return self.act(loop, done)

    def over(self, batches: Callable[[int], Iterator[Any]]) -> Run:
        """Train a program of one rank in two microbatches. batches: from a position on."""
        program = stages.mlp(1, 1, microbatches=2)
        inputs = [BatchInput(shape=(8, 8), dtype="float64")] * 2

        def body(comm: Comm) -> None:
            session = session_of(program, comm, stages.adamw)
            session.load_weights(stages.weights())
            own = LoadedProgram(types.SimpleNamespace(inputs=inputs, fixed={}, show=lambda: "a program"), session)  # type: ignore[arg-type]
            loop = Loop(own, parser().parse_args(["--steps", str(STEPS)]), 0, 0, reads=True)
            loop._batches_from = batches
            loop.go_to(0, 0)
            loop.run([self])
            self.state = session.state_dict()

        run_threads(1, program.mesh, body, timeout_s=60)
        return self


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OF_TYPE, "cpu", Queues("cpu", HOST.transport, preset="cpu"))


class Data:
    """A data function and what became of it. reused: it fills the same memory every time; harm: at a batch."""

    def __init__(self, reused: bool = False, harm: Callable[[int], Any] = lambda n: None) -> None:
        self.reused, self.harm = reused, harm
        self.read, self.open, self.threads = 0, 0, set[int]()

    def __call__(self, position: int) -> Iterator[Any]:
        known = stages.batches(20)
        room = tuple(torch.empty_like(x) for x in known[0])
        assert not self.open
        self.open += 1
        try:
            for n in range(position, len(known)):
                self.read += 1
                self.threads.add(threading.get_ident())
                given = self.harm(n) or known[n]
                if self.reused:
                    for own, x in zip(room, given, strict=True):
                        own.copy_(x)
                yield room if self.reused else given
        finally:
            self.open -= 1


@pytest.mark.parametrize("reused", [False, True])
def test_steps_are_those_of_batches_that_are_read_in_turn(reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a data function hands out the same memory every time."""
    in_turn, data = Run().over(Data()), Data(reused)
    monkeypatch.setitem(OF_TYPE, "cpu", Queues("cpu", HOST.transport, preset="cpu"))
    run = Run().over(data)
    assert run.losses == in_turn.losses
    assert len(run.losses) == STEPS
    assert all(torch.equal(run.state[name], value) for name, value in in_turn.state.items() if name != "optim_groups")
    assert data.read == STEPS
    assert threading.get_ident() not in data.threads


@pytest.mark.usefixtures("ahead")
def test_a_batch_is_read_while_the_step_before_its_own_runs() -> None:
    begun, read = threading.Event(), threading.Event()

    def harm(n: int) -> None:
        if n == 3:
            read.set()

    def before(loop: Loop) -> None:
        if loop.step == 2:
            take = loop.program.session.forms[0].executor.run

            def run(inputs: Any) -> Any:
                assert read.wait(20)
                begun.set()
                return take(inputs)

            loop.program.session.forms[0].executor.run = run  # type: ignore[method-assign]

    Run(before=before).over(Data(harm=harm))
    assert begun.is_set()


@pytest.mark.usefixtures("ahead")
def test_no_batch_is_read_for_a_step_that_is_none() -> None:
    """A run that is asked to end reads as far as its last step."""
    data = Data()

    def before(loop: Loop) -> None:
        if loop.step == 2:
            loop.last = 4

    assert len(Run(before=before).over(data).losses) == 4
    assert data.read == 4


@pytest.mark.usefixtures("ahead")
def test_what_a_data_function_raises_is_raised_in_its_step_with_its_lines() -> None:
    def harm(n: int) -> None:
        if n == 3:
            raise ValueError("no such file")

    run = Run()
    with pytest.raises(ValueError, match="no such file") as raised:
        run.over(Data(harm=harm))
    assert "harm" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert len(run.losses) == 2  # that of the third step was not read yet


@pytest.mark.usefixtures("ahead")
def test_a_batch_that_the_program_refuses_is_refused_in_its_step() -> None:
    def harm(n: int) -> Any:
        return [torch.ones(4, 8).double()] * 2 if n == 3 else None

    run, data = Run(), Data(harm=harm)
    with pytest.raises(GuardError, match=r"shape \(4, 8\)"):
        run.over(data)
    assert len(run.losses) == 2
    assert data.read == 4


@pytest.mark.usefixtures("ahead")
def test_a_run_that_goes_back_opens_its_data_again_when_they_were_closed() -> None:
    """The run goes on past the batches of steps that were begun; the one that was read ahead is read again."""
    data, positions = Data(), list[int]()

    def act(loop: Loop, done: Done) -> bool:
        if done.step == 3 and not positions:
            positions.append(loop.position)
            loop.go_to(3, loop.position)
            return True
        return False

    run = Run(act=act).over(data)
    assert positions == [4]
    assert data.read == 5 + STEPS - 3
    assert len(run.losses) == 3 + STEPS - 3
    assert data.open <= 1
