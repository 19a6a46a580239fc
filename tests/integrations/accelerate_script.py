"""A loop with accelerate, and the same with a step of autopar (docs/trainers.md): `accelerate_script.py KIND FOLDER loop`."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.integrations.trainer_script import Rows, bert


def with_accelerate(model: Any, rows: Any) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    loader = DataLoader(rows, batch_size=8, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_autopar(model: Any, rows: Any) -> list[float]:
    import autopar

    loader = DataLoader(rows, batch_size=8, drop_last=True)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    example = next(iter(DataLoader(rows, batch_size=8)))
    step = autopar.parallelize(model, "here", example, optimizer=optimizer, clip_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(step.optimizer, 0.1, 1.0, 4)
    losses = []
    for batch in loader:
        loss = step(batch)
        scheduler.step()
        losses.append(loss.item())
    model.load_state_dict(step.state_dict())
    return losses


def main(kind: str, folder: Path, case: str) -> None:
    """Train a classifier, and write its losses and the weights' sums."""
    model, rows = bert(), Rows(32, "class", 1)
    losses = (with_autopar if kind == "autopar" else with_accelerate)(model.train(), rows)
    if os.environ.get("RANK", "0") == "0":
        sums = {key: float(p.detach().square().sum()) for key, p in model.named_parameters()}
        (folder / f"{case}.json").write_text(json.dumps({"losses": losses, "sums": sums}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
