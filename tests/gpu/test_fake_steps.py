"""Training steps of emitted programs on fake CUDA tensors: every line is given what it takes, by the kernels of the device.

Nothing is computed: shapes, dtypes and devices are those that a GPU would see, and a kernel that does not take them, or that
has another signature, is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.passes.played.meta_comm import MetaComm
from autopar.runtime.comm.devices import Device
from autopar.runtime.program.run_options import RunOptions
from autopar.runtime.program.tables import world_mesh
from autopar.runtime.step.step_record import StepRecord, difference
from tests.gpu.fake_cuda import A100, H100, fake_cuda
from tests.proof.precise import without_dropout
from tests.zoo.models import ADAMW, BY_NAME
from tests.zoo.programs import compiled_zoo

NAMES = ("gpt2", "llama", "bert", "vit", "resnet", "t5")


class Calls(TorchDispatchMode):
    """The ops that a program runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@functools.cache
def compiled(name: str, ranks: int, precision: str | None, model: nn.Module | None = None) -> autopar.Program:
    zoo = BY_NAME[name]
    options = autopar.Options(precision=precision, pp=1, microbatches=1, coupled="per-microbatch", guards=False)
    cluster = autopar.ClusterSpec.homogeneous(devices=ranks, device="h100")
    model = zoo.make() if model is None else model
    return compiled_zoo(zoo, cluster, model=model, optimizer=ADAMW, options=options)  # torch cannot fake the fused SGD


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_records_of_steps_on_fake_gpus_are_equal_and_hold_nothing_that_a_graph_cannot(
    name: str, precision: str | None
) -> None:
    """The records say so as far as calls go: that a GPU captures their kernels is for a GPU to show."""
    zoo = BY_NAME[name]
    program = compiled(name, 1, precision, without_dropout(zoo.make()))
    with fake_cuda(H100):
        comm = MetaComm(world_mesh(program.in_process.pipeline), 0, "cuda")
        modules = dataclasses.replace(program.in_process, options=RunOptions(compiler="none"))
        session = modules.session(comm, program.request.update, program.options.seed)
        batch = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in program.leaves(zoo.batch())]
        session.train_step(batch)
        parts = {(stage.index, 0): stage.inputs(batch, 0) for stage in session.stages.values()}
        resting = (session.rt.params, session.rt.narrow, session.rt.buffers)
        at_rest = [*itertools.chain(*(held.values() for held in resting), *parts.values())]
        records = [StepRecord(at_rest, [vars(stage.module) for stage in session.stages.values()]) for _ in range(2)]
        for record in records:
            with record:
                session._compute(session.forms[0], lambda stage, microbatch: list(parts[stage.index, microbatch]))
    assert len(records[0].calls) > 100
    assert [record.refused for record in records] == ["", ""]
    assert difference(records[0].calls, records[1].calls) == ""


def fake_step(
    name: str, ranks: int, precision: str | None, device: Device
) -> tuple[set[str], dict[str, Tensor], Tensor]:
    """The ops of a step on a rank, the gradients and the loss."""
    program = compiled(name, ranks, precision)
    modules = dataclasses.replace(program.in_process, options=RunOptions(compiler="none"))
    leaves = program.leaves(BY_NAME[name].batch())
    with fake_cuda(device):
        comm = MetaComm(world_mesh(modules.pipeline), 0, "cuda")
        session = modules.session(comm, program.request.update, program.options.seed)
        batch = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in leaves]
        with Calls() as calls:
            loss = session.train_step(batch)
        return calls.names, dict(session.grads), loss


@pytest.mark.few(2)
@pytest.mark.parametrize(("ranks", "precision"), [(1, None), (2, "bf16")])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_runs_on_fake_gpus(name: str, ranks: int, precision: str | None) -> None:
    names, grads, loss = fake_step(name, ranks, precision, H100)
    assert loss.device.type == "cuda"
    assert loss.numel() == 1
    assert grads
    assert {grad.device.type for grad in grads.values()} == {"cuda"}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert not any(op.endswith("_for_cpu") for op in names)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("precision", "device", "kernel"), [(None, H100, "efficient"), ("bf16", A100, "flash"), ("bf16", H100, "cudnn")]
)
def test_attention_is_the_kernel_of_the_device(precision: str | None, device: Device, kernel: str) -> None:
    names = fake_step("llama", 1, precision, device)[0]
    assert {f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"} <= names


def test_norms_are_one_kernel() -> None:
    assert "_fused_rms_norm_backward" in fake_step("llama", 1, "bf16", H100)[0]
    assert {"native_layer_norm", "native_layer_norm_backward"} <= fake_step("gpt2", 1, None, H100)[0]


def test_the_update_is_one_kernel() -> None:
    names = fake_step("llama", 1, None, H100)[0]
    assert {name for name in names if "adam" in name} == {"_fused_adamw_"}
    assert not any(name.startswith("_foreach") for name in names - {"_foreach_add_"})  # which counts steps
