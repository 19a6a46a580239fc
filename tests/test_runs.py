"""Parameters that rest in runs of elements: any sizes over any ranks train as one device does, hold what they should, and go from
checkpoint to checkpoint."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import ConstraintError, PlanError
from autopar.ir.resting import on_rank
from autopar.runtime.checkpoint import checkpoint
from tests.gpu.simulated import simulated
from tests.proof.test_offload import assert_kept, same
from tests.runs_worker import ADAMW, batch, compiled, full_state, model
from tests.test_other_ranks import NOTED, check_run, train_on
from tests.warm import torchrun
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.transformers import Gpt2

DATA = f"""import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.runs_worker import batch

def batches():
    for n in range(50):
        yield batch(seed=n)
"""


def equal_to_eager(program: autopar.ParallelProgram, rows: int = 60) -> None:
    result = autopar.verify(program, model(), batch(rows))
    assert result.ok
    assert result.max_error <= 1e-9


def in_runs(program: autopar.ParallelProgram) -> set[str]:
    return {n for stage in program.plan.stages for n, p in stage.parameters.items() if p.optimizer.run}


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
@pytest.mark.parametrize(("strategy", "microbatches"), [("zero1", 1), ("zero2", 4), ("zero3", 2)])
def test_what_divides_by_no_number_of_ranks_is_shared_by_all(ranks: int, strategy: str, microbatches: int) -> None:
    program = compiled(ranks, 12 * ranks, strategy=strategy, microbatches=microbatches)
    assert len(in_runs(program)) == 6
    equal_to_eager(program, 12 * ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_ranks_may_be_more_than_elements(strategy: str) -> None:
    """A bias of two elements on seven ranks: five of them hold a zero that fills the run up."""
    layers, x = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double(), batch(56)[0][:, :5].contiguous()
    program = autopar.compile(
        layers,
        autopar.ClusterSpec.local(7),
        (x, x[:, :2].contiguous()),
        loss_fn=nn.functional.mse_loss,
        optimizer=ADAMW,
        clip_grad_norm=0.1,
        options=autopar.Options(strategy=strategy, microbatches=2),
    )
    assert in_runs(program) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    result = autopar.verify(program, layers, (x, x[:, :2].contiguous()))
    assert result.ok
    assert result.max_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_the_zoo_equals_one_device_on_odd_numbers_of_ranks(zoo: ZooModel, strategy: str, ranks: int) -> None:
    """Every rank takes as many rows as the zoo's batch has for four."""
    rows = lambda *x: torch.cat(x)[: ranks * (len(x[0]) // 4)] if isinstance(x[0], torch.Tensor) else x[0]  # noqa: E731
    inputs = pytree.tree_map(rows, *(zoo.batch(seed) for seed in range(ranks)))
    program = autopar.compile(
        zoo.make(),
        autopar.ClusterSpec.local(ranks),
        inputs,
        loss_fn=zoo.loss_fn,
        optimizer=zoo.optimizer,
        options=autopar.Options(strategy=strategy),
    )
    result = autopar.verify(program, zoo.make(), inputs)
    assert result.ok
    assert result.max_error <= 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "tp": 3}, "strategy": "zero3"},
        {"mesh": {"dp": 3, "tp": 2}, "strategy": "megatron-zero3"},
        {"pp": 2, "strategy": "zero3"},
        {"pp": 2, "strategy": "zero1", "microbatches": 2, "schedule": "1f1b"},
    ],
)
def test_blocks_and_stages_may_rest_in_runs(options: dict[str, Any]) -> None:
    program = compiled(6, **options)
    assert in_runs(program)
    equal_to_eager(program)


@pytest.mark.few(2)
@pytest.mark.parametrize(("ranks", "mesh"), [(8, {"dp": 2, "tp": 4}), (4, {"dp": 2, "tp": 2}), (6, {"dp": 3, "tp": 2})])
@pytest.mark.parametrize("strategy", ["megatron-zero1", "megatron-zero2"])
def test_the_state_of_a_matrix_of_few_rows_is_a_run_of_its_columns(
    strategy: str, ranks: int, mesh: dict[str, int]
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 7))

    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    program = autopar.compile(
        net(),
        autopar.ClusterSpec.local(ranks),
        (x,),
        loss_fn=lambda y: y.square().mean(),
        optimizer=ADAMW,
        options=autopar.Options(mesh=mesh, strategy=strategy),
    )
    rests = program.plan.stages[0].parameters["2.weight"]
    assert (str(rests.storage), str(rests.optimizer)) == ("[., @tp]", "[., @tp] run(dp)")
    assert autopar.verify(program, net(), (x,)).max_error <= 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "update", [{"clip_grad_norm": 0.1}, {"clip_grad_norm": autopar.ClipNorm(0.1, float("inf"))}, {"loss_scaling": True}]
)
def test_norms_and_scales_do_not_see_what_fills_a_run_up(update: dict[str, Any]) -> None:
    batches = [batch(84, seed) for seed in range(3)]
    ours, one = (compiled(n, 84, update, strategy="zero3").run(batches) for n in (7, 1))
    for name, value in one.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=1e-9 * float(value.abs().max() + 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_memory_is_what_is_promised(strategy: str, offload: str | None) -> None:
    cluster = autopar.ClusterSpec.local(3).with_tiers()
    here = compiled(cluster, strategy=strategy, microbatches=2, offload="none")
    program = here if offload is None else compiled(cluster, strategy=strategy, microbatches=2, offload=offload)
    assert len(in_runs(program)) == 6
    assert_kept(program, batch())
    assert same(program.run([batch()] * 2), here.run([batch()] * 2))


@pytest.mark.few(1)
@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_compressed_gradients_of_runs_train(compression: str) -> None:
    cluster = autopar.ClusterSpec.local(3).with_tiers()
    program = compiled(cluster, strategy="zero3", gradient_compression=compression)
    assert_kept(program, batch())
    losses = program.run([batch()] * 8).losses
    exact = compiled(3, strategy="zero3").run([batch()] * 8).losses
    assert abs(losses[-1] - exact[-1]) < 0.02 * exact[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero1"},
        {"strategy": "zero2", "microbatches": 4},
        {"strategy": "zero3", "microbatches": 2},
        {"strategy": "zero3", "offload": "all"},
        {"strategy": "zero3", "gradient_compression": "int8"},
    ],
)
def test_streams_of_a_gpu_are_in_order(options: dict[str, Any]) -> None:
    cluster = autopar.ClusterSpec.homogeneous(devices=3, device="h100").with_tiers()
    program = compiled(cluster, **options)
    assert in_runs(program)
    found = simulated(program, batch(), 2)
    assert not found.findings, str(found)


# --- a share of the state


class Square(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).square().mean()


def square(width: int, cluster: autopar.ClusterSpec, device: str = "meta", **options: Any) -> autopar.ParallelProgram:
    with torch.device(device):
        model, x = Square(width), torch.randn(3 * cluster.size, width)
    return autopar.compile(model, cluster, (x,), optimizer=ADAMW, options=autopar.Options(**options))


def test_a_matrix_of_half_a_gpu_fits_on_16() -> None:
    """40 GB of weights, as many of gradients, 80 GB of moments: 10 GB a rank, beside one whole matrix at a time."""
    program = square(100001, autopar.ClusterSpec.preset("dgx-h100", 2))
    matrix = 4 * 100001**2
    assert program.predicted.peak_bytes < 1.5 * matrix


@pytest.mark.slow
def test_layers_whose_dims_98304_ranks_do_not_divide_are_shared_by_all_of_them() -> None:
    """Two of the 1000 layers of benchmarks/odd_shapes.py: 25 · 2^10 is no multiple of 3 · 2^15."""
    from benchmarks.odd_shapes import DEEP, llama

    cluster = autopar.ClusterSpec.preset("dgx-h100", 12288)
    with torch.device("meta"):
        deep, batch = llama(replace(DEEP, layers=2), 12288, torch.float32)
    mesh = {"dp": 12288, "tp": 8}
    program = autopar.compile(deep, cluster, batch, optimizer=ADAMW, options=autopar.Options(mesh=mesh))
    (stage,) = program.lowered.stages
    matrices = [p for p in stage.parameters.values() if len(p.type.shape) == 2]
    assert len(in_runs(program)) >= 2 * 7
    assert sum(p.updated_bytes(stage.mesh) for p in matrices) * cluster.size <= 1.01 * sum(
        p.type.nbytes for p in matrices
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "microbatches"), [("zero1", 1), ("zero3", 3)])
def test_there_is_no_second_block_while_one_is_sent(strategy: str, microbatches: int) -> None:
    cluster = autopar.ClusterSpec.local(3)
    program = square(4003, cluster, "cpu", strategy=strategy, microbatches=microbatches)
    assert in_runs(program) == {"product.weight", "product.bias"}
    assert_kept(program, (torch.randn(9, 4003),))


def test_the_halves_of_a_run_are_joined_when_both_have_arrived() -> None:
    cluster = autopar.ClusterSpec.homogeneous(devices=3, device="h100")
    program = square(2003, cluster, "cpu", strategy="zero3", microbatches=3)
    found = simulated(program, (torch.randn(9, 2003),), 2)
    assert not found.findings, str(found)


class Wide(nn.Module):
    def __init__(self, dim: int = 4001) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def cluster_of(ranks: int) -> autopar.ClusterSpec:
    if ranks < 8:
        return autopar.ClusterSpec.local(ranks, memory_bytes=80e9)
    return autopar.ClusterSpec.preset("dgx-h100", ranks // 8)


def wide(ranks: int, microbatches: int, dim: int = 4001) -> autopar.ParallelProgram:
    with torch.device("meta"):
        wide, x = Wide(dim), torch.randn(8 * ranks, dim)
    options = autopar.Options(strategy="zero3", microbatches=microbatches)
    return autopar.compile(wide, cluster_of(ranks), (x,), optimizer=ADAMW, options=options)


def gpt2_xl(ranks: int, microbatches: int) -> autopar.ParallelProgram:
    """A GPT-2 XL of two layers."""
    with torch.device("meta"):
        gpt = Gpt2(50257, 64, 1600, 25, 2)
        ids = torch.zeros(8 * ranks, 64, dtype=torch.long)
    loss_fn = lambda logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # noqa: E731
    options = autopar.Options(strategy="zero3", microbatches=microbatches)
    return autopar.compile(gpt, cluster_of(ranks), (ids, ids), loss_fn=loss_fn, optimizer=ADAMW, options=options)


def narrow(ranks: int, microbatches: int) -> autopar.ParallelProgram:
    """Biases that have fewer elements than there are ranks, at last."""
    return wide(ranks, microbatches, 701)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [wide, narrow, gpt2_xl])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 24, 56, 96, 1000])
def test_a_rank_holds_its_share_of_the_state(make: Any, ranks: int) -> None:
    """Parameters, gradients and Adam's moments: four numbers a parameter; gradients between microbatches are shards too."""
    for microbatches in (1, 8):
        program = make(ranks, microbatches)
        (stage,) = program.lowered.stages
        rows = [row for p in stage.parameters.values() for row in on_rank(p, stage.mesh).rows(program.setting)]
        total = sum(4 * p.type.nbytes for p in stage.parameters.values())
        assert {row.kind for row in rows} == {"parameters", "gradients", "optimizer"}
        assert sum(row.nbytes for row in rows) <= 1.01 * total / ranks
        assert microbatches == 1 or all(p.by_microbatch or not p.reduce for p in stage.parameters.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B on 24", "8B on 56"])
def test_an_odd_number_of_gpus_is_about_on_the_line_of_powers_of_two(name: str) -> None:
    from benchmarks.odd_shapes import CASES, measure

    assert measure(next(case for case in CASES if case.name == name))["over_line"] <= 1.02


# --- what a plan and a person may say


def test_a_plan_with_runs_is_read_as_it_was_written(tmp_path: Path) -> None:
    program = compiled(3, strategy="zero1")
    program.plan.save(tmp_path / "plan.json")
    assert '"[., .] run(dp)"' in (tmp_path / "plan.json").read_text()
    assert program.with_plan(autopar.Plan.load(tmp_path / "plan.json")).plan == program.plan


def test_a_constraint_may_ask_for_a_run_of_a_parameter_alone() -> None:
    program = compiled(3, mesh={"dp": 3}, constraints={"wide.weight": "[., .] run(dp)"})
    assert program.plan.stages[0].parameters["wide.weight"].storage.run == ("dp",)
    equal_to_eager(program)
    with pytest.raises(ConstraintError, match="parameters alone rest in runs"):
        compiled(3, constraints={"*": "[., .] run(dp)"})


@pytest.mark.parametrize("text", ["[., @dp] run(dp)", "[., .] ~sum(dp) run(dp)", "[] run(dp)", "[., .] run(dp, dp)"])
def test_a_spec_that_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ConstraintError):
        compiled(3, constraints={"wide.weight": text})


def test_an_optimizer_has_no_other_run_than_storage() -> None:
    program = compiled(3, strategy="zero3")
    data = program.plan.to_dict()
    data["stages"][0]["parameters"]["wide.weight"]["optimizer"] = "[., .]"
    with pytest.raises(PlanError, match="beside a run it is the same run"):
        program.with_plan(autopar.Plan.from_dict(data))


# --- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state that three processes under ZeRO-3 leave after two steps."""
    return worked(3, "zero3", "new", tmp_path_factory.mktemp("saved"))


def worked(ranks: int, strategy: str, source: Path | str, out: Path) -> Path:
    done = torchrun(ranks, Path(__file__).parent / "runs_worker.py", strategy, source, out)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def on_threads(program: autopar.ParallelProgram, folder: Path) -> dict[str, torch.Tensor]:
    def body(comm: Any) -> dict[str, torch.Tensor]:
        session = program.in_process.session(comm, program.request.update, 0)
        checkpoint.load(folder, session)
        return full_state(session)

    return program.in_process.run_bare(body)[0]


def equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "dp"), (2, "zero3"), (5, "zero1"), (6, "zero3")])
def test_threads_read_the_bits_that_processes_saved(saved: Path, ranks: int, strategy: str) -> None:
    full = torch.load(saved / "full.pt")
    assert equal_bits(on_threads(compiled(ranks, strategy=strategy), saved / "ours"), full)


def test_what_torch_alone_writes_of_runs_is_the_same(saved: Path) -> None:
    full, stored = torch.load(saved / "full.pt"), checkpoint.TensorSource(saved / "torchs")
    assert all(torch.equal(stored.read(name), value) for name, value in full.items() if value.dim())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "zero1"), (4, "zero3"), (2, "dp")])
def test_processes_read_and_write_the_same_bits_in_other_runs(
    saved: Path, ranks: int, strategy: str, tmp_path: Path
) -> None:
    again = worked(ranks, strategy, saved / "ours", tmp_path)
    full = torch.load(saved / "full.pt")
    assert equal_bits(torch.load(again / "full.pt"), full)
    assert equal_bits(on_threads(compiled(3, strategy="zero3"), again / "ours"), full)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "noted.py").write_text(NOTED)
    (folder / "data.py").write_text(DATA)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:save")
def test_a_run_goes_on_with_other_runs_of_elements(home: Path, tmp_path: Path) -> None:
    program = compiled(4, strategy="zero3")
    out = program.save(tmp_path / "out", also=[3, 2])
    assert in_runs(program)
    train_on(out, home, tmp_path, [(3, 4), (4, 7), (2, 9)])
    check_run(program, home, tmp_path / "run", tmp_path / "losses", 9)


def test_optimizers_of_groups_by_dims_see_the_dims_of_the_parameter() -> None:
    """A run has as many dims as its parameter, so weights are decayed and biases are not."""

    def by_dims(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [{"params": [p for p in every if p.dim() == n], "weight_decay": 0.3 * (n > 1)} for n in (1, 2)]
        return torch.optim.AdamW(groups, lr=1e-2)

    equal_to_eager(compiled(3, update={"optimizer": functools.partial(by_dims)}, strategy="zero3"))
