"""Copies to and from memory tiers that are made as late as they may be: when somebody waits for them.

On a GPU these copies run on streams of their own. What stands for these here are lists of copies and waits, which are gone
through when the host or the device's kernels wait for something in them, so whoever reads too early reads what was there before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.comm.backends import HOST, Host
from autopar.runtime.memory import staging, tiers
from autopar.runtime.memory.tiers import Tiers
from autopar.runtime.update.update_rule import LossScaling
from tests.proof.test_offload import GPT, PLANS, same
from tests.zoo.programs import compiled_zoo

UPDATES = {
    "clipped norm": {"clip_grad_norm": 0.05},
    "clipped values": {"clip_grad_value": 1e-4},
    "scaled loss": {"loss_scaling": LossScaling(2.0**10)},
    "scaled and clipped": {"loss_scaling": LossScaling(2.0**10), "clip_grad_norm": 0.05},
}


@functools.cache
def compiled(plan: str, offload: str, update: str) -> autopar.Program:
    options = dict(vars(PLANS[plan])) | {"microbatches": 4, "offload": offload}
    cluster = autopar.ClusterSpec.local(2).with_tiers()
    return compiled_zoo(GPT, cluster, options=autopar.Options(**options), **UPDATES[update])


class Stream:
    """Work that is done in order, and only when somebody waits for it."""

    def __init__(self, *_: Any) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, end: int) -> int:
        """Do the work up to a place; how much of it there was to do."""
        before = self.done
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()
        return max(end - before, 0)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.reach(""))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(other))

    def synchronize(self) -> None:
        Event(self).synchronize()


class Event:
    """A place in a stream's work."""

    arrived: ClassVar[dict[str, int]] = {}
    """How much of the work was done by what it was waited for with."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.work)

    def reach(self, why: str) -> None:
        self.arrived[why] = self.arrived.get(why, 0) + self.stream.run(self.place)

    def synchronize(self) -> None:
        self.reach("settle")

    def query(self) -> bool:
        return self.stream.done >= self.place


class Kernels(Stream):
    """The stream of kernels, which are done at once."""

    def wait_event(self, event: Event) -> None:
        event.reach("read")


class Device(Host):
    """Processors, whose copies to and from tiers are late."""

    is_host: ClassVar[bool] = False
    module = SimpleNamespace(Stream=Stream, current_stream=lambda _: Kernels(), stream=lambda _: nullcontext())


LATE = Device("cpu", HOST.transport, "cpu")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Every copy is late; until it is there, its target holds nothing that anybody may use. The work that is done so far."""

    at_once = Tiers._copy

    def copy(tiers: Tiers, target: Tensor, value: Tensor, stream: Any) -> None:
        if not isinstance(stream, Stream):  # while the plan is priced
            at_once(tiers, target, value, stream)
            return
        assert all(one.is_pinned() for one in (target, value)), "the host waits for a copy to or from pages of a file"
        target.fill_(float("nan") if target.is_floating_point() else -1)
        stream.work.append(lambda: target.copy_(value))

    def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, pin_memory=False, **how: make(*given, **how)

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1")
    monkeypatch.setattr(Event, "arrived", {})
    monkeypatch.setattr(tiers, "backend_of", lambda device: LATE if device.type == "cpu" else HOST)
    monkeypatch.setattr(Tiers, "_copy", copy)
    monkeypatch.setattr(torch, "empty", unpinned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", unpinned(torch.empty_like))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().filename is None)
    return Event.arrived


@pytest.mark.few(1)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("offload", ["parameters", "all", "optimizer"])
@pytest.mark.parametrize("plan", ["dp", "zero3", "1f1b"])
def test_late_copies_change_no_bit(plan: str, offload: str, update: str, late: dict[str, int]) -> None:
    """The host reads what lies in tiers for the norm, for scaled gradients, and for the state at the end."""
    plain, moved = compiled(plan, "none", update), compiled(plan, offload, update)
    assert same(plain.run(GPT.batch(1), steps=3), moved.run(GPT.batch(1), steps=3))
    assert late["settle"]
    assert late["read"]


@pytest.mark.slow
def test_a_read_that_does_not_wait_for_its_own_write_is_found(
    late: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved = compiled("zero3", "none", "clipped norm"), compiled("zero3", "parameters", "clipped norm")
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    assert not same(plain.run(GPT.batch(1), steps=2), moved.run(GPT.batch(1), steps=2))


def under_way(tiers: Tiers) -> int:
    """Copies to tiers that are not made yet."""
    return len(tiers._out.work) - tiers._out.done


@pytest.mark.parametrize("views", ["whole rooms", "a part of a room"])
def test_a_read_waits_for_what_was_written_to_its_own_room_and_for_nothing_behind_it(
    views: str, late: dict[str, int]
) -> None:
    tiers = Tiers()
    one, other = (tiers.empty_like(torch.empty(6), "ddr") for _ in range(2))
    tiers.write(one[2:] if views == "a part of a room" else one, torch.ones(4 if views == "a part of a room" else 6))
    behind = under_way(tiers)
    tiers.write(other, torch.zeros(6))
    back = tiers.read(one)
    assert under_way(tiers) == 2 * behind
    tiers.arrived(tiers.mark())
    assert under_way(tiers) == behind
    assert torch.equal(back[2:], torch.ones(4))
    tiers.arrived(tiers.mark())
    assert torch.equal(tiers.read(other).isnan(), torch.ones(6).bool())  # it has not arrived
    tiers.settle()
    assert not under_way(tiers)


def test_what_goes_to_files_goes_through_pinned_memory_and_the_host_does_not_wait(
    late: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGED_BYTES", 3 * 4096)
    tiers = Tiers(directory=tmp_path)
    values = [torch.full((1024,), float(i)) for i in range(6)]
    rooms = [tiers.empty_like(value, "nvme") for value in values]
    for room, value in zip(rooms[:3], values, strict=False):
        tiers.write(room, value)
    assert "settle" not in late
    back = tiers.read(rooms[1])
    tiers.arrived(tiers.mark())
    assert torch.equal(back, values[1])
    for room, value in zip(rooms[2:], values[2:], strict=True):
        tiers.write(room, value)
    assert under_way(tiers)
    tiers.settle()
    assert all(map(torch.equal, rooms, values))


@pytest.mark.parametrize(
    ("variable", "value", "warns"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:1", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("OTHER", "", True),
    ],
)
def test_offloading_to_pinned_memory_that_is_rounded_up_is_said_once(
    variable: str, value: str, warns: bool, late: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    tiers._warn_where_rounded.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            Tiers().empty((4,), torch.float32, "ddr")
    assert ["set PYTORCH_ALLOC_CONF=" in str(one.message) for one in said] == [True] * warns
