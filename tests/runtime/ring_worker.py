"""Runs under torchrun for test_ring.py: `python ring_worker.py OUT`; what every rank makes of some calls is saved."""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.runtime.comm.process import TorchComm
from autopar.runtime.kernels.attention import rings
from tests.runtime.ring_cases import Call, call, on_rank

MESHES = ({"cp": 4}, {"dp": 2, "cp": 2})


def calls() -> list[Call]:
    """The same in every process."""
    draws = random.Random(3)
    kinds = ("none", "bool", "float", "hidden rows")
    return [call(lambda *options: draws.choice(options), seed, 4, kinds, p=0.3 * (seed % 2)) for seed in range(12)]


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {
        name: [on_rank(c, mesh)(comm) for c in calls()]
        for name, mesh, comm in (("-".join(mesh), mesh, TorchComm(mesh)) for mesh in MESHES)
    }
    rings.LEAST_BYTES = 1  # in turns
    results["turns"] = [on_rank(c, MESHES[0])(TorchComm(MESHES[0])) for c in calls()]
    native = TorchComm(MESHES[0])
    native.gloo = False  # the way that NCCL goes
    results["native"] = [on_rank(c, MESHES[0])(native) for c in calls()]
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
