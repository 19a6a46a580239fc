"""Emitted programs of the zoo on simulated GPUs: no races, no memory given back early, every message met."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.cluster.tiers import Tier
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.devices import Device
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.comm.recorder import Recorder
from autopar.runtime.kernels.experts import experts
from autopar.runtime.kernels.overflow import Overflows
from autopar.runtime.memory.host_copy import HostCopy
from autopar.runtime.step import same_data
from autopar.runtime.step.same_data import SameData
from autopar.runtime.step.session import Session
from tests.gpu.fake_cuda import A100, H100
from tests.gpu.simulated import Simulated, on_ranks, simulated
from tests.gpu.simulation.budgets import COPY, LATE, LAUNCH, MESSAGE, SYNC, Budget
from tests.gpu.simulation.device import Machine
from tests.ops.rings import with_attention
from tests.passes.lower.test_overlap_experts import batch as mixture_batch
from tests.passes.lower.test_overlap_experts import model as mixture_model
from tests.passes.lower.test_overlap_experts import program as mixture
from tests.proof.precise import without_dropout
from tests.zoo.models import BY_NAME, MODELS, SGD, ZooModel
from tests.zoo.programs import compiled_zoo


@dataclass(frozen=True)
class Case:
    """Options of a program on so many ranks, and what else compile is told. steps: that are simulated; tiers: of the cluster,
    by default the usual ones."""

    ranks: int
    options: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    tiers: tuple[Tier, ...] = ()


CLIPPED: dict[str, Any] = {"clip_grad_norm": 1.0}
SCALED: dict[str, Any] = {"loss_scaling": True}
CASES = {
    "dp": Case(2, {"strategy": "dp"}),
    "dp4, bf16, microbatches": Case(4, {"strategy": "dp", "precision": "bf16", "microbatches": 2}),
    "zero1": Case(2, {"strategy": "zero1"}),
    "zero3": Case(2, {"strategy": "zero3", "microbatches": 2}),
    "tp": Case(2, {"strategy": "megatron"}),
    "dp2×tp2": Case(4, {"strategy": "megatron-zero3", "mesh": {"dp": 2, "tp": 2}}),
    "1f1b": Case(2, {"pp": 2, "schedule": "1f1b", "microbatches": 4}),
    "zb-h1": Case(2, {"pp": 2, "schedule": "zb-h1", "microbatches": 4}),
    "zb-v": Case(2, {"pp": 2, "schedule": "zb-v", "microbatches": 4}),
    "1f1b×dp2": Case(4, {"pp": 2, "schedule": "1f1b", "microbatches": 4, "strategy": "zero1"}),
    "bf16 gradients": Case(2, {"strategy": "dp", "gradient_compression": "bf16"}),
    "int8 gradients": Case(2, {"strategy": "zero1", "gradient_compression": "int8"}),
    "clipped": Case(2, {"strategy": "zero1"}, CLIPPED),
    "scaled": Case(2, {"strategy": "zero1", "precision": "fp16"}, SCALED),
    "optimizer offloaded": Case(2, {"strategy": "zero1", "offload": "optimizer"}),
    "activations offloaded": Case(2, {"strategy": "dp", "offload": "activations", "microbatches": 2}),
    "parameters offloaded": Case(2, {"strategy": "zero3", "offload": "parameters", "microbatches": 2}),
    "all offloaded": Case(2, {"strategy": "dp", "offload": "all", "microbatches": 2}),
    "all offloaded, zero3": Case(2, {"strategy": "zero3", "offload": "all"}),
    "all offloaded, 1f1b": Case(2, {"pp": 2, "schedule": "1f1b", "microbatches": 4, "offload": "all"}),
    "all offloaded, files": Case(2, {"strategy": "zero3", "offload": "all"}, tiers=(Tier("nvme", 1e12, 5e9),)),
    "all offloaded, compensated": Case(
        2, {"strategy": "dp", "offload": "all", "compensated_sums": True, "microbatches": 4}
    ),
    "optimizer offloaded, clipped": Case(2, {"strategy": "zero1", "offload": "optimizer"}, CLIPPED),
    "cuda graphs": Case(1, {"cuda_graphs": True}, steps=5),
}
NOT_ARRIVED = {
    "parameters offloaded, clipped": Case(2, {"strategy": "zero3", "offload": "parameters"}, CLIPPED),
    "all offloaded, clipped": Case(2, {"strategy": "dp", "offload": "all"}, CLIPPED),
    "all offloaded, scaled": Case(2, {"strategy": "dp", "offload": "all", "precision": "fp16"}, SCALED),
}
OTHERS = MODELS[1:]
RECURRENT = [zoo for zoo in MODELS if "recurrent" in zoo.tags]


@functools.cache
def compiled(zoo: ZooModel, options: str) -> autopar.Program:
    case = (CASES | NOT_ARRIVED)[options]
    cluster = autopar.ClusterSpec.homogeneous(devices=case.ranks, device="h100").with_tiers(*case.tiers)
    asked = dict(case.asked)
    if case.options.get("cuda_graphs"):
        asked["model"] = without_dropout(zoo.make())
    return compiled_zoo(zoo, cluster, options=autopar.Options(coupled="per-microbatch", **case.options), **asked)


def simulate(zoo: ZooModel, options: str, body: Callable[[Session], Any] | None = None) -> Simulated:
    try:
        program = compiled(zoo, options)
    except autopar.AutoparError as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    return simulated(program, zoo.batch(), (CASES | NOT_ARRIVED)[options].steps, body)


def assert_the_host_runs_ahead(found: Simulated, options: str) -> None:
    """From the second step on the host waits for the step before alone: its loss, norm and guards. Under loss scaling it also
    asks whether a gradient overflowed, what goes to files passes through its hands, and a graph is captured in the third step."""
    step, scaled = CASES[options].steps, options == "scaled"
    for budget in found.budgets:
        waits = budget.by_place(SYNC, step)
        assert sum(waits.values()) == scaled or all("memory/" in place for place in waits if "files" in options), waits
        assert budget.of(LATE, step)


@pytest.mark.few(4)
@pytest.mark.parametrize("options", CASES)
def test_a_small_program_is_in_order(options: str) -> None:
    found = simulate(BY_NAME["mlp"], options)
    assert not found.findings, str(found)
    assert_the_host_runs_ahead(found, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("zoo", OTHERS, ids=str)
def test_a_program_is_in_order(zoo: ZooModel, options: str) -> None:
    found = simulate(zoo, options)
    assert not found.findings, str(found)
    assert_the_host_runs_ahead(found, options)


@pytest.mark.slow
def test_rows_of_a_mixture_travel_in_order() -> None:
    """Every rank's 32 pairs choose 8 experts evenly, which is what the host reads."""
    found = simulated(mixture("any"), mixture_batch(), answer=lambda told: 4 if is_counts(told) else 0)
    assert not found.findings, str(found)
    assert any(unit.kind == "alltoall_base" for unit in found.logs[0].units)


@pytest.mark.few(1)
@pytest.mark.parametrize("device", [H100, A100], ids=["sm90", "sm80"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("choice", ["+t0+e", "e", "t0"])
def test_the_host_of_a_mixture_waits_once_before_the_update(choice: str, precision: str | None, device: Device) -> None:
    """Only where rows may have no room does it ask whether they had."""
    overlap = "any" if choice == "+t0+e" else ""
    found = simulated(mixture(overlap, False, "stop", precision, choice), mixture_batch(), device=device)
    assert not found.findings, str(found)
    for budget in found.budgets:
        waits = budget.of(SYNC, 2)
        assert [one.op for one in waits] == (["synchronize an event"] if choice != "t0" else [])
        assert {one.action for one in waits} <= {"gradients"}
        assert told_in(budget) == ["F0.0"] * len(waits)  # behind it the device has backward to do


def told_in(budget: Budget) -> list[str]:
    """The actions behind which the most rows that have no room, a number of 8 bytes, set out to the host."""
    return [one.action for one in budget.of(COPY, 2) if (one.op, one.nbytes) == ("copy_", 16)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_rows_of_a_pipelines_mixtures_are_told_of_when_all_is_computed(schedule: str) -> None:
    """Rows travel in the first of two stages, or in both."""
    options = autopar.Options(mesh={"ep": 2}, pp=2, schedule=schedule, microbatches=2, on_overflow="stop")
    made = autopar.compile(
        mixture_model(), autopar.ClusterSpec.local(4), mixture_batch(), optimizer=SGD, options=options
    )
    plans = (autopar.random_plan(made, seed) for seed in range(40))
    plan = next(plan for plan in plans if len(plan.stages) == 2 and "+t0+e" in plan.to_json())
    found = simulated(made.with_plan(plan), mixture_batch())
    assert not found.findings, str(found)
    for budget in found.budgets:
        assert [one.action for one in budget.of(SYNC, 2)] == ["gradients"]
        assert [action[:2] for action in told_in(budget)] == ["W1"]


@pytest.mark.few(1)
@pytest.mark.parametrize("backward", [False, True])
def test_rows_that_go_to_nodes_first_are_never_counted_by_the_host(backward: bool) -> None:
    def rank(_: int, machine: Machine) -> None:
        comm = TorchComm({"dp": 2, "ep": 2}, "cuda")
        x, w_in, w_out = (torch.empty(shape, device="cuda") for shape in ((32, 8), (2, 8, 2, 4), (2, 4, 8)))
        chosen, weights = torch.zeros(32, 2, dtype=torch.long, device="cuda"), torch.empty(32, 2, device="cuda")
        operands = (x, w_in, None, w_out, None, chosen, weights)
        told: dict[str, Any] = {"on_overflow": "stop", "along": Along(comm, "dp", "ep")}
        with Overflows(comm, True).noted():
            asked = len(machine.budget.asked)
            if backward:
                experts.experts_grad(x, *operands, True, "silu", 1.0, None, 0.0, **told)
            else:
                experts.experts(*operands, "silu", 1.0, None, 0.0, **told)
            assert not [one for one in machine.budget.asked[asked:] if one.kind == SYNC]

    found = on_ranks(4, rank)
    assert not found.findings, str(found)
    assert sum(unit.kind == "alltoall_base" for unit in found.logs[0].units) == (11 if backward else 6)


def is_counts(told: Tensor) -> bool:
    return told.dim() == 2 and not told.is_floating_point()


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "moe", "t5"])
def test_a_ring_of_attention_is_in_order(name: str, ranks: int) -> None:
    zoo = BY_NAME[name]
    options = autopar.Options(mesh={"cp": ranks}, microbatches=2, coupled="per-microbatch")
    found = simulated(with_attention(compiled_zoo(zoo, ranks, options=options), cp="+s+t"), zoo.batch())
    assert not found.findings, str(found)
    assert sum(unit.kind == "p2p" for unit in found.logs[0].units) >= 24


def test_a_captured_step_is_played() -> None:
    (budget,) = simulate(BY_NAME["mlp"], "cuda graphs").budgets
    assert [step for step in range(1, 6) if any(one.op == "graph" for one in budget.of(LAUNCH, step))] == [3, 4, 5]


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_step_with_a_mixture_on_one_rank_is_played(precision: str | None) -> None:
    options = autopar.Options(cuda_graphs=True, precision=precision)
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device="h100")
    made = autopar.compile(mixture_model(), cluster, mixture_batch(), optimizer=SGD, options=options)
    found = simulated(made, mixture_batch(), steps=5)
    assert not found.findings, str(found)
    (budget,) = found.budgets
    assert [step for step in range(1, 6) if any(one.op == "graph" for one in budget.of(LAUNCH, step))] == [3, 4, 5]


def test_steps_that_are_recorded_are_in_order() -> None:
    def recorded(session: Session) -> None:
        session.recorder = Recorder(session.comm.device)

    zoo = BY_NAME["mlp"]
    found = simulated(compiled(zoo, "1f1b"), zoo.batch(), before=recorded)
    assert not found.findings, str(found)


def test_steps_that_may_be_left_out_are_in_order() -> None:
    zoo = BY_NAME["resnet"]
    found = simulated(compiled(zoo, "dp"), zoo.batch(), before=lambda session: session.skip_not_finite())
    assert not found.findings, str(found)


def read_on_the_host(start: int, tensors: Any, parts: Sequence[Tensor]) -> int:
    for part in parts:
        part.clone()
    return 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_compared_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_data, "_folded", read_on_the_host)

    def rank(*_: Any) -> None:
        same = SameData(TorchComm({"dp": 2}, "cuda"))
        for step in range(1, 9):
            batch = torch.ones(16, device=device)
            same.take([batch], step)
            batch.add_(1)
        same.settle("saving", 9)

    found = on_ranks(2, rank)
    assert not found.findings, str(found)


# ---- the host


@pytest.mark.parametrize(
    ("name", "numbers", "steps"),
    [("recommender", 2, 12), *(pytest.param("bert", 3, n, marks=pytest.mark.slow) for n in (3, 12))],
)
def test_the_host_waits_one_step_late_for_the_loss_the_norm_and_the_guards(name: str, numbers: int, steps: int) -> None:
    """numbers: of a step, those of guards among them where the model has any. Every tenth step looks at parameters and gradients
    too, which is two numbers more."""
    zoo = BY_NAME[name]
    found = simulated(compiled(zoo, "clipped"), zoo.batch(), steps=steps)
    wanted = {1: [0, 0], 2: [0, numbers], 3: [0, numbers], 11: [0, numbers + 2], 12: [0, numbers]}
    for budget in found.budgets:
        waits = {step: [len(budget.of(kind, step)) for kind in (SYNC, LATE)] for step in wanted if step <= steps}
        assert waits == {step: want for step, want in wanted.items() if step <= steps}


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["dp", "tp", "zero3", "1f1b", "dp4, bf16, microbatches"])
@pytest.mark.parametrize("name", ["moe", "lstm", "gru"])
def test_the_host_waits_for_neither_experts_nor_recurrent_layers(name: str, options: str) -> None:
    for budget in simulate(BY_NAME[name], options).budgets:
        assert not budget.of(SYNC, 2)


def test_what_a_pipeline_asks_for_is_counted_by_step_and_microbatch() -> None:
    zoo = BY_NAME["mlp"]
    for budget in simulated(compiled(zoo, "1f1b"), zoo.batch(), steps=3).budgets:
        for kind in (LAUNCH, COPY, MESSAGE, SYNC):
            assert budget.by_place(kind, 2) == budget.by_place(kind, 3)
        kernels = [len(budget.of(LAUNCH, 3, microbatch)) for microbatch in range(4)]
        assert len(set(kernels[1:])) == 1
        assert 0 < kernels[0] <= kernels[1]  # the first one's gradients are added to nothing
        assert sum(kernels) < len(budget.of(LAUNCH, 3))
        moved = sum(budget.bytes_of(LAUNCH, 3, microbatch) for microbatch in range(4))
        assert 0 < moved < budget.bytes_of(LAUNCH, 3)


# ---- faults that there were


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["dp", "1f1b"])
@pytest.mark.parametrize("zoo", RECURRENT, ids=str)
def test_recurrent_layers_can_be_differentiated(zoo: ZooModel, options: str) -> None:
    found = simulate(zoo, options)
    assert not found.findings, str(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", NOT_ARRIVED)
def test_gradients_in_memory_tiers_have_arrived_where_the_host_reads_them(options: str) -> None:
    found = simulate(BY_NAME["mlp"], options)
    assert not found.findings, str(found)


def copied(session: Session) -> None:
    """The state in memory of the host, as a saver takes it."""
    values = {n: e.value for n, e in session.state_entries().items() if isinstance(e.value, Tensor)}
    host = HostCopy(values)
    host.fill(values)
    for value in host.tensors.values():
        value.clone()


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["dp", "zero3", "1f1b"])
def test_state_is_copied_before_it_is_written_to_files(options: str) -> None:
    found = simulate(BY_NAME["mlp"], options, copied)
    assert not found.findings, str(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["optimizer offloaded", "all offloaded"])
def test_state_in_memory_tiers_has_arrived_where_it_is_saved(options: str) -> None:
    found = simulate(BY_NAME["mlp"], options, copied)
    assert not found.findings, str(found)
