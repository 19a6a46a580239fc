"""Four ranks on two nodes, and what they are asked to do along their only axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime import Comm
from autopar.runtime.comm.hierarchical import KINDS
from autopar.runtime.comm.nodes import ByNode, use_nodes
from tests.runtime.scenarios import value

MESH = {"dp": 4}
NODES = [(0, 1), (2, 3)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def go_by_node(comm: Comm, nodes: Sequence[tuple[int, ...]] = NODES, axis: str = "dp", least: int = 0) -> None:
    """Every collective along the axis that has so many bytes."""
    use_nodes(comm, [comm], [(comm.mesh, 0)], nodes, [ByNode(0, axis, dict.fromkeys(KINDS, least))])


def collectives(comm: Comm, axis: str = "dp") -> dict[str, torch.Tensor]:
    """Small and large ones, of several dtypes, in place, several under way, and of sizes that do not divide."""
    n, got = comm.axis_size(axis), {}
    for size in (n, 16 * n):
        x = value(comm.rank, size, 16)
        got |= {
            f"{size} sum": comm.all_reduce(x, axis, site="two nodes"),
            f"{size} max": comm.all_reduce(x, axis, op="max"),
            f"{size} gather 1": comm.all_gather(x, 1, axis),
            f"{size} gather 0": comm.all_gather(x.t(), 0, axis),
            f"{size} scatter": comm.reduce_scatter(x, 0, axis),
            f"{size} scatter min": comm.reduce_scatter(x.t(), 1, axis, op="min"),
        }
    for numel in (1, n - 1, 7 * n + 1):
        got[f"{numel} sum"] = comm.all_reduce(value(comm.rank, numel), axis)
    for dtype in DTYPES:
        x = value(comm.rank, 4 * n, dtype=dtype)
        got[f"{dtype} sum"] = comm.start_all_reduce_into(x.clone(), axis).wait()
        got[f"{dtype} scatter"] = comm.reduce_scatter(x, 0, axis)
        got[f"{dtype} gather"] = comm.all_gather(x, 0, axis)
    sums = [comm.start_all_reduce(value(comm.rank + i, 5), axis) for i in range(4)]
    gathers = [comm.start_all_gather(value(comm.rank + i, 5), 0, axis) for i in range(4)]
    got |= {f"gather under way {i}": handle.wait() for i, handle in enumerate(gathers)}
    got |= {f"sum under way {i}": handle.wait() for i, handle in enumerate(sums)}
    return got
