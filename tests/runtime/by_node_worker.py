"""Runs under torchrun for test_hierarchical.py: `python by_node_worker.py SCENARIO OUT`; four ranks of one machine play two."""

from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.runtime.comm.process import TorchComm
from tests.runtime import scenarios, stages, two_nodes
from tests.runtime.process_worker import caught


def agree(out: Path) -> dict[str, Any]:
    """The results of the processes, which are to be those of the threads, with calls compared before they start or not."""
    comm, checked = (TorchComm(two_nodes.MESH, timeout_s=60, check=check) for check in (False, True))
    for one in (comm, checked):
        two_nodes.go_by_node(one)
    got = {"collectives": two_nodes.collectives(comm), "checked": two_nodes.collectives(checked)}
    comm.release()
    return got | {"order": comm.flight.beat(asked=True)}


def train(out: Path) -> dict[str, Any]:
    """Steps by node, with buckets of gradients and gathers of parameters under way."""
    got: dict[str, Any] = {}
    for zero in (0, 1, 3):
        program = stages.mlp(4, 1, zero)
        comm = TorchComm(program.mesh)
        two_nodes.go_by_node(comm)
        got[str(zero)] = scenarios.train(comm, program, 3)
        got[str(zero)].pop("session")
    return got


def elsewhere(out: Path) -> dict[str, Any]:
    """All ranks are on one machine, which is not what is described."""
    os.environ["GROUP_RANK"] = "0"
    comm = TorchComm(two_nodes.MESH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        two_nodes.go_by_node(comm)
    return {"said": [str(one.message) for one in said], "collectives": two_nodes.collectives(comm)}


def alone(out: Path) -> dict[str, Any]:
    """The last rank never comes."""
    store = dist.FileStore(str(out / "store"), 4)
    comm = TorchComm(two_nodes.MESH, timeout_s=1.0, store=store)
    two_nodes.go_by_node(comm)
    last = dist.get_rank() == 3
    got = caught(lambda: time.sleep(0.1) if last else comm.all_reduce(torch.ones(64), "dp", site="model.py:7"))
    dist.barrier()
    return got


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // 2)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    target = Path(sys.argv[2])
    scenario = {f.__name__: f for f in (agree, train, elsewhere, alone)}[sys.argv[1]]
    torch.save(scenario(target), target / f"{sys.argv[1]}_{dist.get_rank()}.pt")
    dist.destroy_process_group()
