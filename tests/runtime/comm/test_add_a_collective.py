"""Adding a collective is two rows: what it does (`runtime.comm.collectives`) and what it costs (`costmodel.collective`).

Here `scatter`: one member's rows, one to each member. Nothing else of the library knows it, and it runs between threads and
between processes, is started and waited for like any other, is recorded, priced and compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cluster.spec import ClusterSpec
from autopar.costmodel.collective import COSTS, CollectiveCost, collective_time_s
from autopar.runtime.comm.calls import Call, Handle
from autopar.runtime.comm.collectives import COLLECTIVES, Collective
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.errors import CollectiveMismatch


def _scatter(calls: Sequence[Call]) -> None:
    for index, call in enumerate(calls):
        call.out.copy_(calls[call.root].inp[index])


def _start_scatter(call: Call, group: Any) -> Any:
    rows = list(call.inp.unbind()) if call.group.index == call.root else None
    return dist.scatter(call.out, rows, call.group.ranks[call.root], group=group, async_op=True)


def _one_way_s(S: float, P: int, level: Any, B: float, depth: int, ramp: float) -> tuple[float, float]:
    return (P - 1) / P * S / B, level.latency_s + level.base_s


ROW = Collective(_scatter, _start_scatter, rows_in=True, by_rank=True)
COST = CollectiveCost(_one_way_s, lambda n: (n - 1) / n, one_way=True)


@pytest.fixture(autouse=True)
def scatter() -> Iterator[None]:
    COLLECTIVES["scatter"], COSTS["scatter"] = ROW, COST
    yield
    del COLLECTIVES["scatter"], COSTS["scatter"]


def start_scatter(comm: Comm, rows: Tensor, axis: str, root: int = 0) -> Handle[Tensor]:
    out = rows.new_empty(rows.shape[1:])
    return comm.start(Call("scatter", comm.group(axis), out, rows, root=root, site="test"), out)


def own_row(comm: Comm) -> list[float]:
    rows = torch.arange(6.0).view(3, 2) + 10 * comm.rank
    return start_scatter(comm, rows, "dp", root=1).wait().tolist()


EXPECTED = [[10.0, 11.0], [12.0, 13.0], [14.0, 15.0]]


def test_it_runs_between_threads() -> None:
    assert run_threads(3, {"dp": 3}, own_row) == EXPECTED


@pytest.mark.timeout(60)
def test_it_runs_between_processes(tmp_path: Path) -> None:
    from tests.warm import torchrun  # which the processes do not have

    done = torchrun(3, Path(__file__), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)] == EXPECTED


def test_members_that_disagree_are_named() -> None:
    def odd(comm: Comm) -> None:
        start_scatter(comm, torch.zeros(3, 2 + comm.rank // 2), "dp").wait()

    with pytest.raises(CollectiveMismatch, match="scatter of float32"):
        run_threads(3, {"dp": 3}, odd)


def test_it_is_priced() -> None:
    cluster = ClusterSpec.local(4)
    level, ranks = cluster.levels[0], (0, 1, 2, 3)
    expected_s = 0.75 * 1e6 / level.rate_Bps((0,)) + level.latency_s + level.base_s
    assert collective_time_s(cluster, "scatter", 1e6, ranks) == pytest.approx(expected_s)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    COLLECTIVES["scatter"] = ROW
    torch.save(own_row(TorchComm({"dp": 3})), Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
