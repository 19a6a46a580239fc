"""Blocks of unequal size: batches, heads and vocabularies that divide by no number of ranks are shared by all of them, as one
device computes, and go from checkpoint to checkpoint."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError, PlanError, ShardingError
from autopar.ir.mesh import Extent, Mesh
from autopar.ir.rule import parse_rule
from autopar.ir.spec import parse_spec
from autopar.passes.shard.uneven import balanced, for_rows, for_units
from autopar.proof.random_plans import with_shares
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.comm.mesh import Shares, box_of, interval, sizes_of, told_sizes
from autopar.runtime.comm.threads import run_threads
from tests.gpu.simulated import simulated
from tests.runs_worker import ADAMW, batch, compiled, full_state, options_of
from tests.test_runs import equal_bits, equal_to_eager, on_threads, worked
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.transformers import Gpt2

# --- the notion


def test_shares_cut_what_is_a_multiple_of_their_units() -> None:
    shares = Shares((4, 3), (9, 8))
    assert (int(shares), shares.of(7), shares.of(70), shares.of(34)) == (2, (4, 3), (40, 30), (18, 16))
    assert (shares.of(8), shares.of(0)) == (None, None)
    assert shares == Shares((4, 3), (9, 8)) != Shares((4, 3))
    assert shares != 2
    assert {shares: 1, 2: 2}[shares] == 1


@pytest.mark.parametrize("units", [((1, 0),), ((1,),), ((1, 2), (1, 2, 3)), ()])
def test_shares_give_every_rank_something(units: Any) -> None:
    with pytest.raises(ValueError, match="shares"):
        Shares(*units)


def test_intervals_cover_a_dim_once() -> None:
    mesh = {"dp": Shares((5, 1, 2)), "tp": 2}
    for size in (8, 16, 48, 6):
        for axes in ((), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")):
            places = [dict(zip(mesh, place, strict=True)) for place in itertools.product(range(3), range(2))]
            found = {interval(size, axes, mesh, place) for place in places}
            if None not in found:
                ends = sorted(found)  # type: ignore[type-var]
                assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
                assert ends[-1][1] == size
    assert interval(8, ("dp", "tp"), mesh, {"dp": 0, "tp": 0}) is None


def test_a_mesh_tells_lengths_and_the_share_of_the_longest() -> None:
    mesh = Mesh((("dp", Shares((4, 4, 3))), ("tp", 2)))
    assert mesh.blocks(22, ("dp",)) == (8, 8, 6)
    assert mesh.blocks(22, ("dp", "tp")) == (4, 4, 4, 4, 3, 3)
    assert (mesh.blocks(11, ("dp", "tp")), mesh.blocks(9, ("dp",)), mesh.blocks(7, ("dp",))) == (None, 3, None)
    extent = mesh.extent(22, ("dp",))
    assert isinstance(extent, Extent)
    assert (int(extent), extent.told, mesh.parts(22, ("dp",))) == (8, (22, ("dp",)), 22 / 8)
    assert parse_spec("[@dp, .]").local_shape((22, 5), mesh) == (8, 5)
    assert str(mesh) == "dp=3×tp=2"


def test_a_composite_dim_is_cut_as_its_factor_is() -> None:
    """25 heads over 8 ranks are not 1600 features over 8, unless these are cut by heads as well."""
    rule = parse_rule("b (h d!) -> b h d!", [(2, 1600)], [(2, 25, 64)], {"h": 25, "d": 64})
    by_heads, equal = (Mesh((("tp", size),)) for size in (Shares(balanced(25, 8)), 8))
    assert rule.allows(("h",), by_heads)
    assert not rule.allows(("h",), equal)
    other = parse_rule("b (h d!) -> b h d!", [(2, 40)], [(2, 5, 8)], {"h": 5, "d": 8})
    assert not other.allows(("h",), Mesh((("tp", Shares((3, 37), (3, 2))),)))
    with pytest.raises(ShardingError):
        parse_spec("[@tp]").local_shape((1601,), by_heads)


def test_gathers_of_unequal_blocks_join_them() -> None:
    whole, mesh = torch.arange(22.0).view(2, 11), {"dp": Shares((5, 1, 5))}

    def body(comm: Any) -> bool:
        own = comm.shard(whole, 1, "dp")
        assert own.shape[1] == comm.block_size(11, "dp") == (5, 1, 5)[comm.rank]
        assert comm.block_start(11, "dp") == (0, 5, 6)[comm.rank]
        return torch.equal(comm.all_gather(own, 1, "dp", whole=11), whole)

    assert all(run_threads(3, mesh, body))


def test_shares_are_told_as_data() -> None:
    mesh = {"dp": Shares((2, 1)), "tp": 2}
    assert told_sizes(mesh) == {"dp": ((2, 1),), "tp": 2}
    assert sizes_of(told_sizes(mesh)) == mesh
    assert autopar.Options(mesh={"dp": [[2, 1]], "tp": 2}).mesh == mesh
    assert box_of((6, 4), (("dp",), ("tp",)), mesh, {"dp": 1, "tp": 1}) == ((4, 6), (2, 4))


def test_rows_are_shared_along_the_first_axis_that_does_not_divide_them() -> None:
    assert for_rows(Mesh.of(dp=3, tp=2), 8) == Mesh((("dp", Shares((3, 3, 2))), ("tp", 2)))
    assert for_rows(Mesh.of(replica=3, dp=4), 18).axes == (("replica", 3), ("dp", Shares((2, 2, 1, 1))))
    for mesh, rows in ((Mesh.of(dp=4), 8), (Mesh.of(dp=8), 4), (Mesh.of(tp=3), 8), (Mesh.of(dp=3), None)):
        assert for_rows(mesh, rows) == mesh


# --- right, on any number of ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3", "auto"])
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_the_zoo_equals_one_device_with_batches_that_do_not_divide(zoo: ZooModel, strategy: str, ranks: int) -> None:
    program = autopar.compile(
        zoo.make(),
        autopar.ClusterSpec.local(ranks),
        zoo.batch(),
        loss_fn=zoo.loss_fn,
        optimizer=zoo.optimizer,
        options=autopar.Options(strategy=strategy, mesh={"dp": ranks}),
    )
    result = autopar.verify(program, zoo.make(), zoo.batch())
    assert result.ok
    assert result.max_error <= 1e-9


def program_of(zoo: ZooModel, ranks: int) -> autopar.ParallelProgram:
    return autopar.compile(
        zoo.make(), autopar.ClusterSpec.local(ranks), zoo.batch(), loss_fn=zoo.loss_fn, optimizer=zoo.optimizer
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_random_plans_with_shares_equal_one_device(zoo: ZooModel, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.proof.random_plans.UNEVEN", 1.0)
    program = program_of(zoo, 4 + seed % 4)
    plan = autopar.random_plan(program, seed)
    result = autopar.verify(program.with_plan(plan), zoo.make(), zoo.batch())
    assert result.ok
    assert result.max_error <= 1e-9


def gpt(heads: int, vocab: int) -> nn.Module:
    torch.manual_seed(0)
    return Gpt2(vocab, 16, 8 * heads, heads, 2)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "rows", "options"),
    [
        (4, 3, {"mesh": {"tp": 4}, "strategy": "megatron"}),
        (6, 7, {"mesh": {"dp": 2, "tp": 3}, "strategy": "megatron-zero3"}),
        (6, 8, {"mesh": {"dp": Shares((5, 2, 1)), "tp": 2}, "strategy": "megatron-zero1"}),
        (3, 6, {"mesh": {"dp": Shares((3, 2, 1))}, "strategy": "zero3"}),
        (3, 12, {"mesh": {"dp": Shares((3, 2, 1))}, "strategy": "zero2", "microbatches": 2}),
        (6, 10, {"pp": 2, "mesh": {"dp": Shares((3, 1, 1))}, "microbatches": 2, "schedule": "1f1b"}),
        (4, 6, {"mesh": {"dp": Shares((5, 1)), "tp": 2}, "gradient_compression": "bf16"}),
    ],
    ids=str,
)
def test_odd_heads_vocabularies_and_shares_equal_one_device(ranks: int, rows: int, options: dict[str, Any]) -> None:
    ids = torch.randint(0, 67, (2, rows, 16), generator=torch.Generator().manual_seed(0))
    program = autopar.compile(
        gpt(5, 67),
        autopar.ClusterSpec.local(ranks),
        (ids[0], ids[1]),
        loss_fn=token_loss,
        optimizer=ADAMW,
        options=autopar.Options(**options),
    )
    assert any(stage.mesh.uneven for stage in program.plan.stages)
    result = autopar.verify(program, gpt(5, 67), (ids[0], ids[1]))
    assert result.ok
    assert result.max_error <= 1e-9
    plan = autopar.Plan.from_dict(program.plan.to_dict())
    assert plan == program.plan
    assert program.with_plan(plan).plan == program.plan


def test_heads_and_vocabularies_are_split_where_they_do_not_divide() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = autopar.compile(
        gpt(5, 67),
        autopar.ClusterSpec.local(4),
        (ids, ids),
        loss_fn=token_loss,
        optimizer=ADAMW,
        options=autopar.Options(mesh={"tp": 4}, strategy="megatron"),
    )
    ((axis, size),) = program.plan.stages[0].mesh.axes
    assert axis == "tp"
    assert isinstance(size, Shares)
    assert size.of(5) == (2, 1, 1, 1)
    assert size.of(67) == (17, 17, 17, 16)
    assert "shares: of every 67 indices along tp ranks hold 17 (×3), 16" in program.report().splitlines()
    stored = program.plan.stages[0].parameters
    assert sum("tp" in str(p.storage) for p in stored.values()) >= 12
    assert for_units(Mesh.of(tp=5), program.ir, program.rules) is not None
    assert for_units(Mesh.of(dp=4), program.ir, program.rules) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["megatron-zero1", "megatron-zero2"])
def test_optimizers_states_are_parts_of_unequal_blocks(strategy: str) -> None:
    ids = torch.randint(0, 67, (2, 8, 16), generator=torch.Generator().manual_seed(0))
    program = autopar.compile(
        gpt(5, 67),
        autopar.ClusterSpec.local(6),
        (ids[0], ids[1]),
        loss_fn=token_loss,
        optimizer=ADAMW,
        options=autopar.Options(mesh={"dp": 2, "tp": Shares((2, 2, 1), (23, 22, 22))}, strategy=strategy),
    )
    stored = program.plan.stages[0].parameters.values()
    assert sum((str(p.storage), str(p.optimizer)) == ("[@tp, .]", "[@tp, @dp]") for p in stored) >= 4
    assert autopar.verify(program, gpt(5, 67), (ids[0], ids[1])).max_error <= 1e-9


def test_a_batch_has_a_row_for_every_rank() -> None:
    with pytest.raises(InputError, match="fewer rows than dp=5"):
        compiled(5, 4, strategy="dp")


def test_a_plan_whose_shares_do_not_fit_is_refused() -> None:
    program = compiled(3, 8, strategy="dp")
    data = program.plan.to_dict()
    data["stages"][0]["mesh"]["dp"] = [[3, 3, 3]]
    with pytest.raises(PlanError):
        program.with_plan(autopar.Plan.from_dict(data))


def test_random_shares_fit_their_axis() -> None:
    program, rng = compiled(2, 8, strategy="dp"), random.Random(0)
    for _ in range(20):
        mesh = with_shares(Mesh.of(dp=3, tp=2), program.ir, rng)
        assert [int(size) for _, size in mesh.axes] == [3, 2]


# --- memory, files, checkpoints


def test_dropout_draws_what_one_device_draws() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    losses = [
        autopar.compile(
            model(),
            autopar.ClusterSpec.local(n),
            (x,),
            loss_fn=lambda y: y.square().mean(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            options=autopar.Options(strategy="dp"),
        )
        .run([(x,)] * 4)
        .losses
        for n in (1, 2, 3, 5)
    ]
    for one in losses[1:]:
        torch.testing.assert_close(torch.tensor(one), torch.tensor(losses[0]), rtol=1e-5, atol=1e-6)


def test_state_that_is_saved_in_unequal_blocks_is_read_in_others(tmp_path: Path) -> None:
    program = compiled(3, **options_of("megatron-tp", 3))
    assert all(stage.mesh.uneven for stage in program.plan.stages)

    def save(session: Any) -> dict[str, torch.Tensor]:
        session.train_step(program.leaves(batch()))
        checkpoint.save(tmp_path, session)
        return full_state(session)

    full = program.on_ranks(save)[0]
    for ranks, strategy in ((2, "megatron-tp"), (2, "zero3")):
        assert equal_bits(on_threads(compiled(ranks, **options_of(strategy, ranks)), tmp_path), full)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state that three processes leave which hold unequal blocks of weights."""
    return worked(3, "megatron-tp", "new", tmp_path_factory.mktemp("saved"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "dp"), (2, "zero3"), (7, "zero1"), (4, "megatron-tp")])
def test_threads_read_the_bits_of_unequal_blocks(saved: Path, ranks: int, strategy: str) -> None:
    full = torch.load(saved / "full.pt")
    program = compiled(ranks, **options_of(strategy, ranks))
    assert equal_bits(on_threads(program, saved / "ours"), full)


@pytest.mark.slow
def test_what_torch_alone_writes_of_unequal_blocks_is_the_same(saved: Path) -> None:
    full, stored = torch.load(saved / "full.pt"), checkpoint.TensorSource(saved / "torchs")
    assert all(torch.equal(stored.read(name), value) for name, value in full.items() if value.dim())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "megatron-tp"), (4, "zero3")])
def test_processes_read_and_write_the_same_bits_in_other_blocks(
    saved: Path, ranks: int, strategy: str, tmp_path: Path
) -> None:
    again = worked(ranks, strategy, saved / "ours", tmp_path)
    full = torch.load(saved / "full.pt")
    assert equal_bits(torch.load(again / "full.pt"), full)
    program = compiled(3, **options_of("megatron-tp", 3))
    assert any(stage.mesh.uneven for stage in program.plan.stages)
    assert equal_bits(on_threads(program, again / "ours"), full)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "rows"), [(5, 17), (7, 60)])
def test_odd_models_and_odd_batches_train(ranks: int, rows: int) -> None:
    equal_to_eager(compiled(ranks, rows, strategy="zero3"), rows)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize(("large", "small"), [(17, 9), (16, 7), (18, 12)])
def test_buckets_of_any_sizes_share_one_set_of_weights(strategy: str, large: int, small: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()

    def rows(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
        return {"input": torch.randn(n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}

    batches = [rows(large, 1), rows(small, 2), rows(large, 3), rows(small, 4)]
    losses = [
        autopar.compile(
            model(),
            autopar.ClusterSpec.local(ranks),
            rows(large),
            loss_fn=lambda y: y.square().mean(),
            optimizer=ADAMW,
            options=autopar.Options(strategy=strategy if ranks > 1 else "dp"),
            buckets={"input": {0: (small, large)}},
        )
        .run(batches)
        .losses
        for ranks in (1, 4)
    ]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (4, {"mesh": {"dp": Shares((3, 2, 1, 1))}, "strategy": "zero2"}),
        (8, {"mesh": {"dp": 2, "tp": 4}, "strategy": "megatron-zero3"}),
    ],
    ids=str,
)
def test_streams_of_a_gpu_are_in_order(devices: int, options: dict[str, Any]) -> None:
    ids = torch.randint(0, 67, (2, 7, 16), generator=torch.Generator().manual_seed(0))
    program = autopar.compile(
        gpt(5, 67),
        autopar.ClusterSpec.homogeneous(devices=devices, device="h100"),
        (ids[0], ids[1]),
        loss_fn=token_loss,
        optimizer=ADAMW,
        options=autopar.Options(**options),
    )
    assert program.plan.stages[0].mesh.uneven
    found = simulated(program, (ids[0], ids[1]), 2)
    assert not found.findings, str(found)
