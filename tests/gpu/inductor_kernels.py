"""The kernels that torch's inductor makes of a region for a GPU, found without one: the region is lowered for fake CUDA tensors,
and the scheduler is asked what it fused. Nothing is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _triton

from autopar.runtime.comm.devices import standing_for
from autopar.runtime.compiled.inductor import CompiledRegion
from tests.gpu.fake_cuda import H100

PROPERTIES = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
"""An H100, as inductor sees it."""


@dataclass(frozen=True)
class RegionKernels:
    """The kernels of a region by name, and the bytes that they read and write as inductor counts them."""

    names: Counter[str]
    nbytes: int

    def __add__(self, other: RegionKernels) -> RegionKernels:
        return RegionKernels(self.names + other.names, self.nbytes + other.nbytes)

    @property
    def launches(self) -> int:
        """How many there are."""
        return sum(self.names.values())


NO_KERNELS = RegionKernels(Counter(), 0)


class _Found(Exception):
    """Lowering is over: what was asked for is known."""


def region_kernels(region: CompiledRegion) -> RegionKernels:
    """The kernels of a region for the arguments that it was met with, each form of them once."""
    total = NO_KERNELS
    for form in list(region.met):
        with _counting() as found, mock.patch.object(region, "_give_up"):
            region.start(form)
        total += found[0]
    return total


def graph_kernels(graph: GraphModule) -> RegionKernels:
    """The kernels of a graph, by the values that its placeholders say."""
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with FakeTensorMode():
        tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in given]
    with _counting() as found, suppress(InductorError):
        torch._inductor.compile(graph, tensors)
    return found[0]


@contextmanager
def _counting() -> Iterator[list[RegionKernels]]:
    """Inside, what is lowered is counted, and not compiled."""
    found: list[RegionKernels] = []

    def count(graph: GraphLowering) -> Any:
        graph._update_scheduler()
        names = (_name(node) for node in graph.scheduler.nodes)
        found.append(RegionKernels(Counter(name for name in names if name), int(graph.count_bytes()[0])))
        raise _Found

    with _lowering(), mock.patch.object(GraphLowering, "compile_to_module", count):
        yield found


def _name(node: Any) -> str:
    """The op of a kernel that inductor calls, "triton" for one of its own, "" for what is none."""
    if node.is_extern():
        kernel = getattr(node.node, "python_kernel_name", None) or getattr(node.node, "op_overload", None)
        made = type(node.node).__name__ not in ("MultiOutput", "ReinterpretView")
        return str(kernel or type(node.node).__name__).rpartition("aten.")[2] if made else ""
    return "" if type(node).__name__ == "NopKernelSchedulerNode" else "triton"


@contextmanager
def _lowering() -> Iterator[None]:
    """Inside, torch without CUDA lowers for a GPU: facts of an H100 are known, and nothing is run to find out more."""
    with ExitStack() as stack:
        stack.enter_context(standing_for(H100))
        facts = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 << 30, gcnArchName="")
        told = {"current_device": 0, "device_count": 1, "get_device_capability": (9, 0), "get_device_properties": facts}
        for name, value in told.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=PROPERTIES))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", return_value=""))
        stack.enter_context(mock.patch.object(compile_fx, "_check_triton_bf16_support"))
        for module, name in ((misc_patterns, "_misc_patterns"), (pad_mm, "_pad_mm"), (fuse_attention, "_sfdp")):
            stack.enter_context(mock.patch.object(module, f"{name}_init"))
        stack.enter_context(config.patch(joint_graph_constant_folding=False, force_disable_caches=True))
        yield
