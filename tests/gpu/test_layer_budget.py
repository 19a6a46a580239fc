"""Budgets of one bf16 Llama layer, forward and backward, on a simulated GPU: kernels that are launched, and bytes that they move.

A layer is what a model of three has more than a model of two, without the update of its parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.played.meta_comm import MetaComm
from autopar.runtime.compiled import inductor
from autopar.runtime.program.run_options import RunOptions
from autopar.runtime.program.tables import world_mesh
from autopar.runtime.step import session
from tests.gpu.fake_cuda import H100, fake_cuda
from tests.gpu.inductor_kernels import NO_KERNELS, RegionKernels, graph_kernels, region_kernels
from tests.gpu.simulated import simulated
from tests.gpu.simulation.budgets import LAUNCH, Asked
from tests.gpu.torchs_layer import torchs_graphs
from tests.zoo.models import ADAMW, BY_NAME
from tests.zoo.transformers import Llama, LlamaBlock

LLAMA = BY_NAME["llama"]
EAGER_LAUNCHES = 90
COMPILED_LAUNCHES = 60


SMALL, WIDE = "64 wide", "1024 wide"
SIZES = [SMALL, pytest.param(WIDE, marks=pytest.mark.slow)]


def block(size: str) -> LlamaBlock:
    """A layer: the zoo's, or one whose activations are most of the bytes that it moves."""
    with torch.device("cpu" if size == SMALL else "meta"):
        return LlamaBlock(64, 8, 4, 96) if size == SMALL else LlamaBlock(1024, 8, 4, 2816)


def batch(size: str) -> tuple[Tensor, Tensor]:
    """Ids, which are the labels too."""
    return LLAMA.batch() if size == SMALL else (torch.zeros(4, 2048, dtype=torch.long, device="meta"),) * 2


@functools.cache
def model_of(
    layers: int, microbatches: int, device: str | autopar.DeviceSpec = "h100", size: str = SMALL
) -> autopar.ParallelProgram:
    """A step of a Llama of so many layers on one GPU."""
    with torch.device("cpu" if size == SMALL else "meta"):
        model = Llama() if size == SMALL else Llama(1024, 2048, 1024)
    model.blocks = nn.ModuleList(block(size) for _ in range(layers))
    options = autopar.Options(precision="bf16", pp=1, microbatches=microbatches, guards=False)
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device=device)
    return autopar.compile(model, cluster, batch(size), optimizer=ADAMW, options=options)


def launched(layers: int, microbatches: int, size: str = SMALL) -> list[Asked]:
    """The kernels of a step before the update."""
    (budget,) = simulated(model_of(layers, microbatches, size=size), batch(size)).budgets
    return [one for one in budget.of(LAUNCH, 2) if one.action != "update"]


def by_op(kernels: list[Asked]) -> tuple[Counter[str], Counter[str]]:
    """How often each op is launched, and the bytes that it moves."""
    times, moved = Counter[str](), Counter[str]()
    for one in kernels:
        op = "stored" if one.op == "_to_copy" and "grads.py" in one.place.line else one.op
        times[op] += 1
        moved[op] += one.nbytes
    return times, moved


@functools.cache
def layer(microbatches: int, size: str = SMALL) -> tuple[Counter[str], Counter[str]]:
    """Launches and bytes of a layer by op; those of the gradient store's casts are "stored"."""
    less, more = (by_op(launched(layers, microbatches, size)) for layers in (2, 3))
    return more[0] - less[0], more[1] - less[1]


def table(microbatches: int) -> str:
    """Launches and bytes of a layer, an op a line."""
    times, moved = layer(microbatches)
    lines = [f"{times[op]:5} {moved[op]:10,}  {op}" for op in sorted(moved, key=lambda op: -moved[op])]
    return "\n".join([*lines, f"{sum(times.values()):5} {sum(moved.values()):10,}  in all"])


def test_a_layer_written_out_launches_few_kernels() -> None:
    times, _ = layer(1)
    assert sum(times.values()) <= EAGER_LAUNCHES, table(1)
    assert times["mm"] == 7 + 14
    assert times["_scaled_dot_product_cudnn_attention"] == times["_scaled_dot_product_cudnn_attention_backward"] == 1


@pytest.mark.slow
def test_a_microbatch_more_casts_no_parameter_and_no_gradient() -> None:
    """Norms, the results of rotary embeddings, and nothing else: 16 casts. Gradients are added to their sums in float32 as they
    come."""
    more = layer(4)[0] - layer(2)[0]
    assert more["_to_copy"] == 2 * 16, table(4)
    assert more["add_"] == 2 * 9, table(4)
    assert sum(more.values()) <= 2 * EAGER_LAUNCHES, table(4)


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_parameters_are_cast_by_one_kernel_a_step(microbatches: int) -> None:
    times = by_op(launched(3, microbatches))[0]
    assert times["_foreach_copy_"] == 1


@functools.cache
def regions_of(size: str) -> dict[str, RegionKernels]:
    """The kernels of the regions of a layer by function: what a session with a compiler has met after a step."""
    program = model_of(2, 1, size=size)
    modules = replace(program.in_process, options=RunOptions(compiler="inductor"))
    compiles = mock.patch.object(inductor, "_has_triton", return_value=True), mock.patch.object(session, "compile_met")
    with compiles[0], compiles[1], fake_cuda(H100):
        own = modules.session(MetaComm(world_mesh(modules.pipeline), 0, "cuda"), program.request.update, 0)
        own.train_step([torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in program.leaves(batch(size))])
    (stage,) = own.stages.values()
    return {r.where.partition(" ")[0]: region_kernels(r) for r in stage.regions if r.where.startswith("blocks_")}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_compiled_layer_is_two_regions_of_few_kernels(size: str) -> None:
    """Kernels are those that inductor's scheduler makes for an H100. Outside the regions gradients of seven weights are cast."""
    regions = regions_of(size)
    assert regions.keys() == {"blocks_forward", "blocks_backward"}
    made = sum(regions.values(), NO_KERNELS)
    assert {name: made.names[name] for name in made.names if "mm" in name} == {"extern_kernels.mm": 7 + 14}, made.names
    assert layer(1, size)[0]["stored"] == 9 - 2
    assert made.launches + layer(1, size)[0]["stored"] <= COMPILED_LAUNCHES, made.names


@functools.cache
def billed(layers: int, size: str) -> tuple[float, float]:
    """Bytes of a step's bill before the update, its ops one by one and with neighbours as one kernel: those of a GPU on which
    nothing but memory takes time."""
    gpu = autopar.ClusterSpec.homogeneous(devices=1, device="h100").device(0)
    endless = replace(gpu, peak_flops=dict.fromkeys(gpu.peak_flops, 1e40), launch_overhead_s=0.0)
    program = model_of(layers, 1, endless, size)
    (stage,) = program.account.stages
    works = [(times, work) for call, times in stage.bill.calls for work in call.works]
    apart_s, fused_s = (
        sum(times * (work.computed_s + passes(work)) for times, work in works) + stage.bill.rest_s
        for passes in (lambda work: work.apart_s, lambda work: work.fused_s)
    )
    rate = gpu.memory_bandwidth_Bps * gpu.curve.memory
    return apart_s * rate, fused_s * rate


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_bill_and_the_bill_is_torch_compiles(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes of a layer: simulated as it is written and as inductor fuses it, listed by the bill for both, and of the layer as
    torch.compile has it."""
    bill, fused_bill = (more - less for less, more in zip(billed(2, size), billed(3, size), strict=True))
    moved = layer(1, size)[1]
    written = sum(moved.values())
    compiled = sum(regions_of(size).values(), NO_KERNELS).nbytes + moved["_foreach_copy_"] + moved["stored"]
    x = torch.empty(*batch(size)[0].shape, block(size).attention_norm.normalized_shape[0], dtype=torch.bfloat16)
    tables = torch.empty(x.shape[1], block(size).attention.head_dim)
    torchs = sum(map(graph_kernels, torchs_graphs(block(size), x, tables, tables)), NO_KERNELS)
    shown = (
        f"{size}: written {written:,} bytes, billed {bill:,.0f}; compiled {compiled:,}, billed {fused_bill:,.0f}; "
        f"torch.compile {torchs.nbytes:,} in {torchs.launches} kernels"
    )
    with capsys.disabled():
        print(f"\n{shown}")
    assert written <= 1.05 * bill, shown
    assert compiled <= 1.05 * fused_bill, shown
    assert fused_bill <= 1.10 * torchs.nbytes, shown


if __name__ == "__main__":
    print(table(1))
    for name, made in regions_of(SMALL).items():
        print(name, made)
