"""Checkpoints that are written beside training are what torch.distributed.checkpoint would have written before training
went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.errors import CheckpointError
from autopar.runtime.memory.host_copy import HostCopy
from tests.runtime.comm.test_process import run
from tests.runtime.saving_worker import kinds

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("beside")
    return out, run("beside", 4, out, worker="saving_worker.py")


def content(folder: Path) -> dict[str, Any]:
    source = checkpoint.TensorSource(folder)
    return {name: source.read(name) for name, kind in source.signatures.items() if kind is not None}


def values(folder: Path, names: list[str]) -> dict[str, Any]:
    """The values that are no tensors, by torch's own loading."""
    state: dict[str, Any] = dict.fromkeys(names, "")
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_step_is_bit_for_bit_what_the_state_was_when_it_was_saved(beside, step):
    out, _ = beside
    directory = RunDirectory(out / "run")
    found = directory.read(step)
    assert directory.check(found, found.files) == ""
    assert sorted(found.files) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    have, want = content(directory.folder(step)), content(out / f"torch {step}")
    assert have.keys() == want.keys()
    assert ("optim.w1.extra" in have) == (step >= 3)
    assert all(same_bits(have[name], want[name]) for name in want)
    groups = ["optim_groups"]
    assert values(directory.folder(step), groups) == values(out / f"torch {step}", groups) != {"optim_groups": ""}


def test_files_are_planned_anew_only_where_the_state_of_a_rank_has_changed(beside):
    _, everyone = beside
    for got in everyone:
        assert got["same"] == [True, False, True, True]


def test_replicas_are_copied_and_written_by_one_rank(beside):
    _, everyone = beside
    written = [name for got in everyone for name in got["tensors"]]
    assert written.count("w1") == 2  # over tp, not over dp
    assert written.count("gain") == 1


def test_a_state_with_entries_that_are_no_numbers_is_refused_on_every_rank(beside):
    out, everyone = beside
    for got in everyone:
        assert got["problems"] == ["", "", "", "", "step 5 was not saved: optim.w1.exp_avg is not finite"]
        assert got["saved"] == 4
    assert RunDirectory(out / "run").steps() == [4, 3, 2, 1]


def test_tensors_of_every_kind_and_values_of_any_length_come_back_under_the_same_plan(tmp_path: Path):
    everyone = run("files", 4, tmp_path, worker="saving_worker.py")
    written = [name for got in everyone for name in (*got["tensors"], *got["texts"])]
    assert sorted(written) == sorted(kinds(0))
    for turn in range(2):
        folder, want = tmp_path / f"turn {turn}", kinds(turn)
        plain = [name for name, value in want.items() if not isinstance(value, Tensor)]
        assert values(folder, plain) == {name: want[name] for name in plain}
        have = content(folder)
        assert have.keys() | set(plain) == want.keys()
        for name, value in have.items():
            assert same_bits(value, want[name]), name


def test_a_copy_stays_as_it_was_and_its_room_is_used_again():
    values = {"a": torch.randn(3, 4).t(), "b": torch.randn(5, requires_grad=True), "c": torch.tensor(2)}
    copy = HostCopy(values)
    places = {name: value.data_ptr() for name, value in copy.tensors.items()}
    for _ in range(2):
        want = {name: value.detach().clone() for name, value in values.items()}
        copy.fill(values)
        with torch.no_grad():
            for value in values.values():
                value.add_(1)
        assert all(torch.equal(copy.tensors[name], want[name]) for name in want)
        assert bytes(copy.numbers["c"]) == want["c"].numpy().tobytes()
        assert {name: value.data_ptr() for name, value in copy.tensors.items()} == places
    assert HostCopy({}).tensors == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entry", [float("nan"), float("inf"), float("-inf")])
def test_one_entry_that_is_no_number_is_found_wherever_it_is(dtype, entry):
    for place in (0, 17, 999):
        value = torch.randn(1000).to(dtype)
        value[1] = torch.finfo(dtype).max
        copy = HostCopy({"good": value, "empty": value[:0], "count": torch.tensor(3), "bad": value})
        copy.fill({"good": value, "empty": value[:0], "count": torch.tensor(3), "bad": value})
        copy.check_finite()
        copy.tensors["bad"][place] = entry
        with pytest.raises(CheckpointError, match="bad is not finite"):
            copy.check_finite()
