"""An axis named `ep` under a named strategy is expert parallelism as Megatron-LM has it: rows of the batch travel to experts."""

from __future__ import annotations

import functools

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


def model_and_batch(shape: TransformerShape) -> tuple[Transformer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, shape.vocab, (8, shape.seq_len + 1))
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


@pytest.mark.few(2)
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


@pytest.mark.few(1)
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
    with pytest.raises(InfeasibleError, match="no mixture of experts has tokens and experts that divide by ep=2"):
        compiled(shape, "dp1 ep2", "zero1")


def test_experts_that_the_axis_does_not_divide_are_named() -> None:
    shape = TransformerShape(1, 16, 4, 32, 32, 8, experts=3, topk=1)
    with pytest.raises(InfeasibleError, match="ep=2; take a divisor, or name the axis dp"):
        compiled(shape, "dp1 ep2", "zero1")


def test_a_batch_must_divide_by_both_axes() -> None:
    with pytest.raises(InputError, match="fewer rows than dp=8"):
        compiled(MIXTRAL, "dp4 ep2", "zero1")
