"""The data functions of docs/data.md train as they say, over datasets of the protocols that they name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.program.rows import DataShard
from tests.runtime.run.test_own_data import trained
from tests.test_house import ROOT
from tests.test_local_rows import ROWS

PROJECT = """
import torch
from torch.utils.data import Dataset, DataLoader

class Rows(Dataset):
    def __init__(self, take=None):
        make = torch.Generator().manual_seed(5)
        self.ids, self.take = torch.randint(0, 32, (96, 8), generator=make), range(96) if take is None else take
        self.read = []

    def __len__(self):
        return len(self.take)

    def __getitem__(self, i):
        self.read.append(self.take[i])
        ids = self.ids[self.take[i]]
        return {"ids": ids, "labels": ids.roll(1)}

dataset = Rows()

def in_order(order):
    def batches():
        return DataLoader(dataset, batch_size=24, sampler=order)
    return batches
"""
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    if "def batches" in block
]


def split(dataset: Any, rank: int, world_size: int) -> Any:
    """A rank's contiguous run of a map-style dataset, as Hugging Face's `split_dataset_by_node` gives it."""
    length = len(dataset) // world_size
    return type(dataset)(range(rank * length, (rank + 1) * length))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module with the dataset."""
    (tmp_path / "my_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    fake = types.ModuleType("datasets.distributed")
    fake.split_dataset_by_node = split  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    monkeypatch.setitem(sys.modules, "datasets.distributed", fake)
    return importlib.import_module("my_project")


def order_of(block: str) -> list[int]:
    """The samples of the first epoch in the order of global batches, as the page says."""
    if "shard.sampler" in block:
        return [i for batch in DataShard.whole(ROWS).sampler(96, seed=0) for i in batch]
    if "DistributedSampler" in block:
        from torch.utils.data import DistributedSampler

        return [*DistributedSampler(range(96), num_replicas=1, rank=0, seed=0)]  # type: ignore[arg-type]
    parts = [range(24 * r, 24 * r + 24) for r in range(4)]
    return [i for k in range(4) for part in parts for i in part[6 * k : 6 * k + 6]]


@pytest.mark.few(2)
@pytest.mark.parametrize("block", BLOCKS, ids=["sampler", "torch", "datasets"])
def test_every_data_function_of_the_page_trains_as_one_device_does(block, project, tmp_path):
    (tmp_path / "my_data.py").write_text(block.replace(", num_workers=2", ""))
    order = order_of(block)
    assert sorted(order) == list(range(96))
    project.whole = project.in_order(order)
    ours = trained("dp", f"{tmp_path / 'my_data.py'}:batches", 4)
    theirs = trained("dp", "my_project:whole", 4)
    for losses, _ in ours:
        assert losses == pytest.approx(theirs[0][0], rel=1e-9)


def test_torch_deals_out_the_same_samples_of_a_batch_on_any_number_of_ranks(project):
    """A global batch of DistributedSampler is a run of its order, whoever many share it."""
    from torch.utils.data import DistributedSampler

    samplers = [[*DistributedSampler(range(96), num_replicas=4, rank=r, seed=0)] for r in range(4)]  # type: ignore[arg-type]
    order = order_of(BLOCKS[1])
    for k in range(4):
        assert {i for own in samplers for i in own[6 * k : 6 * k + 6]} == {*order[ROWS * k : ROWS * k + ROWS]}


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_a_dataset_of_hugging_face_is_dealt_out_to_equal_parts():
    import datasets
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"i": list(range(48))})
    shards = [DataShard(r, 24, ((6 * r, 6 * r + 6),), place=(r, 4)) for r in range(4)]
    parts = [split_dataset_by_node(rows, rank=one.index, world_size=one.replicas)["i"] for one in shards]
    assert sorted(i for part in parts for i in part) == list(range(48))
    sampled = [rows[batch]["i"] for one in shards for batch in one.sampler(rows, seed=1)]
    assert sorted(i for batch in sampled for i in batch) == list(range(48))
