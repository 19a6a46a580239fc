"""Stages and blocks made by hand as bills: what their calls, conversions and fused runs cost, by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.costmodel.bill import CallBill, ParameterTraffic, Purpose, Work
from autopar.costmodel.software import LAYER_LAUNCHES, NEUTRAL, StepConstants
from autopar.ir import lines as ir
from autopar.ir.lines import Compute, Convert, Function, GatherKey, Line, ParameterGather, Ref, Stored
from autopar.ir.lowered import LoweredTemplate
from autopar.ir.program import Template
from autopar.ir.setting import OptimizerState, Setting
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.ir.types import TensorType
from autopar.passes.price.bills import passes_over_memory, stage_bill, template_bill, template_seconds
from autopar.passes.price.fusion import fused_bytes
from autopar.passes.price.lines import cast_seconds, regather_seconds
from autopar.passes.rules.book import RuleBook
from autopar.plan import TemplatePlan

from .stages import (
    BF16,
    BOTH,
    GATHER_DP,
    LAUNCH,
    MEMORY,
    ON_DP,
    ON_TP,
    ROWS,
    SCALAR,
    WHOLE,
    gathered,
    in_bucket,
    non_overlapped_s,
    parameter,
    pricer,
    stage,
)


def function(lines: Iterable[Line], args: Mapping[str, tuple[TensorType, Spec]]) -> Function:
    return Function("forward", tuple(args), tuple(lines), (), dict(args))


def converted(name: str, out: str, step: Step, spec: Spec) -> Convert:
    return Convert(name, step, outs=(out,), types=(ROWS,), specs=(spec,))


X = {"x": (ROWS, BOTH)}
"""8192 bytes, of which a rank has 1024."""
CONVERTS = [
    converted("x", "a", Step("all_gather", "tp", 1), ON_DP),
    converted("a", "b", Step("all_gather", "dp", 0), WHOLE),
    converted("b", "c", Step("shard", "tp", 1), ON_TP),
    converted("c", "d", Step("all_to_all", "tp", 1, 0), Spec((("tp",), ()))),
]
COPIED_TO_GATHER = 0.1 * 4096 / MEMORY
"""Chunks of the second dim lie apart."""
COPIED_SECONDS = COPIED_TO_GATHER + 0.1 * 2048 / MEMORY + 1e-9
"""The slice is copied too."""
CONVERT_SECONDS = gathered(4096, 4) + gathered(8192, 2) + gathered(2048, 4) + COPIED_SECONDS


FULL = replace(
    NEUTRAL,
    overlap_tp=True,
    constants=StepConstants(dense_host_s=1e-3 * LAYER_LAUNCHES, zero3_exposed=0.25, tp_exposed=0.5),
)


def test_a_stage_bills_its_calls_and_what_is_between_them() -> None:
    lines = [
        ir.Prefetch(GatherKey(0), (ParameterGather("w", (GATHER_DP,), BF16),)),
        ir.TakeParameters(GatherKey(0), outs=("w_0f",)),
        *CONVERTS,
        *(ir.CallForward("block", n, (Stored("w"),), ("x",), outs=(f"y{n}",)) for n in range(3)),
        ir.SumLoss("loss", ("dp",), outs=("total",), types=(SCALAR,), specs=(Spec(()),)),
    ]
    back = [ir.CallBackward("block", n, "saved", (), (), outs=("g",)) for n in range(2)]
    reduce = (RuntimeStep("all_reduce", ("dp",)),)
    trained = parameter(ON_DP, reduce=reduce, regather=(GATHER_DP,))
    one = replace(stage(w=trained), forward=function(lines, X), backward=function(back, X))
    block = CallBill(Work(1.0, launches=2), Work(2.0, launches=5))
    setting = Setting(optimizer=OptimizerState(2.0, 4))
    bill = stage_bill(one, {"block": block}, pricer(FULL), setting)

    between, *calls = bill.calls
    assert between[0].F.computed_s == pytest.approx((1024 + 512) / MEMORY + COPIED_SECONDS)
    assert between[0].F.messages == {
        Purpose("tp", "tp_exposed"): pytest.approx(gathered(4096, 4)),
        Purpose("dp", "tp_exposed"): pytest.approx(gathered(8192, 2)),
        Purpose("tp", "ep_exposed"): pytest.approx(gathered(2048, 4)),
        Purpose("dp"): pytest.approx(in_bucket("all_reduce", 4, 2)),
    }
    whole, forward_only = replace(block, host_s=7e-3), CallBill(block.F, host_s=2e-3)
    assert calls == [(whole, 2), (forward_only, 1)]
    assert bill.parameters == ParameterTraffic(
        pytest.approx(gathered(1024, 2)),
        0.0,
        pytest.approx(in_bucket("all_reduce", 2048, 2)),
        pytest.approx(in_bucket("all_gather", 4096, 2)),
    )
    assert bill.optimizer_s == pytest.approx(7 * 2048 / MEMORY)


def test_what_is_hidden_of_a_line_does_not_count() -> None:
    gather = ir.Prefetch(GatherKey(0), (ParameterGather("w", (GATHER_DP,), None),))
    assert non_overlapped_s(gather, pricer(FULL), parameter(ON_DP)) == pytest.approx(0.25 * gathered(2048, 2))
    exposed = non_overlapped_s(CONVERTS[0], pricer(FULL), x=BOTH)
    assert exposed == pytest.approx(0.5 * gathered(4096, 4) + COPIED_TO_GATHER)


def test_a_lines_seconds_are_the_sum_of_its_messages() -> None:
    line = ir.SumLoss("loss", ("dp", "tp"), outs=("total",), types=(SCALAR,), specs=(Spec(()),))
    expected = in_bucket("all_reduce", 4, 2) + in_bucket("all_reduce", 4, 4)
    assert non_overlapped_s(line, pricer()) == pytest.approx(expected)


def block(backward: Sequence[Line] | None = None) -> tuple[LoweredTemplate, Template, TemplatePlan]:
    """relu of x, of which a rank has a half, then conversions. backward: lines of that function."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output((relu,))
    for node in (x, relu):
        node.meta["type"] = ROWS
    template = Template("block", graph, (), ("x",), (relu.name,), (None,), (None,), ())
    book = RuleBook()
    factor = next(iter(book.rule(template.op_calls[relu.name]).factors))
    plan = TemplatePlan({relu.name: (factor, "")}, {})
    compute = Compute("aten.relu.default", {"self": Ref("x")}, outs=("r",), node=relu.name)
    lowered = LoweredTemplate(
        name="block",
        planned_as="block",
        forward=function([compute, *CONVERTS], X),
        backward=None if backward is None else function(backward, X),
        saved=(),
        random=False,
        outputs=(),
        input_grads=(),
        param_grads=(),
        late_params=(),
    )
    return lowered, template, plan


def test_a_call_costs_its_ops_on_their_blocks_and_its_conversions() -> None:
    """relu reads and writes half of 8192 bytes each, at the memory's rate."""
    lowered, template, plan = block(CONVERTS[:1])
    seconds = template_seconds(lowered, plan, template, pricer(), RuleBook())
    assert seconds["F"] == pytest.approx(LAUNCH + 2 * (8192 / 2) / MEMORY + CONVERT_SECONDS)
    assert seconds["B"] == pytest.approx(gathered(4096, 4) + COPIED_TO_GATHER)
    assert seconds["W"] == 0.0


def chain(*ops: tuple[str, tuple[str, ...]], returns: str) -> tuple[Function, dict[str, float]]:
    """A function of x and s, 100 bytes each, with an op per pair of name and operands, and the bytes of its values. The op's
    name is that of its result; mm is a product, t a view."""
    lines = []
    for out, operands in ops:
        op = {"m": "aten.mm", "t": "aten.t"}.get(out[0], "aten.add")
        lines.append(Compute(op, {str(i): Ref(name) for i, name in enumerate(operands)}, outs=(out,)))
    names = ("x", "s", *(out for out, _ in ops))
    return Function("forward", ("x", "s"), tuple(lines), (returns,)), dict.fromkeys(names, 100.0)


@pytest.mark.parametrize(
    ("ops", "returns", "values"),
    [
        ((("m", ("x", "s")), ("a", ("m", "s")), ("b", ("a",)), ("m2", ("b", "x"))), "m2", 3),  # reads m, s; writes b
        ((("a", ("x",)), ("b", ("a",)), ("c", ("b",))), "c", 2),
        ((("a", ("x",)), ("b", ("a",)), ("c", ("b", "x", "a"))), "a", 2),  # a leaves, c nobody reads
        ((("a", ("x",)), ("m", ("a", "s")), ("b", ("a",))), "b", 4),  # a is written, and read again by another run
        ((("a", ("x",)), ("t", ("a",)), ("b", ("t",))), "b", 2),  # a view ends no run
        ((("m", ("x", "s")),), "m", 0),
    ],
)
def test_the_least_bytes_are_those_that_enter_and_leave_a_run(
    ops: tuple[tuple[str, tuple[str, ...]], ...], returns: str, values: int
) -> None:
    run, held = chain(*ops, returns=returns)
    assert fused_bytes(run, held, passes_over_memory) == values * 100.0


def test_a_template_bills_passes_op_by_op_and_fused() -> None:
    lowered, template, plan = block()
    call = template_bill(lowered, plan, template, pricer(FULL), RuleBook())
    assert call.F.apart_s == pytest.approx(LAUNCH + 2 * 4096 / MEMORY)
    assert call.F.fused_s == pytest.approx(1024 / MEMORY)  # nobody reads what relu makes
    assert call.F.launches == 1
    assert call.host_s == pytest.approx(1e-3)


def test_a_look_up_in_a_run_reads_of_its_table_what_it_makes() -> None:
    line = Compute("autopar.embedding", {"w": Ref("table"), "index": Ref("ids")}, outs=("rows",))
    function = Function("forward", ("table", "ids"), (line,), ("rows",))
    held = {"table": 1000.0, "ids": 10.0, "rows": 100.0}
    assert fused_bytes(function, held, passes_over_memory) == 100.0 + 10.0 + 100.0


def test_a_software_with_copies_casts_once_a_step_and_sends_them() -> None:
    emitted, copies = pricer(FULL), pricer(replace(FULL, reduce_bytes=2.0, copy_bytes=2.0))
    p = parameter(storage=WHOLE, optimizer=ON_DP, regather=(GATHER_DP,))
    assert cast_seconds(ParameterGather("w", (), BF16), p, emitted) == pytest.approx((2048 + 1024) / MEMORY)
    assert cast_seconds(ParameterGather("w", (), BF16), p, copies) == 0.0
    assert regather_seconds(p, copies) == pytest.approx(regather_seconds(p, emitted) / 2)
