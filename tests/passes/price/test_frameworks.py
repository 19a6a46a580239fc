"""Compiled lines read as a framework runs them come to what the estimator says of the same layout, part by part."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.layer import CP, TP, TP_BEHIND, communication
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import BEHIND_PRODUCTS, Software
from autopar.ir.lines import Compute, Convert, Function, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import Step
from autopar.ir.types import TensorType
from autopar.passes.price.bills import template_bill
from autopar.passes.price.frameworks import as_run, conversions
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.side_by_side import SideBySide
from autopar.plan import Plan
from benchmarks.published_compiled import forced_options, predicted_s, saved_by_op, saves_by_op
from benchmarks.published_models import Transformer

GPT = TransformerShape(2, 4096, 32, 16384, 32768, 2048)
LLAMA = TransformerShape(2, 4096, 32, 14336, 32768, 4096, kv_heads=8, gated_mlp=True)
MEGATRON = Software("bf16", graphs="step")
FSDP = replace(MEGATRON, recompute_stops=True, regathers=False)
ROWS, VECTOR = TensorType((8, 4), torch.bfloat16), TensorType((4,), torch.bfloat16)
ALONE = Spec.replicated(2)


def workload(shape: TransformerShape, software: Software, recompute: str, **parallel: int) -> Workload:
    """The question of a layout for eight H100."""
    config = ParallelConfig(sequence_parallel=parallel.get("tp", 1) > 1, **parallel)
    return Workload.of(shape, ClusterSpec.preset("dgx-h100"), StepPlan(config, 2, recompute), 16, software)


def compiled(w: Workload, plan: Plan | None = None) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, ids = Transformer(w.model, torch.bfloat16), torch.zeros(w.batch, w.model.seq_len, dtype=torch.long)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    return autopar.compile(model, w.cluster, (ids, ids), optimizer=optimizer, options=forced_options(w), plan=plan)


@pytest.mark.parametrize(
    ("shape", "software", "recompute", "parallel"),
    [
        pytest.param(GPT, replace(FSDP, kernels="eager", graphs=""), "full", {"dp": 8, "zero": 3}, id="fsdp"),
        pytest.param(LLAMA, MEGATRON, "none", {"dp": 2, "tp": 4, "zero": 1}, id="megatron"),
        pytest.param(
            LLAMA, MEGATRON, "full", {"dp": 4, "tp": 2, "zero": 1}, id="megatron-full", marks=pytest.mark.slow
        ),
        pytest.param(LLAMA, MEGATRON, "none", {"dp": 2, "cp": 4, "zero": 1}, id="context", marks=pytest.mark.slow),
        pytest.param(LLAMA, FSDP, "selective", {"dp": 8, "zero": 3}, id="fsdp-selective", marks=pytest.mark.slow),
    ],
)
def test_a_framework_takes_what_the_estimator_says(
    shape: TransformerShape, software: Software, recompute: str, parallel: dict[str, int]
) -> None:
    w = workload(shape, software, recompute, **parallel)
    program = compiled(w)
    if saves_by_op(w):
        program = compiled(w, saved_by_op(program, w))
    assert predicted_s(program, w.software) == pytest.approx(estimate_workload(w).step_time_s, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), [(4, 1), (2, 2)])
def test_messages_of_a_layer_hide_behind_what_the_estimator_says(tp: int, cp: int) -> None:
    """With both axes a gradient may come gathered from the call behind: then messages over tp are not all in the layer."""
    w = workload(LLAMA, MEGATRON, "none", dp=2, tp=tp, cp=cp, zero=1)
    program = compiled(w)
    assert program.lowered is not None
    (stage,), (plan,) = program.lowered.stages, program.plan.stages
    pricer = Pricers(program.cluster, w.software)[stage.mesh]
    block = stage.templates["blocks"]
    bill = template_bill(block, plan.templates["blocks"], program.ir.templates["blocks"], pricer, program.rules)
    for work, messages in zip((bill.F, bill.B), communication(w, False), strict=True):
        said, estimated = (
            {p.overlap: s for p, s in one.items() if p == CP or cp == 1} for one in (work.messages, messages)
        )
        assert said == pytest.approx(estimated, rel=0.01)
        assert said
    assert BEHIND_PRODUCTS in {purpose.overlap for purpose in bill.B.messages}


def line(op: str, out: str, *reads: str, type_: TensorType = ROWS) -> Compute:
    kwargs = {str(i): Ref(name) for i, name in enumerate(reads)}
    return Compute(
        f"autopar.{op}" if "linear" in op else f"aten.{op}", kwargs, outs=(out,), types=(type_,), specs=(ALONE,)
    )


def run_of(*lines: Compute) -> Function:
    args = {"x": (ROWS, ALONE), "dy": (ROWS, ALONE), "b": (VECTOR, Spec.replicated(1))}
    return Function("block", tuple(args), lines, (), args)


BESIDE = SideBySide({"x": 8.0}, {"w": "x", "v": "x", "alone": "z"})


def test_keys_hide_as_context_parallelism_does_and_rows_behind_products() -> None:
    """Both are gathered: what rows are for is a product, what keys are for attention. Backward gathers them again."""
    gathers = tuple(
        Convert(name, Step("all_gather", axis, 0), outs=(out,), types=(ROWS,), specs=(ALONE,))
        for name, axis, out in (("x", "tp", "rows"), ("k", "cp", "keys"))
    )
    attention = Compute(
        "autopar.attention", {"q": Ref("y"), "k": Ref("keys")}, outs=("o",), types=(ROWS,), specs=(ALONE,)
    )
    cut = {name: (ROWS, Spec(((axis,), ()))) for name, axis in (("x", "tp"), ("k", "cp"))}
    forward = Function("block", ("x", "k"), (*gathers, line("linear", "y", "rows", "w"), attention), (), cut)
    backward = run_of(line("linear_dx", "dx", "dy", "w"))
    pricer = Pricers(ClusterSpec.preset("dgx-h100"), MEGATRON)[Mesh.of(tp=2, cp=4)]
    assert [purpose for purpose, _ in conversions(forward, None, pricer)] == [TP, CP]
    assert [purpose for purpose, _ in conversions(backward, forward, pricer)] == [TP_BEHIND, CP]


def test_products_do_their_biases_in_passing() -> None:
    run = as_run(
        run_of(
            line("linear", "y", "x", "w"),
            line("add.Tensor", "biased", "y", "b"),
            line("add.Tensor", "residual", "biased", "x"),
            line("linear_dx", "dx", "dy", "alone"),
            line("sum.dim_IntList", "db", "dy", type_=VECTOR),
            line("sum.dim_IntList", "other", "x", type_=VECTOR),
        ),
        BESIDE,
    )
    assert run.inside == {"biased", "db"}


def test_gradients_of_one_input_come_as_one() -> None:
    lines = (
        line("linear_dx", "dx", "dy", "w"),
        line("mul.Tensor", "ds", "dy", "dy"),
        line("linear_dx", "dx2", "ds", "v"),
        line("add.Tensor", "sum", "dx", "dx2"),
        line("linear_dx", "other", "dy", "alone"),
        line("add.Tensor", "both", "sum", "other"),
    )
    run = as_run(run_of(*lines), BESIDE)
    assert run.inside == {"sum"}
    assert [one.outs[0] for one in run.lines] == ["ds", "dx", "dx2", "sum", "other", "both"]
    assert as_run(run_of(*lines), None).lines == lines
    assert not as_run(run_of(*lines), None).inside


def test_forward_makes_products_of_one_input_where_the_first_stands() -> None:
    lines = (line("linear", "g", "x", "w"), line("silu.default", "s", "g"), line("linear", "u", "x", "v"))
    assert [one.outs[0] for one in as_run(run_of(*lines), BESIDE).lines] == ["g", "u", "s"]
