"""A user's training script; runs under torchrun for test_parallelize.py: `python loop_worker.py WHAT FOLDER`.

WHAT: a function below. What it returns is left as FOLDER/WHAT.RANK.pt.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar

RANK = int(os.environ.get("RANK", "0"))
HERE = Path(sys.argv[2]) if __name__ == "__main__" else None


class Tied(nn.Module):
    """A language model of two layers, whose head is its embedding; one of its parameters is used nowhere."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.mix, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(self.norm(x + torch.tanh(self.mix(x)) * self.scale))


def model(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def batch(n: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 32, (8, 7), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


SMOOTHING = 0.1


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=SMOOTHING)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def step(own: nn.Module | None = None, **others: Any) -> autopar.Step:
    asked: dict[str, Any] = {"loss_fn": loss, "optimizer": lambda params: optimizer(params)}
    asked |= {"entries": {"evaluate": autopar.Entry()}} | others
    return autopar.parallelize(own or model(), "here", asked.pop("example", batch()), **asked)


def trained(own: autopar.Step) -> Any:
    """Learning rates that the loop sets, batches that are added up, weights that are read and taken back."""
    losses = []
    for n in range(4):
        own.optimizer.param_groups[0]["lr"] = 1e-2 / (n + 1)
        losses.append(own(*batch(n)).item())
        own.optimizer.step()  # a loop of torch's does so
        own.optimizer.zero_grad()
    with own.no_sync():
        losses += [own(*batch(n)).item() for n in (4, 5)]
    losses.append(own.local(*(part[own.shard.indices] for part in batch(6))).item())
    measured, logits = own.evaluate(*batch(9))
    state = own.state_dict()
    if HERE:
        own.save(HERE / "saved")
    losses.append(own(*batch(7)).item())
    own.load_state_dict(state)
    again, _ = own.eval()(*batch(9))
    own.train()
    return losses, state, own.steps_done, str(own.directory), measured.item(), again.item(), logits


def loop() -> Any:
    """The loop, and what state dicts hold on which rank."""
    own = step(scheduler=None)
    told = trained(own)
    assert len(own.state_dict(every_rank=False)) == (len(told[1]) if RANK == 0 else 0)
    return told


def resumed() -> Any:
    """Goes on where `loop` saved."""
    own = step(scheduler=None)
    assert HERE is not None
    own.resume(HERE / "saved")
    return own(*batch(7)).item(), own.optimizer.param_groups[0]["lr"], own.steps_done


def machines() -> Any:
    """Two ranks that are machines of their own, each with programs of its own."""
    assert HERE is not None
    os.environ["AUTOPAR_MACHINE"] = f"machine{RANK}"
    os.environ["AUTOPAR_CACHE"] = str(HERE / f"cache{RANK}")
    torch.manual_seed(7)
    told = said(lambda: autopar.parallelize(Distinct(), "here", (torch.ones(4, 4),)))
    own = step()
    drawn = torch.rand(1).item()
    return told, own(*batch()).item(), str(own.directory), (own.directory / "plan.json").read_text(), drawn


class Distinct(nn.Module):
    """A model that has no program: how many rows differ only the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x.unique(dim=0)).mean()


def said(call: Any) -> str:
    """The error that a call ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misuse() -> Any:
    """Ranks that do not do the same, or ask for what cannot be, are told so."""
    global SMOOTHING
    told = {"cluster": said(lambda: autopar.parallelize(model(), autopar.ClusterSpec.local(3), batch(), loss_fn=loss))}
    told["graph"] = said(lambda: autopar.parallelize(Distinct(), "here", (torch.ones(4, 4),)))
    SMOOTHING = 0.1 * RANK
    told["closure"] = said(step)
    SMOOTHING = 0.1
    locked = model()
    locked.mix.lock = threading.Lock()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told["once"] = step(locked).directory.name
        step(optimizer=None)
    told["warned"] = " ".join(str(one.message) for one in caught)
    own = step(model(seed=RANK), scheduler=lambda one: torch.optim.lr_scheduler.StepLR(one, 1, 0.5))
    state = own.state_dict()
    told["shape"] = said(lambda: own(*(part[:4] for part in batch())))
    own(*batch())
    own.scheduler.step()
    told["scheduler"] = said(lambda: own(*batch()))
    own = step(scheduler=None)
    own(*batch())
    own.optimizer.param_groups[0]["lr"] *= 1 + RANK
    told["lr"] = said(lambda: [own(*batch()), own.state_dict()])
    return told, state


if __name__ == "__main__":
    assert HERE is not None
    torch.save(globals()[sys.argv[1]](), HERE / f"{sys.argv[1]}.{RANK}.pt")
