"""An axis named `ep` under a named strategy is expert parallelism as Megatron-LM has it: rows of the batch travel to experts."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options, ParallelProgram
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.errors import InfeasibleError, InputError
from autopar.passes.search.placement import program_traffic
from benchmarks.published_models import Transformer

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
MIXTRAL = TransformerShape(2, 16, 4, 32, 32, 8, kv_heads=2, gated_mlp=True, experts=4, topk=2)
DEEPSEEK = TransformerShape(
    2, 16, 4, 32, 32, 8, gated_mlp=True, experts=4, topk=2, moe_ffn=8, shared_experts=1, first_dense_layers=1,
    mla=(8, 8, 4, 4, 4),
)  # fmt: skip


def model_and_batch(shape: TransformerShape, rows: int = 8) -> tuple[Transformer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, shape.vocab, (rows, shape.seq_len + 1))
    return Transformer(shape), (ids[:, :-1], ids[:, 1:])


@functools.cache
def compiled(shape: TransformerShape, axes: str, strategy: str, pp: int = 1) -> ParallelProgram:
    """axes: such as "dp2 ep2 tp2"."""
    mesh = {axis[:2]: int(axis[2:]) for axis in axes.split()}
    model, batch = model_and_batch(shape)
    options = Options(
        mesh=mesh, strategy=strategy, pp=pp, microbatches=2, recompute="none", schedule="1f1b" if pp > 1 else "auto",
        on_overflow="chunk",
    )  # fmt: skip
    cluster = ClusterSpec.local(pp * functools.reduce(int.__mul__, mesh.values()))
    return autopar.compile(model, cluster, batch, optimizer=ADAMW, options=options)


def storages(program: ParallelProgram) -> dict[str, tuple[str, str]]:
    """How every parameter and its optimizer state rest."""
    return {n: (str(p.storage), str(p.optimizer)) for s in program.plan.stages for n, p in s.parameters.items()}


def chosen(program: ParallelProgram, op: str) -> set[tuple[str, ...]]:
    """The strategies that all calls of an op choose on the mesh."""
    stages = program.plan.stages
    return {
        strategy
        for stage in stages
        for name, plan in stage.templates.items()
        for node, strategy in plan.strategies.items()
        if program.ir.templates[name].op_calls[node].op.startswith(op)
    }


def is_one_device(shape: TransformerShape, program: ParallelProgram) -> bool:
    return autopar.verify(program, *model_and_batch(shape)).ok


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_experts_rest_by_their_axis_and_zero_shards_them_over_the_others(strategy: str) -> None:
    program = compiled(MIXTRAL, "dp2 ep2", strategy)
    assert chosen(program, "autopar.experts") == {("t0", "+t0+e")}
    zero = {"dp": "", "zero1": "o", "zero3": "so"}[strategy]
    for name, (storage, optimizer) in storages(program).items():
        last = name.split(".")[-1]
        if last in ("w_in", "w_out"):
            assert (storage.count("ep"), optimizer.count("ep")) == (1, 1), name
            assert ("dp" in storage, "dp" in optimizer) == ("s" in zero, "o" in zero), name
        else:
            assert ("@dp.ep" in storage, "@dp.ep" in optimizer) == ("s" in zero, "o" in zero), name
    assert is_one_device(MIXTRAL, program)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize(("axes", "pp"), [("dp2 ep2 tp2", 1), ("ep2 tp2", 2), ("ep2 cp2 tp2", 1)])
def test_experts_are_apart_along_one_axis_and_cut_along_another(shape: TransformerShape, axes: str, pp: int) -> None:
    program = compiled(shape, axes, "megatron-zero1", pp)
    (strategy,) = chosen(program, "autopar.experts")
    names = [axis[:2] for axis in axes.split()]
    by_axis = dict(zip(names, strategy, strict=True))
    assert by_axis.pop("ep") == "+t0+e"
    assert by_axis.pop("tp") == "f"
    assert by_axis.get("dp", "t0") == "t0"
    assert by_axis.get("cp", "t1") in ("t1", ""), "neither the batch nor experts"
    for name, (storage, _) in storages(program).items():
        if name.endswith("w_in"):
            assert storage == "[@ep, ., ., @tp]"
        if name.endswith("w_out"):
            assert storage == "[@ep, @tp, .]"
        assert name.endswith(("w_in", "w_out")) or "ep" not in storage
    assert is_one_device(shape, program)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_on_such_a_mesh_equal_one_device(seed: int) -> None:
    program = compiled(MIXTRAL, "dp2 ep2 tp2", "megatron-zero1")
    assert is_one_device(MIXTRAL, program.with_plan(autopar.random_plan(program, seed)))


def test_rows_travel_twice_forward_and_thrice_back() -> None:
    sent = [c for c in compiled(MIXTRAL, "dp2 ep2 tp2", "megatron").account.collectives if c.axis == "ep"]
    rows = [c for c in sent if c.kind == "exchange"]
    assert sum(c.times for c in rows) == MIXTRAL.layers * 2 * 5, "layers, microbatches, messages"
    others = {c.what.split()[0] for c in sent if c.kind != "exchange"}
    assert not any("w_in" in what or "w_out" in what for what in others), "nothing is owed of experts along their axis"


def test_rows_travel_between_all_ranks_of_the_axis() -> None:
    """Placement knows: in a ring of four the first rank would not speak to the third."""
    program = compiled(MIXTRAL, "dp1 ep4", "zero1")
    traffic = program_traffic(program.lowered, program.account, 4)
    assert (0, 2) in set(zip(traffic.first.tolist(), traffic.second.tolist(), strict=True))


def test_a_model_without_experts_cannot_have_them_apart() -> None:
    shape = TransformerShape(1, 16, 4, 32, 32, 8)
    with pytest.raises(InfeasibleError, match="this model has no experts to shard along ep=2; leave it out"):
        compiled(shape, "dp1 ep2", "zero1")


def test_an_axis_of_more_ranks_than_experts_is_named() -> None:
    shape = TransformerShape(1, 16, 4, 32, 32, 8, experts=3, topk=1)
    with pytest.raises(InfeasibleError, match="ep=4; take no more ranks than experts"):
        compiled(shape, "dp1 ep4", "zero1")


def unequal(
    experts: int, axes: dict[str, int], rows: int = 8, layers: int = 1, training: bool = True, **options: Any
) -> ParallelProgram:
    """A program whose experts do not divide by `ep`, held against one device."""
    model, batch = model_and_batch(replace(MIXTRAL, experts=experts, layers=layers), rows)
    ranks = math.prod(axes.values()) * options.get("pp", 1)
    given = Options(**{"mesh": axes, "strategy": "zero1", "recompute": "none", "on_overflow": "chunk"} | options)  # type: ignore[arg-type]
    program = autopar.compile(
        model, ClusterSpec.local(ranks), batch, optimizer=ADAMW if training else None, options=given
    )
    result = autopar.verify(program, model, batch)
    assert result.ok
    assert result.max_error <= 1e-9
    return program


def blocks(program: ParallelProgram, size: int) -> set[Any]:
    """The lengths in which `ep` cuts a dim of this size."""
    return {stage.mesh.blocks(size, ("ep",)) for stage in program.plan.stages}


def test_experts_that_do_not_divide_are_shared_by_all_ranks_as_rows_are() -> None:
    program = unequal(8, {"ep": 3}, rows=7)
    assert chosen(program, "autopar.experts") == {("+t0+e",)}
    assert (blocks(program, 8), blocks(program, 7)) == ({(3, 3, 2)}, {(3, 2, 2)})
    assert {s for n, s in storages(program).items() if n.endswith("w_in")} == {("[@ep, ., ., .]",) * 2}
    assert all("all_reduce" not in c.kind for c in program.account.collectives if "w_in" in c.what or "w_out" in c.what)


@pytest.mark.slow
def test_dims_that_hold_the_rows_are_cut_as_rows_are_and_not_as_experts_are() -> None:
    """6 rows of 8 tokens are 48, a multiple of 8 experts."""
    program = unequal(8, {"ep": 3}, rows=6)
    assert (blocks(program, 8), blocks(program, 6), blocks(program, 48)) == ({(3, 3, 2)}, {(2, 2, 2)}, {(16, 16, 16)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "axes", "rows", "options"),
    [
        (5, {"dp": 2, "ep": 2}, 8, {}),
        (7, {"ep": 2, "tp": 2}, 4, {"strategy": "megatron-zero1"}),
        (6, {"ep": 4}, 8, {"microbatches": 2}),
        (5, {"ep": 3, "cp": 2}, 3, {"strategy": "megatron"}),
        (3, {"ep": 2}, 8, {"pp": 2, "layers": 2, "microbatches": 2, "schedule": "1f1b"}),
        (5, {"ep": 3}, 5, {"training": False, "strategy": "zero3"}),
        (3, {"ep": 2}, 5, {"strategy": "zero3", "expert_imbalance": 2.0, "on_overflow": "stop"}),
    ],
    ids=str,
)
def test_unequal_experts_beside_other_axes_equal_one_device(
    experts: int, axes: dict[str, int], rows: int, options: dict[str, Any]
) -> None:
    program = unequal(experts, axes, rows, **options)
    assert all("+t0+e" in strategy for strategy in chosen(program, "autopar.experts"))
    assert all(isinstance(one, tuple) for one in blocks(program, experts))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", ["zero3", "auto"])
@pytest.mark.parametrize("ranks", range(2, 8))
@pytest.mark.parametrize("experts", [3, 5, 6, 7])
def test_any_number_of_experts_on_any_number_of_ranks(experts: int, ranks: int, strategy: str, training: bool) -> None:
    if ranks <= experts or strategy == "auto":
        unequal(experts, {"ep": ranks}, rows=7 + ranks % 2, training=training, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_plans_whose_experts_do_not_divide_equal_one_device(seed: int) -> None:
    program = unequal(5, {"dp": 2, "ep": 2}, rows=10, layers=2)
    plan = autopar.random_plan(program, seed)
    result = autopar.verify(program.with_plan(plan), *model_and_batch(replace(MIXTRAL, experts=5), 10))
    assert result.ok
    assert result.max_error <= 1e-9


def test_a_batch_must_divide_by_both_axes() -> None:
    with pytest.raises(InputError, match="fewer rows than dp × ep=8"):
        compiled(MIXTRAL, "dp4 ep2", "zero1")
