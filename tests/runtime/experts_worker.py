"""Runs under torchrun for test_dispatch.py: `python experts_worker.py OUT`; what every rank makes of some mixtures is saved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.runtime import ExpertOverflow
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.kernels.experts import experts

RANKS, TOKENS, EXPERTS, D, F = 4, 12, 8, 5, 6
ROUTES = ("any", "all to one", "one rank has none", "one expert twice", "some choices are none")
GATE = ("silu", 1.0, None, 0.0)


def mixture(route: str, choices: int) -> tuple[torch.Tensor | None, ...]:
    """x, w_in, b_in, w_out, b_out, chosen, weights and the gradient of the result, the same in every process."""
    generator = torch.Generator().manual_seed(choices)

    def f(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    chosen = torch.randint(0, EXPERTS, (TOKENS, choices), generator=generator)
    if route == "all to one":
        chosen = torch.full_like(chosen, 3)
    elif route == "one rank has none":
        chosen = chosen % (EXPERTS - EXPERTS // RANKS)
    elif route == "one expert twice":
        chosen = chosen[:, :1].expand(-1, choices).contiguous()
    elif route == "some choices are none":
        chosen = chosen + chosen % 2 * EXPERTS
    layers = (f(EXPERTS, D, 2, F), f(EXPERTS, 2, F), f(EXPERTS, F, D), f(EXPERTS, D))
    return (f(TOKENS, D), *layers, chosen, f(TOKENS, choices), f(TOKENS, D))


def cases() -> Iterator[tuple[str, int]]:
    for route in ROUTES:
        for choices in (1, 2, 8):
            yield route, choices


def on_rank(comm: Comm, *axes: str) -> list[Any]:
    """Value and gradients of this rank's blocks of every mixture; then the error of one that is too uneven."""
    along, block = Along(comm, *axes), comm.axis_index(axes)
    ranks = comm.axis_size(axes)
    results: list[Any] = []
    for route, choices in cases():
        *operands, g = (None if t is None else t.chunk(ranks)[block] for t in mixture(route, choices))
        told = (*GATE, 1.0, "chunk")
        y = experts.experts(*operands, *told, along=along)
        results.append((y, *experts.experts_grad(g, *operands, True, *told, along=along)))
    *operands, _ = (None if t is None else t.chunk(ranks)[block] for t in mixture("all to one", 2))
    try:
        experts.experts(*operands, *GATE, 1.0, "stop", "model.py:7", along=along)
    except ExpertOverflow as error:
        results.append(str(error))
    return results


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    native = TorchComm({"ep": RANKS})
    native.gloo = False  # the way that NCCL goes
    results = {"gloo": on_rank(TorchComm({"ep": RANKS}), "ep"), "native": on_rank(native, "ep")}
    both = TorchComm({"dp": 2, "ep": 2})
    results |= {"beside another axis": on_rank(both, "ep"), "over nodes": on_rank(both, "dp", "ep")}
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
