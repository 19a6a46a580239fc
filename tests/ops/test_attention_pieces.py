"""The work that attention in pieces is said to do beside its scores, against what the runtime does: every pass counted
as it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cluster.device import device_preset
from autopar.cluster.kernels import KernelTimes, Product
from autopar.costmodel.compute import merging_time_s
from autopar.ir.call import OpCall, Operand
from autopar.ir.types import TensorType
from autopar.ops.attention_pieces import merged
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.kernels.attention import attention as runtime

Tensor = torch.Tensor
RANKS, HEADS = 4, 4
MOVES = ("aten.copy_.default", "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
"""The ops of messages, and those that allocate."""


class Counted(TorchDispatchMode):
    """Kernels of attention, and passes over memory beside them with the bytes that they read and write, of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.passes, self.moved_bytes = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "flash_attention" in str(func):
            self.kernels += 1
        elif not func.is_view and str(func) not in MOVES:
            self.passes += 1
            read = () if "zeros_like" in str(func) else tree_leaves(args)
            tensors = [t for t in (*read, *tree_leaves(result)) if isinstance(t, Tensor)]
            self.moved_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def of_last_rank(rows: int, width: int, causal: bool, order: int, ring: bool, backward: bool) -> Counted:
    """Counted on the last of RANKS ranks, each with as many rows, and with its keys or all."""

    def rank(comm: Comm) -> Counted:
        block, keys = (1, HEADS, rows // RANKS, width), rows // RANKS if ring else rows
        q, g, out = (torch.randn(block) for _ in range(3))
        k, v = torch.randn(1, HEADS, keys, width), torch.randn(1, HEADS, keys, width)
        lse = torch.randn(block[:3])
        place: dict[str, Any] = {"along": Along(comm, "cp")} if ring else {}
        place["offsets"] = (0, 0, comm.rank * rows // RANKS, 0)
        config = (None, 0.0, causal, 1.0, order)
        counted = Counted()
        with counted:
            if backward:
                runtime.attention_grad(g, q, k, v, None, out, lse, *config[1:], **place)
            else:
                runtime.attention(q, k, v, *config, **place)
        return counted

    return run_threads(RANKS, {"cp": RANKS}, rank)[-1]


def call_of(rows: int, width: int, causal: bool, order: int, backward: bool) -> OpCall:
    q = TensorType((1, HEADS, rows, width), torch.float32)
    lse = TensorType(q.shape[:3], q.dtype)
    read = {"g": q, "q": q, "k": q, "v": q, "out": q, "lse": lse} if backward else {"q": q, "k": q, "v": q}
    arguments: dict[str, Any] = {name: Operand(i) for i, name in enumerate(read)}
    arguments |= {"mask": None, "p": 0.0, "causal": causal, "scale": 1.0, "site": -1, "order": order}
    made = (q, q, q) if backward else (q, lse)
    return OpCall(f"autopar.attention{'_grad' if backward else ''}", arguments, tuple(read.values()), made)


@pytest.mark.few(8)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(512, 8), (4096, 32)])
@pytest.mark.parametrize(
    ("causal", "order", "ring"), [(False, 0, True), (True, 0, True), (True, 4, True), (True, 0, False)]
)
def test_pieces_and_passes_are_those_that_run(
    causal: bool, order: int, ring: bool, rows: int, width: int, backward: bool
) -> None:
    said = merged(call_of(rows, width, causal, order, backward), {"s": RANKS, "t": RANKS if ring else 1})
    ran = of_last_rank(rows, width, causal, order, ring, backward)
    assert said is not None
    assert said.kernels == ran.kernels
    assert said.passes == pytest.approx(ran.passes, rel=0.15)
    assert said.moved_bytes == pytest.approx(ran.moved_bytes, rel=0.1)


@pytest.mark.parametrize(("causal", "parts"), [(False, {"s": 4}), (True, {"h": 4}), (False, {})])
def test_one_piece_is_not_merged(causal: bool, parts: dict[str, int]) -> None:
    assert merged(call_of(512, 8, causal, 0, False), parts) is None


def test_merging_is_passes_and_a_launch_for_every_further_kernel() -> None:
    device = device_preset("cpu")
    plain_s = merging_time_s(device, "autopar.attention", 3, 10, 1e6)
    launches_s = 12 * device.launch_overhead_s
    assert plain_s == pytest.approx(launches_s + 1e6 / (device.memory_bandwidth_Bps * device.curve.memory))
    kernels = KernelTimes({"copy": ((0.0, 1e-6), (1e6, 1e-3))}, {"autopar.attention": Product(1e-4, 1e11, 0.0)})
    measured = replace(device, kernels=kernels)
    assert merging_time_s(measured, "autopar.attention", 3, 10, 1e6) == pytest.approx(
        2e-4 + 10 * (1e-6 + 1e5 * 9.99e-10)
    )
