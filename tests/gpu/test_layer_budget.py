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
from tests.zoo.programs import compiled_zoo

LLAMA = BY_NAME["llama"]
EAGER_LAUNCHES = 90
COMPILED_LAUNCHES = 60


@functools.cache
def model_of(layers: int, microbatches: int, device: str | autopar.DeviceSpec = "h100") -> autopar.ParallelProgram:
    """A step of a Llama of so many layers on one GPU."""
    model = LLAMA.make()
    model.blocks = model.blocks[:layers]
    options = autopar.Options(precision="bf16", pp=1, microbatches=microbatches, guards=False)
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device=device)
    return compiled_zoo(LLAMA, cluster, model=model, optimizer=ADAMW, options=options)


def launched(layers: int, microbatches: int) -> list[Asked]:
    """The kernels of a step before the update."""
    (budget,) = simulated(model_of(layers, microbatches), LLAMA.batch()).budgets
    return [one for one in budget.of(LAUNCH, 2) if one.action != "update"]


def by_op(kernels: list[Asked]) -> tuple[Counter[str], Counter[str]]:
    """How often each op is launched, and the bytes that it moves."""
    times, moved = Counter[str](), Counter[str]()
    for one in kernels:
        times[one.op] += 1
        moved[one.op] += one.nbytes
    return times, moved


@functools.cache
def layer(microbatches: int) -> tuple[Counter[str], Counter[str]]:
    """Launches and bytes of a layer by op."""
    less, more = (by_op(launched(layers, microbatches)) for layers in (2, 3))
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


def test_a_microbatch_more_casts_no_parameter_and_no_gradient() -> None:
    """Norms, the results of rotary embeddings, and nothing else: 16 casts. Gradients are added to their sums in float32 as they
    come."""
    more = layer(4)[0] - layer(2)[0]
    assert more["_to_copy"] == 2 * 16, table(4)
    assert more["add_"] == 2 * 9, table(4)
    assert sum(more.values()) <= 2 * EAGER_LAUNCHES, table(4)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_parameters_are_cast_by_one_kernel_a_step(microbatches: int) -> None:
    times = by_op(launched(3, microbatches))[0]
    assert times["_foreach_copy_"] == 1


@functools.cache
def regions_of(layers: int) -> dict[str, RegionKernels]:
    """The kernels of the regions of a layer by function: what a session with a compiler has met after a step."""
    program = model_of(layers, 1)
    modules = replace(program.in_process, options=RunOptions(compiler="inductor"))
    compiles = mock.patch.object(inductor, "_has_triton", return_value=True), mock.patch.object(session, "compile_met")
    with compiles[0], compiles[1], fake_cuda(H100):
        own = modules.session(MetaComm(world_mesh(modules.pipeline), 0, "cuda"), program.request.update, 0)
        own.train_step([torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in program.leaves(LLAMA.batch())])
    (stage,) = own.stages.values()
    return {r.where.partition(" ")[0]: region_kernels(r) for r in stage.regions if r.where.startswith("blocks_")}


def test_a_compiled_layer_is_two_regions_of_few_kernels() -> None:
    """Kernels are those that inductor's scheduler makes for an H100. Outside the regions gradients of seven weights are cast."""
    regions = regions_of(2)
    assert regions.keys() == {"blocks_forward", "blocks_backward"}
    made = sum(regions.values(), NO_KERNELS)
    assert {name: made.names[name] for name in made.names if "mm" in name} == {"extern_kernels.mm": 7 + 14}, made.names
    outside = 9 - 2
    assert made.launches + outside <= COMPILED_LAUNCHES, made.names


@functools.cache
def billed(layers: int) -> tuple[float, float]:
    """Bytes of a step's bill before the update, its ops one by one and with neighbours as one kernel: those of a GPU on which
    nothing but memory takes time."""
    gpu = autopar.ClusterSpec.homogeneous(devices=1, device="h100").device(0)
    endless = replace(gpu, peak_flops=dict.fromkeys(gpu.peak_flops, 1e40), launch_overhead_s=0.0)
    program = model_of(layers, 1, endless)
    (stage,) = program.account.stages
    works = [(times, work) for call, times in stage.bill.calls for work in call.works]
    apart_s, fused_s = (
        sum(times * (work.computed_s + passes(work)) for times, work in works) + stage.bill.rest_s
        for passes in (lambda work: work.apart_s, lambda work: work.fused_s)
    )
    rate = gpu.memory_bandwidth_Bps * gpu.curve.memory
    return apart_s * rate, fused_s * rate


def test_bytes_are_those_of_the_bill_and_the_bill_is_torch_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of a layer: simulated as it is written and as inductor fuses it, listed by the bill for both, and of the layer as
    torch.compile has it."""
    bill, fused_bill = (more - less for less, more in zip(billed(2), billed(3), strict=True))
    written = sum(layer(1)[1].values())
    stored = sum(x.nbytes for x in launched(3, 1) if is_stored(x)) - sum(
        x.nbytes for x in launched(2, 1) if is_stored(x)
    )
    regions = sum(regions_of(2).values(), NO_KERNELS).nbytes + layer(1)[1]["_foreach_copy_"] + stored
    block = LLAMA.make().blocks[0]
    x, tables = torch.empty(8, 16, 64, dtype=torch.bfloat16), torch.empty(16, block.attention.head_dim)
    torchs = sum(map(graph_kernels, torchs_graphs(block, x, tables, tables)), NO_KERNELS)
    shown = (
        f"written {written:,} bytes, billed {bill:,.0f}; compiled {regions:,}, billed {fused_bill:,.0f}; "
        f"torch.compile {torchs.nbytes:,} in {torchs.launches} kernels"
    )
    with capsys.disabled():
        print(f"\n{shown}")
    assert written <= 1.05 * bill, shown
    assert regions <= 1.05 * fused_bill, shown
    assert fused_bill <= 1.10 * torchs.nbytes, shown


def is_stored(one: Asked) -> bool:
    """Whether a kernel is the gradient store's."""
    return "grads.py" in one.place.line


if __name__ == "__main__":
    print(table(1))
    for name, made in regions_of(2).items():
        print(name, made)
