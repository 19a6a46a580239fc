"""A rank that trains zoo models under exported FSDP2 files: `fsdp2_worker.py FOLDER`, started by torchrun.

Every folder in FOLDER is a case, named after its model: it has parallelize.py, and gets losses.json.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tests.exchange.cases import STEPS, batch_of, model_of
from tests.zoo.eager import loss_of
from tests.zoo.models import BY_NAME, Batch, ZooModel


def module_of(path: Path) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location(f"exported_{path.parent.name.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_and_terms(zoo: ZooModel, model: nn.Module, batch: Batch) -> Any:
    """The loss of a part of a batch, with how many tokens it is the mean of where some of them do not count."""
    if zoo.name not in ("gpt2", "t5"):
        return loss_of(zoo, model, batch)
    assert isinstance(batch, tuple)
    terms = int((batch[-1] != -100).sum())
    if terms:
        return loss_of(zoo, model, batch), terms
    counted = (*batch[:-1], batch[-1].clamp(min=0))
    return loss_of(zoo, model, counted), 0


def part_of(batch: Batch, parts: int, place: int) -> Batch:
    """One of equal parts of a batch."""
    part: Batch = pytree.tree_map(lambda t: t.chunk(parts)[place], batch)
    return part


def losses(case: Path) -> list[float]:
    """The losses of STEPS steps of a case."""
    exported, zoo = module_of(case / "parallelize.py"), BY_NAME[case.name.partition("_")[0]]
    model = exported.parallelize(model_of(zoo), "cpu")
    optimizer = zoo.optimizer(list(model.parameters()))
    dp, place = exported.DP_REPLICATE * exported.DP_SHARD, dist.get_rank() // exported.TP
    found = []
    for seed in range(STEPS):
        mine = part_of(batch_of(zoo, seed), dp, place)
        count = len(pytree.tree_leaves(mine)[0]) // exported.MICRO_BATCH
        batches = [part_of(mine, count, i) for i in range(count)]
        loss = exported.train_step(model, batches, lambda m, batch: loss_and_terms(zoo, m, batch), optimizer)
        found.append(float(loss))
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = losses(case)
        if dist.get_rank() == 0:
            (case / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
