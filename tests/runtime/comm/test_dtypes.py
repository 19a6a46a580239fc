"""Dtypes that NCCL's collectives do not take go as bytes, and are summed in wider ones.

The ranks are processes over Gloo, behind a row whose transport takes what NCCL takes and no tags; torch's functions refuse
the rest, as NCCL does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.comm import collectives
from autopar.runtime.comm.backends import CUDA, HOST, Transport, register_backend
from autopar.runtime.comm.calls import Message
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.comm.threads import run_threads

MESH = {"a": 2, "b": 2}
DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.complex128, torch.float8_e4m3fn)
MOVED_ALONE = (torch.uint16, torch.uint32, torch.float8_e4m3fn)
"""Dtypes that torch does not add."""
UNORDERED = (torch.complex64, torch.complex128)
STRICT = Transport("strict", dtypes=CUDA.transport.dtypes)


def value(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randint(0, 3000, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.remainder(16).to(dtype) if dtype.itemsize == 1 else drawn.to(dtype)


def sent(comm: Comm) -> dict[str, Tensor]:
    """Every kind of message in every dtype; sums overflow."""
    got: dict[str, Tensor] = {}
    for dtype in DTYPES:
        for axes in ("b", ("a", "b"), ("b", "a")):
            n, me = comm.axis_size(axes), comm.axis_index(axes)
            x = value(comm.rank, 8, 4, dtype=dtype)
            rows = value(comm.rank, sum(range(n)), dtype=dtype)
            one = {
                "gather": comm.all_gather(x, 1, axes),
                "gather of a number": comm.all_gather(x[:1, 0], 0, axes),
                "gather of nothing": comm.all_gather(x[:0], 0, axes),
                "swap": comm.all_to_all(x, 0, 1, axes),
                "first": comm.broadcast(x, axes, index=1),
                "number": comm.broadcast(x[0, 0], axes, index=1),
                "shift": comm.start_shift(x, axes).wait(),
            }
            if axes != ("b", "a"):
                one["rows"] = comm.start_exchange(rows, range(n), [me] * n, axes).wait()
            if dtype not in MOVED_ALONE:
                one["sum"] = comm.all_reduce(30 * x, axes)
                one["scatter"] = comm.reduce_scatter(30 * x, 0, axes)
            if dtype not in (*MOVED_ALONE, *UNORDERED):
                one["max"] = comm.all_reduce(x, axes, op="max")
                one["in place"] = comm.start_all_reduce_into(x.clone(), axes, op="min").wait()
            got |= {f"{dtype} {axes} {name}": y for name, y in one.items()}
        received, peer = torch.zeros(3, dtype=dtype), comm.rank ^ 1
        own = value(comm.rank, 3, dtype=dtype)
        for posted in comm.start_messages([Message("send", own, peer, 0), Message("recv", received, peer, 0)]):
            posted.wait()
        got[f"{dtype} message"] = received
    return got


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    from tests.warm import torchrun  # which the processes do not have

    folder = tmp_path_factory.mktemp("dtypes")
    done = torchrun(4, Path(__file__), folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["by NCCL's dtypes", "by Gloo's dtypes", "by messages"])
def test_every_dtype_arrives_as_among_threads(processes: list[dict[str, dict[str, Tensor]]], way: str) -> None:
    for got, want in zip(processes, run_threads(4, MESH, sent), strict=True):
        assert got[way].keys() == want.keys()
        for name, y in want.items():
            assert got[way][name].dtype == y.dtype, name
            assert torch.equal(*map(collectives.as_bytes, (got[way][name].contiguous(), y.contiguous()))), name


def test_nccl_as_it_is_staged_here_refuses_them(processes: list[dict[str, dict[str, Any]]]) -> None:
    assert [one["as they are"] for one in processes] == ["Unconvertible NCCL type torch.int16"] * 4


def test_a_sum_that_no_wider_dtype_has_is_refused_by_name(processes: list[dict[str, dict[str, Any]]]) -> None:
    assert "strict cannot reduce torch.float8_e4m3fn" in processes[0]["sum of eight bits"]


# ---- the processes


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if isinstance(x, Tensor) and x.dtype not in (CUDA.transport.dtypes or ()) and not x.is_complex():
                raise RuntimeError(f"Unconvertible NCCL type {x.dtype}")
        return function(*args, **kwargs)

    return call


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _strict() -> dict[str, Any]:
    for name in ("all_reduce", "broadcast", "all_to_all_single", "P2POp"):
        setattr(dist, name, _refusing(getattr(dist, name)))
    for name in ("ALL_GATHER", "REDUCE_SCATTER"):
        setattr(collectives, name, _refusing(getattr(collectives, name)))
    comm, bare = TorchComm(MESH), TorchComm(MESH)
    assert (comm.transport, comm.in_order) == (STRICT, True)
    bare.transport = replace(STRICT, dtypes=None)
    int16, eight = torch.ones(4, dtype=torch.int16), torch.ones(4).to(torch.float8_e4m3fn)
    said = _refused(lambda: bare.all_reduce(int16, "a"))
    return {
        "as they are": said[said.find("Unconvertible") :],
        "sum of eight bits": _refused(lambda: comm.all_reduce(eight, "a")),
        "by NCCL's dtypes": sent(comm),
    }


def _join(backend: str, folder: Path) -> None:
    rank, store = int(os.environ["RANK"]), dist.FileStore(str(folder / backend), 4)
    dist.init_process_group(backend, store=store, rank=rank, world_size=4)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    _join("gloo", out)
    native = TorchComm(MESH)
    native.gloo = False  # Gloo's own collectives, not those made of messages
    results: dict[str, Any] = {"by messages": sent(TorchComm(MESH)), "by Gloo's dtypes": sent(native)}
    dist.destroy_process_group()
    dist.Backend.register_backend("strict", lambda *place: dist.ProcessGroupGloo(*place), devices=["cpu"])
    register_backend(replace(HOST, transport=STRICT))
    _join("strict", out)
    torch.save(results | _strict(), out / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
