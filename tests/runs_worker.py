"""A model that divides by no number of ranks; runs under torchrun for test_runs.py: `python runs_worker.py STRATEGY IN OUT`.

Weights are 23 × 31, biases 31 and 23. IN: a checkpoint to go on from, or "new"; OUT: a folder in which the state is left, as a
checkpoint of the runtime's (`ours`), as one that torch alone writes (`torchs`), and full (`full.pt`).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar
from autopar.passes.shard.uneven import balanced
from autopar.runtime.comm.mesh import Shares

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Odd(nn.Module):
    """Two products of odd sizes, the second one's weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(23, 31), nn.LayerNorm(31), nn.Linear(31, 23)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.back(self.norm(torch.tanh(self.wide(x))))
        return (x @ self.back.weight - self.wide(y)).square().mean()


def batch(rows: int = 60, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 23, generator=draw, dtype=torch.float64) for _ in range(2))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Odd().double()


def compiled(on: Any, rows: int = 60, update: Any = None, **options: Any) -> autopar.ParallelProgram:
    """update: what `compile` takes beside options."""
    cluster = autopar.ClusterSpec.local(on) if isinstance(on, int) else on
    asked = {"optimizer": ADAMW} | (update or {})
    return autopar.compile(model(), cluster, batch(rows), options=autopar.Options(**options), **asked)


def options_of(strategy: str, ranks: int) -> dict[str, Any]:
    """Options of a strategy; one that ends in "-tp" has all ranks along `tp`, which holds both of the model's dims in unequal
    blocks."""
    name, inside, _ = strategy.partition("-tp")
    return {"strategy": name} | ({"mesh": {"tp": Shares(balanced(23, ranks), balanced(31, ranks))}} if inside else {})


def full_state(session: Any) -> dict[str, torch.Tensor]:
    """Parameters and what the optimizer keeps of them, whole."""
    state = {name: value for name, value in session.state_dict().items() if isinstance(value, torch.Tensor)}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for n, v in state.items()}


def main(strategy: str, source: str, out: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from autopar.runtime.checkpoint import checkpoint
    from autopar.runtime.comm.process import TorchComm

    dist.init_process_group("gloo")
    program = compiled(dist.get_world_size(), **options_of(strategy, dist.get_world_size()))
    ((mesh, _),) = [(dict(stage.mesh.axes), None) for stage in program.lowered.stages]
    session = program.in_process.session(TorchComm(mesh), program.request.update, 0)
    if source == "new":
        session.load_weights(program.weights())
        for step in range(2):
            session.train_step(list(batch(seed=step)))
    else:
        checkpoint.load(source, session)
    again = program.in_process.session(session.comm, program.request.update, 0)
    again.load_state_dict(session.state_dict())
    left, same = full_state(session), full_state(again)
    assert all(torch.equal(value, same[name]) for name, value in left.items())
    checkpoint.save(out / "ours", session)
    tensors = {n: v for n, v in session.state_dict().items() if isinstance(v, torch.Tensor) and v.dim()}
    dcp.save(tensors, checkpoint_id=out / "torchs")
    if dist.get_rank() == 0:
        torch.save(left, out / "full.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
