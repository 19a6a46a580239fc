"""Which kind of device ranks compute on, and what a process group of somebody else's is taken for.

The counts of devices that torch gives are made up, so no test needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.comm.backends import CUDA, HOST, Arriving, backend_named, backend_of, own_index, usual_backend
from autopar.runtime.comm.environment import LaunchError, machine_name
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.run import loaded


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def see(count: int, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)
        monkeypatch.setattr(dist, "is_backend_available", lambda name: nccl or name != "nccl")

    return see


@pytest.fixture
def alone() -> Iterator[Any]:
    """Makes a process group of this process alone."""
    yield lambda *backend: dist.init_process_group(*backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


# ---- ranks that are told none


def test_ranks_that_have_a_gpu_each_take_it(gpus: Any) -> None:
    gpus(4)
    assert usual_backend(4) is CUDA
    assert [CUDA.device(rank).index for rank in range(4)] == [0, 1, 2, 3]


def test_without_gpus_ranks_compute_on_processors(gpus: Any) -> None:
    gpus(0)
    assert usual_backend(4) is HOST
    assert HOST.device(3) == torch.device("cpu")


@pytest.mark.parametrize(("count", "nccl"), [(1, True), (3, True), (8, False)])
def test_gpus_that_would_be_left_unused_in_silence_are_refused(gpus: Any, count: int, nccl: bool) -> None:
    gpus(count, nccl)
    with pytest.raises(LaunchError, match=r"--backend nccl, where .* its own, or --backend gloo, to compute on"):
        usual_backend(4)


def test_where_each_task_sees_one_gpu_that_is_its_device(gpus: Any) -> None:
    gpus(1)
    assert [backend_named("nccl").device(rank) for rank in range(4)] == [torch.device("cuda", 0)] * 4
    gpus(2)
    with pytest.raises(LaunchError, match="has 2 cuda devices, and LOCAL_RANK is 3"):
        CUDA.device(3)
    assert [own_index(2, rank) for rank in range(4)] == [0, 1, None, None]


def test_a_rank_whose_gpu_another_one_has_is_refused(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = dist.HashStore()
    store.add(f"device/{machine_name()}/0000:1b:00.0", 1)
    with pytest.raises(
        LaunchError, match=r"rank 3: another rank of this machine has the same device, at 0000:1b:00\.0"
    ):
        loaded._join(CUDA, CUDA.device(3), 1.0, SimpleNamespace(placement=()), (store, 3))  # type: ignore[arg-type]


def test_a_backend_that_nobody_knows_is_refused() -> None:
    with pytest.raises(RuntimeProgramError, match="unknown backend 'ncl'; backends are gloo, nccl"):
        backend_named("ncl")


# ---- groups of somebody else's


@pytest.mark.parametrize("backend", ["", "gloo", "cpu:gloo"])
def test_a_group_is_what_it_has_for_processors_however_it_was_named(alone: Any, backend: str) -> None:
    alone(*filter(None, [backend]))
    comm = TorchComm({"a": 1})
    assert (comm.device, comm.transport, comm.in_order) == (torch.device("cpu"), HOST.transport, False)


def test_a_group_for_both_computes_on_gpus(alone: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone("gloo")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    gpus(3)
    comm = TorchComm({"a": 1})
    assert (comm.device, comm.transport, comm.in_order) == (torch.device("cuda", 2), CUDA.transport, True)
    gpus(0)
    assert TorchComm({"a": 1}).device == torch.device("cpu")


def test_a_group_that_leaves_gpus_unused_says_so(alone: Any, gpus: Any) -> None:
    alone("gloo")
    gpus(8)
    with pytest.warns(
        RuntimeWarning, match=r"8 cuda devices are unused; make the group with init_process_group\('nccl'\)"
    ):
        assert TorchComm({"a": 1}).device == torch.device("cpu")


def test_a_device_that_a_group_has_no_backend_for_is_refused(alone: Any) -> None:
    alone("cpu:gloo")
    with pytest.raises(RuntimeProgramError, match=r"no backend for cuda devices \(cpu:gloo\)"):
        TorchComm({"a": 1}, "cuda")


# ---- what is asked of a row


def test_what_lies_on_the_host_has_arrived() -> None:
    x = torch.arange(3)
    arriving = Arriving([x])
    assert not arriving.late
    assert arriving.wait() == [x]


def test_tensors_without_data_lie_on_the_host_and_other_devices_are_not_guessed() -> None:
    assert backend_of(torch.device("meta")) is HOST
    with pytest.raises(RuntimeProgramError, match="nothing is known of xla devices"):
        backend_of(torch.device("xla"))
