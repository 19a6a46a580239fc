"""Emitted programs under a runtime that lacks one thing: the simulation finds what each of these is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.runtime.comm import process
from autopar.runtime.comm.calls import Posted
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.gradients.buckets import Buckets
from autopar.runtime.memory.tiers import Tiers
from autopar.runtime.step.channels import Arrival, Channel
from autopar.runtime.step.pipeline import Executor
from autopar.runtime.step.ready import NextInputs
from autopar.runtime.step.stage import Stage
from tests.gpu.simulated import simulated
from tests.gpu.simulation.accesses import Memory
from tests.gpu.simulation.device import Event, Stream
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

PROGRAMS: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "dp"},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3", "microbatches": 2},
    "tp": {"strategy": "megatron"},
    "pp": {"pp": 2, "schedule": "1f1b", "microbatches": 4},
    "offloaded": {"strategy": "zero3", "offload": "all", "microbatches": 2},
}
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Lack:
    """A thing that a runtime lacks. program: of PROGRAMS; kind, file: of a finding that it leads to, and of one of its lines."""

    name: str
    program: str
    kind: str
    file: str
    patch: Patch

    def __str__(self) -> str:
        return f"{self.name}, {self.program}"


LACKS: list[Lack] = []


def lack(program: str, kind: str, file: str) -> Callable[[Patch], Patch]:
    """Add a patch to the table."""

    def add(patch: Patch) -> Patch:
        LACKS.append(Lack(patch.__name__.replace("_", " "), program, kind, file, patch))
        return patch

    return add


class Absent(Posted):
    """A message that is none."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


def nothing(*_: Any, **__: Any) -> None:
    return


@lack("offloaded", "race", "memory/tiers.py")
def fetched_values_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiers, "arrived", nothing)


@lack("offloaded", "race", "memory/tiers.py")
def a_mark_is_made_on_the_stream_of_copies_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiers, "mark", lambda self: self._out.record_event())


@lack("offloaded", "race", "memory/tiers.py")
def copies_out_do_not_wait_for_the_kernels_before(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_stream
    patch.setattr(
        Stream, "wait_stream", lambda self, other: None if other.timeline.name == "main" else wait(self, other)
    )


@lack("offloaded", "race", "memory/tiers.py")
def copies_back_do_not_wait_for_copies_out(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: wait(self, event) if self.timeline.name == "main" else None)


@lack("offloaded", "early free", "memory/tiers.py")
def the_allocator_is_not_told_of_copies_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "recorded", nothing)


@lack("offloaded", "race", "memory/tiers.py")
def events_are_recorded_and_mean_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "record", nothing)


@lack("dp", "race", "step/ready.py")
def inputs_are_read_before_they_arrive(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: None if self.timeline.name == "main" else wait(self, event))


@lack("pp", "race", "step/ready.py")
def a_microbatch_is_copied_to_the_room_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    made = NextInputs._room
    rooms: dict[tuple[int, ...], Any] = {}
    patch.setattr(NextInputs, "_room", lambda self, like: rooms.setdefault(tuple(like[0].shape), made(self, like)))


@lack("zero3", "race", "autopar_stage_0")
def gathers_are_read_before_they_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchComm, "_start_nccl", lambda self, call: (self._start_native(call), nothing)[1])


@lack("dp", "never waited for", "comm/collectives.py")
def sums_of_gradients_are_never_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchComm, "_start_nccl", lambda self, call: (self._start_native(call), nothing)[1])


@lack("tp", "race", "autopar_stage_0")
def sums_of_a_layer_are_read_before_they_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchComm, "_start_nccl", lambda self, call: (self._start_native(call), nothing)[1])


@lack("zero1", "never waited for", "comm/collectives.py")
def updated_parameters_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    start = Stage.start_regather

    def never_waits(self: Stage) -> Callable[[], None]:
        start(self)
        return lambda: None

    patch.setattr(Stage, "start_regather", never_waits)


@lack("pp", "race", "autopar_stage_1")
def received_activations_are_read_before_they_arrive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrival, "wait", lambda self: self.tensor)


@lack("pp", "never waited for", "comm/process.py")
def what_is_sent_is_let_go_and_never_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Executor, "_release", lambda self: self._sending.popleft())


@lack("pp", "unmatched", "comm/process.py")
def one_rank_never_receives(patch: pytest.MonkeyPatch) -> None:
    post = TorchComm._post

    def posts(self: TorchComm, messages: Any) -> Any:
        kept = [m for m in messages if self.rank == 0 or m.kind == "send"]
        made = iter(post(self, kept))
        return [next(made) if self.rank == 0 or m.kind == "send" else Absent() for m in messages]

    patch.setattr(TorchComm, "_post", posts)


@lack("pp", "shape", "comm/process.py")
def a_receiver_expects_another_size(patch: pytest.MonkeyPatch) -> None:
    incoming = Channel.incoming

    def shorter(self: Channel, microbatch: int = 0) -> Any:
        arrival, messages = incoming(self, microbatch)
        for message in messages:
            message.buffer = message.buffer.view(-1)[1:]
        return arrival, messages

    patch.setattr(Channel, "incoming", shorter)


@lack("pp", "deadlock", "test_broken_runtime.py")
def messages_that_meet_do_not_go_out_as_one(patch: pytest.MonkeyPatch) -> None:
    batch = process._START

    def one_by_one(self: TorchComm, messages: Any) -> Any:
        ordered = sorted(messages, key=lambda m: m.kind)  # receives first
        works = {id(m): batch[m.kind](m.buffer, m.peer, group=self._message_group) for m in ordered}
        return [process._Work(self, works[id(m)], m) for m in messages]

    patch.setattr(TorchComm, "_post", one_by_one)


@lack("dp", "signature", "comm/collectives.py")
def one_rank_sends_an_open_bucket_sooner(patch: pytest.MonkeyPatch) -> None:
    limit = Buckets._limit
    patch.setattr(Buckets, "_limit", lambda self: 1 if self.comm.rank == 1 else limit(self))


@lack("dp", "dtype", "test_broken_runtime.py")
def gradients_are_summed_as_int16(patch: pytest.MonkeyPatch) -> None:
    reduce = dist.all_reduce
    patch.setattr(dist, "all_reduce", lambda x, *a, **k: reduce(x.view(torch.int16) if x.numel() > 1 else x, *a, **k))


@lack("dp", "race", "gradients/buckets.py")
def a_bucket_is_packed_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    issue = Buckets._all_reduce

    def aside(self: Buckets, *args: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return issue(self, *args)

    patch.setattr(Buckets, "_all_reduce", aside)


@functools.cache
def program(name: str) -> autopar.Program:
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100").with_tiers()
    return compiled_zoo(BY_NAME["mlp"], cluster, options=autopar.Options(**PROGRAMS[name]))


@pytest.mark.few(3)
@pytest.mark.parametrize("lacking", LACKS, ids=str)
def test_what_the_runtime_lacks_is_found(lacking: Lack, monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(lacking.program)
    lacking.patch(monkeypatch)
    found = simulated(made, BY_NAME["mlp"].batch())
    places = [str(place) for one in found.of(lacking.kind) for place in one.places]
    assert any(lacking.file in place for place in places), str(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_runtime_as_it_is_lacks_nothing(name: str) -> None:
    found = simulated(program(name), BY_NAME["mlp"].batch())
    assert not found.findings, str(found)
