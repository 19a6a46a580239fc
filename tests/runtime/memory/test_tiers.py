"""Memory tiers of a rank: what is parked comes back the same, counts in its tier alone, and leaves nothing behind."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.counter import ByteCounter
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.memory.tiers import Parked, Tiers, allocating
from autopar.runtime.update.optimizer_parts import LEAST_PARTS, PART_BYTES, Parts, divide


@pytest.mark.parametrize("tier", ["ddr", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_parked_comes_back_bit_for_bit(tier: str, dtype: torch.dtype) -> None:
    tiers = Tiers()
    values = [(torch.randn(5, 7) * 10).to(dtype), (torch.randn(3, 4, 5) > 0).to(dtype).permute(2, 0, 1)]
    saved: list[Any] = list(values)
    tiers.park(saved, (0, 1), tier)
    assert all(isinstance(entry, Parked) for entry in saved)
    tiers.fetch(saved)
    tiers.ready(saved)
    for value, back in zip(values, saved, strict=True):
        assert torch.equal(value, back)
        assert value.stride() == back.stride()
        assert value.data_ptr() != back.data_ptr()


def test_views_of_one_storage_travel_once_and_share_it_again() -> None:
    counter, tiers = ByteCounter(), Tiers()
    with counter:
        whole = torch.arange(24.0).view(4, 6)
        saved: list[Any] = [whole[:, 2:4], whole.t(), whole[1]]
        expected = [x.clone() for x in saved]
        before = counter.alive
        tiers.park(saved, (0, 1, 2), "ddr")
        del whole
        assert counter.parked == {"ddr": 96}
        assert counter.alive == before - 96
        tiers.fetch(saved)
        assert counter.parked == {"ddr": 0}
        assert counter.alive == before
    assert len({x.untyped_storage().data_ptr() for x in saved}) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, saved, strict=True))


def test_only_the_named_places_are_parked_and_resting_storages_stay() -> None:
    tiers, parameter = Tiers(), torch.ones(8)
    saved: list[Any] = [torch.zeros(8), torch.zeros(8), parameter[:4]]
    tiers.park(saved, (1, 2), "ddr", resting={parameter.untyped_storage()._cdata})
    assert [isinstance(entry, Parked) for entry in saved] == [False, True, False]


@pytest.mark.parametrize("tier", ["ddr", "nvme"])
def test_bytes_count_in_their_tier_alone(tier: str) -> None:
    counter, tiers = ByteCounter(), Tiers()
    with counter:
        saved: list[Any] = [torch.ones(1000)]
        tiers.park(saved, (0,), tier)
        assert (counter.alive, counter.parked[tier]) == (0, 4000)
        tiers.fetch(saved)
        assert (counter.alive, counter.parked[tier]) == (4000, 0)
        assert counter.peak == 4000
        assert counter.parked_peak == {tier: 4000}
        assert allocating() == ""


def test_files_of_nvme_lie_in_the_given_directory_and_vanish(tmp_path: Path) -> None:
    tiers = Tiers(directory=tmp_path)
    room = tiers.empty_like(torch.empty(1 << 20), "nvme")
    tiers.write(room, torch.arange(float(1 << 20)))
    mapped = Path(f"/proc/{os.getpid()}/maps").read_text()
    assert str(tmp_path) in mapped  # memory of a file there
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(tiers.read(room), torch.arange(float(1 << 20)))
    del room
    assert str(tmp_path) not in Path(f"/proc/{os.getpid()}/maps").read_text()


def test_a_directory_that_does_not_take_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Tiers(directory=tmp_path / "missing").empty_like(torch.empty(4), "nvme")


def test_unknown_tiers_are_refused() -> None:
    with pytest.raises(RuntimeProgramError, match="unknown memory tier 'tape'; tiers are ddr, nvme"):
        Tiers().empty_like(torch.empty(4), "tape")


# --- the optimizer by parts


def test_parts_hold_every_name_once_and_in_order() -> None:
    sizes = {f"p{i}": (i * 37) % 11 + 1 for i in range(50)}
    parts = divide(sizes)
    assert [name for part in parts for name in part] == list(sizes)
    limit = -(-sum(sizes.values()) // LEAST_PARTS)
    assert all(len(part) == 1 or sum(sizes[n] for n in part) <= limit for part in parts)
    assert len(parts) >= LEAST_PARTS


def test_large_parts_are_bounded_and_larger_tensors_stand_alone() -> None:
    sizes = {f"p{i}": PART_BYTES // 3 for i in range(100)} | {"huge": 5 * PART_BYTES}
    parts = divide(sizes)
    assert parts[-1] == ["huge"]
    assert all(sum(sizes[n] for n in part) <= PART_BYTES for part in parts[:-1])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "foreach adam": functools.partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "radam": functools.partial(torch.optim.RAdam, lr=1e-2),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=1.0),
    "adamax": functools.partial(torch.optim.Adamax, lr=1e-2),
    "rprop": functools.partial(torch.optim.Rprop, lr=1e-2),
    "asgd": functools.partial(torch.optim.ASGD, lr=1e-2),
}


def _steps(factory: Any, where: str, count: int, steps: int = 4) -> tuple[list[torch.Tensor], ByteCounter, Any]:
    generator = torch.Generator().manual_seed(0)
    own = {f"p{i}": nn.Parameter(torch.randn(16, 8 + i, generator=generator)) for i in range(count)}
    optimizer = factory(list(own.values()))
    counter = ByteCounter()
    sizes = {n: p.numel() * p.element_size() for n, p in own.items()}
    parts = Parts(Tiers(), [dict.fromkeys(own, where)], sizes, lambda name: optimizer.state[own[name]])
    for _ in range(steps):
        grads = {name: torch.randn(p.shape, generator=generator) for name, p in own.items()}
        with counter:
            counter.restart()
            for names in parts.parts:
                for name, p in own.items():
                    p.grad = grads[name] if name in names else None
                with parts.bring(names):
                    optimizer.step()
    return [p.detach().clone() for p in own.values()], counter, optimizer


@pytest.mark.few(11)
@pytest.mark.parametrize("tier", ["ddr", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_by_parts_is_the_step(name: str, tier: str) -> None:
    expected, _, _ = _steps(OPTIMIZERS[name], "", 20)
    found, _, _ = _steps(OPTIMIZERS[name], tier, 20)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_state_rests_in_the_tier_and_two_parts_at_most_are_on_the_device() -> None:
    _, at_home, kept = _steps(OPTIMIZERS["adamw"], "", 40)
    _, parked, optimizer = _steps(OPTIMIZERS["adamw"], "ddr", 40)
    state = sum(2 * p.numel() * 4 for group in optimizer.param_groups for p in group["params"])
    largest = 4 * state / LEAST_PARTS  # two parts, and the scratch of one
    assert parked.parked["ddr"] == state
    assert parked.alive <= at_home.alive - state
    assert parked.peak <= parked.alive + largest
    assert parked.peak < at_home.peak
    del kept
