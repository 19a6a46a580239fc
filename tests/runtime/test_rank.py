"""The rank as emitted code sees it: keys of random ops, buffers that a step writes, parameters that are asked for early."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime import run_threads
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from autopar.runtime.gradients.grads import GradStore
from autopar.runtime.kernels.random import keep_mask
from autopar.runtime.rank import Rank

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def rank_of(comm: Any, **buffers: Tensor) -> Rank:
    params = {"w": torch.arange(4.0) + 4 * comm.rank}
    return Rank(comm, params, buffers, GradStore(comm, {}, 1, BucketSizes(1 << 10)), seed=3)


def on_one(body: Any) -> Any:
    return run_threads(1, {"dp": 1}, body, timeout_s=30)[0]


def test_all_that_tells_random_ops_apart_is_in_their_key() -> None:
    """Two dropouts of a block, two calls of a template, two microbatches, two steps, two seeds: each draws a mask of its own."""

    def keys(comm: Any) -> list[int]:
        rt, found = rank_of(comm), []
        for rt.seed, rt.step, rt.microbatch, call, site in itertools.product((3, 4), *[(0, 1)] * 4):
            found.append(rt.key(call, site))
            assert rt.key(call, site) == found[-1]
        return found

    found = on_one(keys)
    assert len(set(found)) == 2**5
    masks = [keep_mask((1024,), 0.5, key) for key in found]
    for one, other in itertools.combinations(masks, 2):
        assert abs((one == other).double().mean().item() - 0.5) < 0.1


class Dropping(nn.Module):
    """Two equal blocks of two dropouts each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_every_dropout_of_a_program_draws_by_a_key_of_its_own_and_backward_by_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = autopar.compile(
        Dropping(),
        autopar.ClusterSpec.local(2),
        (torch.randn(8, 8),),
        optimizer=SGD,
        options=autopar.Options(strategy="dp", microbatches=2),
    )
    asked: dict[tuple[int, ...], set[int]] = {}
    real = Rank.key

    def key(self: Rank, call: int, site: int) -> int:
        value = real(self, call, site)
        asked.setdefault((self.step, self.microbatch, call, site), set()).add(value)
        return value

    monkeypatch.setattr(Rank, "key", key)
    assert autopar.verify(program, Dropping(), (torch.randn(8, 8),)).ok
    assert len({place[2:] for place in asked}) == 4
    assert {place[1] for place in asked} == {0, 1}
    assert all(len(keys) == 1 for keys in asked.values())
    assert len(set.union(*asked.values())) == len(asked)


def test_a_buffer_that_microbatches_sum_holds_their_sum_and_one_that_they_share_the_last() -> None:
    def steps(comm: Any) -> list[list[float]]:
        rt = rank_of(comm, total=torch.zeros(2), mean=torch.zeros(2))
        found = []
        for _ in range(2):
            for value in (1.0, 2.0, 4.0):
                rt.update_buffer("total", torch.full((2,), value), "sum")
                rt.update_buffer("mean", torch.full((2,), value), "same")
            assert rt.buffers["total"].tolist() == (found[-1][:2] if found else [0.0, 0.0])
            rt.end_step()
            found.append(rt.buffers["total"].tolist() + rt.buffers["mean"].tolist())
        return found

    assert on_one(steps) == [[7.0, 7.0, 4.0, 4.0]] * 2


def test_parameters_that_were_asked_for_are_taken_once_and_no_other() -> None:
    def body(comm: Any) -> list[list[float]]:
        rt = rank_of(comm)
        steps = (("all_gather", ("dp",), 0),)
        rt.prefetch("first", [("w", steps)])
        rt.prefetch("second", [("w", ()), ("w", steps, torch.float64)])
        with pytest.raises(RuntimeProgramError, match="started twice"):
            rt.prefetch("first", [])
        plain, cast = rt.take("second")
        assert cast.dtype == torch.float64
        with pytest.raises(RuntimeProgramError, match="prefetched and never taken: first"):
            rt.end_step()
        (whole,) = rt.take("first")
        rt.end_step()
        with pytest.raises(RuntimeProgramError, match="without a prefetch"):
            rt.take("first")
        with pytest.raises(RuntimeProgramError, match="no parameter 'v'"):
            rt.prefetch("third", [("v", ())])
        return [plain.tolist(), whole.tolist(), cast.tolist()]

    for rank, (plain, whole, cast) in enumerate(run_threads(2, {"dp": 2}, body, timeout_s=30)):
        assert plain == [4.0 * rank + i for i in range(4)]
        assert whole == cast == [float(i) for i in range(8)]
