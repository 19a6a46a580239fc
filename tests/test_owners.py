"""Tensors that optimizers need whole rest on one rank, in balance: any number of ranks train as one device does, hold their share
of the state, and go from checkpoint to checkpoint."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError, PlanError, ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.resting import on_rank
from autopar.ir.spec import parse_spec
from autopar.passes.shard.owners import Owned, balanced
from autopar.runtime.comm.mesh import boxes_of, held_shape, index_along, mesh_index
from tests.gpu.simulated import simulated
from tests.measure import measure_tiers
from tests.owners_worker import OPTIMIZERS, batch, compiled, model
from tests.test_runs import equal_bits, on_threads
from tests.warm import torchrun
from tests.zoo.models import BY_NAME


def owned(program: autopar.ParallelProgram) -> dict[str, int]:
    """The owners by parameter."""
    return {
        name: p.optimizer.owner
        for stage in program.plan.stages
        for name, p in stage.parameters.items()
        if p.optimizer.owner is not None
    }


def equal_to_eager(program: autopar.ParallelProgram, net: nn.Module, inputs: Any, steps: int = 3) -> None:
    result = autopar.verify(program, net, inputs, steps=steps)
    assert result.ok
    assert result.max_error <= 1e-9, sorted(result.errors.items(), key=lambda row: -row[1])[:3]


# --- the notion


def test_the_owner_has_all_and_the_others_nothing() -> None:
    mesh = Mesh((("a", 2), ("dp", 3)))
    spec = parse_spec("[., .] whole(a.dp=4)")
    held = [rank for rank in range(6) if boxes_of((5, 2), spec.row, mesh.sizes, mesh_index(mesh.sizes, rank))]
    assert held == [4]
    shapes = [held_shape((5, 2), spec.row, mesh.sizes, mesh_index(mesh.sizes, rank)) for rank in range(6)]
    assert shapes == [(0, 2)] * 4 + [(5, 2)] + [(0, 2)]
    assert str(spec) == "[., .] whole(a.dp=4)"
    assert spec.owner_along(("a",), mesh) == 1
    assert spec.owner_along(("dp",), mesh) == 1
    with pytest.raises(ShardingError):
        parse_spec("[., .] whole(dp)")


# --- the balance


def loads_of(tensors: list[Owned], owners: Any, mesh: Mesh) -> list[float]:
    loads = [0.0] * mesh.size
    for tensor, owner in zip(tensors, owners, strict=True):
        for rank in range(mesh.size):
            if index_along(tensor.axes, mesh.sizes, mesh_index(mesh.sizes, rank)) == owner:
                loads[rank] += tensor.cost
    return loads


@pytest.mark.parametrize("seed", range(20))
def test_owners_are_within_the_bound_of_the_best_of_all(seed: int) -> None:
    """Longest first is at most 4/3 - 1/(3n) of the least possible, and at most one tensor over the mean."""
    rng = random.Random(seed)
    mesh, costs = Mesh((("dp", rng.choice([2, 3])),)), [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 7))]
    tensors = [Owned(("dp",), cost) for cost in costs]
    ours = max(loads_of(tensors, balanced(tensors, mesh), mesh))
    best = min(
        max(loads_of(tensors, owners, mesh)) for owners in itertools.product(range(mesh.size), repeat=len(tensors))
    )
    assert best <= ours <= (4 / 3 - 1 / (3 * mesh.size)) * best + 1e-9
    assert ours <= sum(costs) / mesh.size + max(costs)


def test_what_several_axes_share_is_balanced_with_what_one_shares() -> None:
    mesh = Mesh((("dp", 2), ("ep", 2)))
    tensors = [Owned(("dp",), 2.0), Owned(("dp", "ep"), 2.0), Owned(("dp", "ep"), 2.0)]
    assert loads_of(tensors, balanced(tensors, mesh), mesh) == [2.0] * 4


# --- training


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize(
    ("strategy", "microbatches"), [(f"zero{n}", microbatches) for n in (1, 2, 3) for microbatches in (1, 4)]
)
def test_matrices_are_updated_by_their_owners(optimizer: str, ranks: int, strategy: str, microbatches: int) -> None:
    program = compiled(ranks, optimizer, strategy=strategy, microbatches=microbatches)
    matrices = {name for name in program.ir.trained if name.endswith("weight")}
    assert matrices <= owned(program).keys() == program.setting.optimizer.whole
    assert len({owned(program)[name] for name in matrices}) == min(ranks, len(matrices))
    equal_to_eager(program, model(), batch(4 * ranks * microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "resnet"])
def test_the_zoo_equals_one_device(name: str, optimizer: str, strategy: str, ranks: int) -> None:
    zoo = BY_NAME[name]
    leaves = zip(*(zoo.batch(seed) for seed in range(ranks)), strict=True)
    inputs = tuple(torch.cat(x)[: 4 * ranks] for x in leaves)
    program = autopar.compile(
        zoo.make(),
        autopar.ClusterSpec.local(ranks),
        inputs,
        loss_fn=zoo.loss_fn,
        optimizer=OPTIMIZERS[optimizer],
        options=autopar.Options(strategy=strategy, microbatches=4 if ranks == 4 and name != "resnet" else None),
    )
    assert owned(program)
    equal_to_eager(program, zoo.make(), inputs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "cp": 3}, "strategy": "zero1"},
        {"mesh": {"dp": 3, "tp": 2}, "strategy": "zero3"},
        {"pp": 2, "strategy": "zero3"},
        {"pp": 2, "strategy": "zero1", "microbatches": 2, "schedule": "1f1b"},
        {"strategy": "zero2", "microbatches": 3, "offload": "optimizer"},
    ],
)
def test_meshes_stages_and_tiers_have_owners(options: dict[str, Any]) -> None:
    program = compiled(autopar.ClusterSpec.local(6).with_tiers(), "adafactor", **options)
    assert owned(program)
    equal_to_eager(program, model(), batch(24 * options.get("microbatches", 1)))


@pytest.mark.slow
@pytest.mark.parametrize("update", [{"clip_grad_norm": 0.1}, {"loss_scaling": True}])
def test_norms_and_scales_count_what_the_owners_have(update: dict[str, Any]) -> None:
    ours, one = (
        compiled(n, "muon", update=update, rows=rows, strategy=s).run([batch(12, seed) for seed in range(3)])
        for n, rows, s in ((3, 4, "zero3"), (1, 12, "dp"))
    )
    for name, value in one.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=1e-9 * float(value.abs().max() + 1))


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "microbatches"), [("zero2", 3), ("zero1", 1), ("zero3", 2)])
def test_streams_of_a_gpu_are_in_order(strategy: str, microbatches: int) -> None:
    cluster = autopar.ClusterSpec.homogeneous(devices=3, device="h100")
    program = compiled(cluster, "muon", strategy=strategy, microbatches=microbatches)
    assert owned(program)
    found = simulated(program, batch(12 * microbatches), 2)
    assert not found.findings, str(found)


# --- bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("strategy", "microbatches"), [("zero1", 1), ("zero2", 4), ("zero3", 2)])
def test_memory_is_what_is_promised(strategy: str, microbatches: int, ranks: int) -> None:
    program = compiled(ranks, "muon", 12, 64, strategy=strategy, microbatches=microbatches)
    assert len(owned(program)) == 13
    predicted = program.account.peaks[0]
    measured = max(device for device, _ in measure_tiers(program, batch(4 * ranks * microbatches)))
    assert 0.98 * measured <= predicted <= 1.05 * measured


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 24])
def test_a_rank_holds_its_share_of_the_state(ranks: int) -> None:
    program = compiled(ranks, "muon", 24, 16, strategy="zero3")
    (stage,) = program.lowered.stages
    matrices = [p for p in stage.parameters.values() if p.optimizer.owner is not None and p.name != "into.weight"]
    states = [
        sum(on_rank(p, stage.mesh, rank=rank).state_bytes(program.setting) for p in matrices) for rank in range(ranks)
    ]
    one = max(p.type.nbytes for p in matrices)
    assert sum(states) == sum(p.type.nbytes for p in matrices)
    assert max(states) <= max(1.01 * sum(states) / ranks, sum(states) / ranks + one)


def test_the_search_takes_owners_where_they_save() -> None:
    program = compiled(4, "muon", 6, 64)
    plain = compiled(4, "muon", 6, 64, strategy="dp")
    assert owned(program)
    assert program.predicted.step_time_s <= plain.predicted.step_time_s
    assert program.predicted.peak_bytes < plain.predicted.peak_bytes
    assert "whole(dp=3): " in program.report()


# --- what a plan and a person may say


def test_a_plan_with_owners_is_read_as_it_was_written(tmp_path: Path) -> None:
    program = compiled(3, strategy="zero1")
    program.plan.save(tmp_path / "plan.json")
    assert '"[., .] whole(dp=2)"' in (tmp_path / "plan.json").read_text()
    again = program.with_plan(autopar.Plan.load(tmp_path / "plan.json"))
    assert again.plan == program.plan
    assert again.predicted.step_time_s == program.predicted.step_time_s


def test_a_person_may_choose_owners_in_a_plan() -> None:
    program = compiled(3, "shampoo", strategy="zero3")
    data = program.plan.to_dict()
    for spec in data["stages"][0]["parameters"].values():
        assert "whole" in spec["optimizer"]
        spec["storage"] = spec["optimizer"] = spec["optimizer"].partition("=")[0] + "=1)"
    chosen = program.with_plan(autopar.Plan.from_dict(data))
    assert set(owned(chosen).values()) == {1}
    equal_to_eager(chosen, model(), batch(12))


@pytest.mark.parametrize(
    ("spec", "words"),
    [("[., .] whole(dp=3)", "must name one of 3 ranks"), ("[@dp, .]", "updates .* as a whole tensor")],
)
def test_a_plan_whose_owner_is_none_is_refused(spec: str, words: str) -> None:
    program = compiled(3, width=12, strategy="zero1")
    data = program.plan.to_dict()
    data["stages"][0]["parameters"]["layers.0.weight"]["optimizer"] = spec
    with pytest.raises((PlanError, ShardingError), match=words):
        program.with_plan(autopar.Plan.from_dict(data))


def test_a_constraint_names_no_owner() -> None:
    with pytest.raises(ConstraintError, match="is chosen with all others"):
        compiled(3, mesh={"dp": 3}, constraints={"layers.0.weight": "[., .] whole(dp=1)"})


# --- checkpoints


def worked(ranks: int, strategy: str, optimizer: str, source: Path | str, out: Path) -> dict[str, torch.Tensor]:
    """The tensors that all processes leave, together."""
    done = torchrun(ranks, Path(__file__).parent / "owners_worker.py", strategy, optimizer, source, out)
    assert done.returncode == 0, done.stderr[-4000:]
    full: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        full |= torch.load(out / f"full{rank}.pt")
    return full


def test_state_goes_to_other_owners_on_threads() -> None:
    def trained(comm: Any) -> dict[str, Any]:
        session = three.in_process.session(comm, three.request.update, 0)
        session.load_weights(three.weights())
        session.train_step(list(batch(12)))
        state: dict[str, Any] = session.state_dict()
        return state

    def loaded(comm: Any) -> dict[str, Any]:
        session = two.in_process.session(comm, two.request.update, 0)
        session.load_state_dict(state)
        again: dict[str, Any] = session.state_dict()
        return again

    three, two = compiled(3, "shampoo", strategy="zero3"), compiled(2, "shampoo", strategy="zero1")
    state = three.in_process.run_bare(trained)[0]
    again = two.in_process.run_bare(loaded)[0]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert sum(name.endswith(".left") for name in tensors) == 8
    assert equal_bits(tensors, again)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", ["shampoo", "muon", "adafactor"])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_state_goes_to_and_from_other_owners_bit_by_bit(optimizer: str, strategy: str, tmp_path: Path) -> None:
    full = worked(3, strategy, optimizer, "new", tmp_path / "three")
    for ranks, other in ((1, "dp"), (2, "zero3"), (5, "zero1"), (4, "dp")):
        assert equal_bits(on_threads(compiled(ranks, optimizer, strategy=other), tmp_path / "three" / "ours"), full)
    again = worked(
        2, "zero3" if strategy == "zero1" else "zero1", optimizer, tmp_path / "three" / "ours", tmp_path / "two"
    )
    assert again.keys() == full.keys()
    assert equal_bits(again, full)
    assert equal_bits(on_threads(compiled(3, optimizer, strategy="zero3"), tmp_path / "two" / "ours"), full)
