"""Optimizers that need whole matrices, and a model of many: runs under torchrun for test_owners.py:
`python owners_worker.py STRATEGY OPTIMIZER IN OUT`, as `runs_worker.py` does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar


def muon(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for matrices, AdamW for the rest."""
    named = list(named_parameters)
    return (
        torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for _, p in named if p.ndim != 2], lr=0.01),
    )


class Shampoo(torch.optim.Optimizer):
    """A gradient between roots of what its rows and columns have been: its state has other shapes than the parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad = p.grad.reshape(p.shape[0], -1) if p.dim() else p.grad.reshape(1, 1)
                state = self.state[p]
                if not state:
                    state["left"] = 0.1 * torch.eye(grad.shape[0], dtype=p.dtype)
                    state["right"] = 0.1 * torch.eye(grad.shape[1], dtype=p.dtype)
                state["left"].add_(grad @ grad.T)
                state["right"].add_(grad.T @ grad)
                moved = _root(state["left"]) @ grad @ _root(state["right"])
                p.sub_(moved.reshape(p.shape), alpha=group["lr"])


def _root(x: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values**-0.25) @ vectors.T


# A gradient that is zero but for rounding, as of biases of keys, is not to be scaled up to a step of its own.
ADAFACTOR = functools.partial(torch.optim.Adafactor, eps=(1e-6, 1e-3))
OPTIMIZERS: dict[str, Callable[..., Any]] = {"muon": muon, "adafactor": ADAFACTOR, "shampoo": Shampoo}


class Deep(nn.Module):
    """Layers alike, a first one that is not, and a weight that is used twice."""

    def __init__(self, layers: int = 3, width: int = 10) -> None:
        super().__init__()
        self.into = nn.Linear(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x @ self.into.weight).square().mean()


def model(layers: int = 3, width: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return Deep(layers, width).double()


def batch(rows: int = 60, seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def compiled(
    ranks: Any,
    optimizer: str = "muon",
    layers: int = 3,
    width: int = 10,
    update: Any = None,
    rows: int = 4,
    **options: Any,
) -> autopar.ParallelProgram:
    cluster = autopar.ClusterSpec.local(ranks) if isinstance(ranks, int) else ranks
    """rows: of a rank and microbatch. update: what `compile` takes beside options."""
    rows = rows * cluster.size * options.get("microbatches", 1)
    asked = {"optimizer": OPTIMIZERS[optimizer]} | (update or {})
    return autopar.compile(model(layers, width), cluster, batch(rows), options=autopar.Options(**options), **asked)


def main(strategy: str, optimizer: str, source: str, out: Path) -> None:
    """Two steps from scratch, or the state of a checkpoint, left in `out`: as a checkpoint, and what every rank has."""
    import torch.distributed as dist

    from autopar.runtime.checkpoint import checkpoint
    from autopar.runtime.comm.process import TorchComm
    from tests.runs_worker import full_state

    dist.init_process_group("gloo")
    program = compiled(dist.get_world_size(), optimizer, strategy=strategy)
    session = program.in_process.session(
        TorchComm(dict(program.lowered.stages[0].mesh.axes)), program.request.update, 0
    )
    if source == "new":
        session.load_weights(program.weights())
        for step in range(2):
            session.train_step(list(batch(4 * dist.get_world_size(), step)))
    else:
        checkpoint.load(source, session)
    again = program.in_process.session(session.comm, program.request.update, 0)
    again.load_state_dict(session.state_dict())
    left, same = full_state(session), full_state(again)
    assert all(torch.equal(value, same[name]) for name, value in left.items())
    checkpoint.save(out / "ours", session)
    torch.save(left, out / f"full{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
