"""The messages of hand-made lines, counted by hand, and their seconds, by the formulas of rings and trees.

The mesh is dp=2 × tp=4 on one level of links that carry 1 GB/s with 10 µs a hop. A parameter w is f32[16, 32], 2048 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve
from autopar.cluster.link import LinkLevel
from autopar.costmodel.bill import CallBill, ParameterTraffic, Purpose, Work
from autopar.costmodel.software import LAYER_LAUNCHES, NEUTRAL, Software, StepConstants
from autopar.ir import lines as ir
from autopar.ir.lines import Compute, Convert, Function, GatherKey, Line, ParameterGather, Ref, Stored
from autopar.ir.lowered import LoweredStage, LoweredTemplate, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.program import Template
from autopar.ir.setting import OptimizerState, Setting
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.ir.types import TensorType
from autopar.passes.price.bills import passes_over_memory, stage_bill, template_bill, template_seconds
from autopar.passes.price.fusion import fused_bytes
from autopar.passes.price.lines import (
    Message,
    cast_seconds,
    conversion_messages,
    gather_messages,
    gather_seconds,
    gradient_messages,
    line_messages,
    line_seconds,
    regather_messages,
    regather_seconds,
)
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.plan import TemplatePlan

F32, BF16 = torch.float32, torch.bfloat16
MESH = Mesh.of(dp=2, tp=4)
BANDWIDTH, HOP, MEMORY, LAUNCH = 1e9, 1e-5, 5e10, 3e-6
DEVICE = DeviceSpec("test", {"float32": 1e12}, 1e12, 2 * MEMORY, LAUNCH, curve=EfficiencyCurve(memory=0.5))
CLUSTER = ClusterSpec("test", ((8, DEVICE),), (LinkLevel("node", 8, BANDWIDTH, HOP),))
BUCKET_BYTES = NEUTRAL.bucket_bytes
WEIGHT, ROWS, SCALAR = TensorType((16, 32), F32), TensorType((64, 32), F32), TensorType((), F32)
WHOLE, BOTH, ON_DP, ON_TP = (Spec.replicated(2), Spec((("dp",), ("tp",))), Spec((("dp",), ())), Spec(((), ("tp",))))
GATHER_TP, GATHER_DP = RuntimeStep("all_gather", ("tp",), (1,)), RuntimeStep("all_gather", ("dp",), (0,))


def parameter(
    storage: Spec = WHOLE,
    optimizer: Spec = WHOLE,
    reduce: tuple[RuntimeStep, ...] = (),
    regather: tuple[RuntimeStep, ...] = (),
) -> StoredParameter:
    return StoredParameter("w", WEIGHT, storage, optimizer, True, regather, 1, reduce)


def stage(mesh: Mesh = MESH, **parameters: StoredParameter) -> LoweredStage:
    nothing = Function("forward", (), (), ())
    return LoweredStage(
        0, mesh, {}, nothing, None, None, None, parameters, {}, (), (), (), (), (), (), training=True, microbatches=1
    )


def pricer(software: Software | None = None) -> Pricer:
    """A new one: prices are cached in it."""
    return Pricer(CLUSTER, MESH, software)


def gathered(nbytes: float, size: int) -> float:
    """Seconds of an all_gather, reduce_scatter or all_to_all around a ring: size - 1 hops of 1/size of the bytes each."""
    return (size - 1) * (nbytes / size / BANDWIDTH + HOP)


def reduced(nbytes: float, size: int) -> float:
    """Seconds of an all_reduce: twice around the ring, or up a tree of 1 or 2 levels and down."""
    depth = {2: 1, 4: 2}[size]
    return min(2 * gathered(nbytes, size), 2 * depth * HOP + 2 * nbytes / BANDWIDTH)


def in_bucket(kind: str, nbytes: float, size: int) -> float:
    """The share of a message of 25 MiB."""
    whole = reduced(BUCKET_BYTES, size) if kind == "all_reduce" else gathered(BUCKET_BYTES, size)
    return whole * nbytes / BUCKET_BYTES


# --- parameters


def test_a_gathered_parameter_is_larger_after_every_axis() -> None:
    gather = ParameterGather("w", (GATHER_TP, GATHER_DP), None)
    assert list(gather_messages(gather, parameter(BOTH), MESH)) == [
        Message("all_gather", "tp", "gather w", 4 * 256),
        Message("all_gather", "dp", "gather w", 2 * 4 * 256),
    ]


def test_a_dim_that_two_axes_shard_is_gathered_over_both() -> None:
    gather = ParameterGather("w", (RuntimeStep("all_gather", ("dp", "tp"), (0,)),), None)
    messages = list(gather_messages(gather, parameter(Spec((("dp", "tp"), ()))), MESH))
    assert [(m.axis, m.nbytes) for m in messages] == [("dp", 512), ("tp", 2048)]


def test_a_parameter_in_16_bits_sends_half_the_bytes() -> None:
    gather = ParameterGather("w", (GATHER_DP,), BF16)
    assert list(gather_messages(gather, parameter(ON_DP), MESH)) == [Message("all_gather", "dp", "gather w", 1024)]


def test_a_parameter_that_rests_whole_sends_nothing() -> None:
    assert list(gather_messages(ParameterGather("w", (), BF16), parameter(), MESH)) == []
    assert list(gather_messages(ParameterGather("w", (GATHER_DP,), None), parameter(ON_DP), Mesh.of(dp=1))) == []


def test_a_reduced_gradient_is_smaller_after_every_scatter() -> None:
    reduce = (RuntimeStep("reduce_scatter", ("dp",), (0,)), RuntimeStep("all_reduce", ("tp",)))
    assert list(gradient_messages(parameter(optimizer=ON_DP, reduce=reduce), MESH)) == [
        Message("reduce_scatter", "dp", "gradient w", 2048, bucketed=True),
        Message("all_reduce", "tp", "gradient w", 1024, bucketed=True),
    ]


def test_a_gradient_that_is_cut_before_its_sum_sends_its_part() -> None:
    """Every rank takes its quarter without a word; the quarters are summed."""
    reduce = (RuntimeStep("shard", ("tp",), (1,)), RuntimeStep("all_reduce", ("dp",)))
    assert list(gradient_messages(parameter(optimizer=ON_TP, reduce=reduce), MESH)) == [
        Message("all_reduce", "dp", "gradient w", 512, bucketed=True)
    ]


def test_a_gradient_that_is_gathered_counts_from_its_shard() -> None:
    """f32[16@dp, 32] is gathered to where the optimizer has it whole."""
    messages = list(gradient_messages(parameter(reduce=(GATHER_DP,)), MESH))
    assert [(m.kind, m.nbytes) for m in messages] == [("all_gather", 2048)]


def test_an_updated_shard_goes_back_to_storage() -> None:
    updated = parameter(optimizer=BOTH, storage=ON_TP, regather=(GATHER_DP,))
    assert list(regather_messages(updated, MESH)) == [
        Message("all_gather", "dp", "regather w", 2048 / 4, bucketed=True)
    ]


# --- lines


@pytest.mark.parametrize(
    ("step", "nbytes"),
    [
        (Step("all_gather", "tp", 0), 4 * 100),
        (Step("reduce_scatter", "tp", 0), 100),
        (Step("all_reduce", "tp"), 100),
        (Step("all_to_all", "tp", 0, 1), 100),
    ],
    ids=lambda value: value.kind if isinstance(value, Step) else "",
)
def test_a_converted_value_sends_its_full_array(step: Step, nbytes: float) -> None:
    line = Convert("x", step, node="relu", outs=("y",))
    assert list(conversion_messages(line, {"x": 100.0}, MESH, "block")) == [
        Message(step.kind, "tp", "block.relu", nbytes)
    ]


@pytest.mark.parametrize("kind", ["slice", "to_partial"])
def test_a_change_that_every_rank_makes_alone_sends_nothing(kind: str) -> None:
    assert list(conversion_messages(Convert("x", Step(kind, "tp", 0)), {"x": 100.0}, MESH)) == []


def test_a_conversion_over_an_axis_of_one_sends_nothing() -> None:
    assert list(conversion_messages(Convert("x", Step("all_reduce", "tp")), {"x": 100.0}, Mesh.of(tp=1))) == []


def test_a_prefetch_sends_all_its_parameters() -> None:
    prefetch = ir.Prefetch(
        GatherKey(0), (ParameterGather("w", (GATHER_DP,), None), ParameterGather("v", (GATHER_TP,), None))
    )
    one = stage(w=parameter(ON_DP), v=replace(parameter(ON_TP), name="v"))
    assert list(line_messages(prefetch, {}, one)) == [
        Message("all_gather", "dp", "gather w", 2048),
        Message("all_gather", "tp", "gather v", 2048),
    ]


def test_the_loss_is_summed_over_each_axis_beside_the_gradients() -> None:
    line = ir.SumLoss("loss", ("dp", "tp"), outs=("total",), types=(SCALAR,), specs=(Spec(()),))
    assert list(line_messages(line, {}, stage())) == [
        Message("all_reduce", axis, "loss", 4, bucketed=True) for axis in ("dp", "tp")
    ]
    assert [m.axis for m in line_messages(line, {}, stage(Mesh.of(dp=1, tp=4)))] == ["tp"]


@pytest.mark.parametrize(
    "line",
    [
        Compute("aten.relu.default", {"self": Ref("x")}, outs=("y",)),
        ir.TakeParameters(GatherKey(0), outs=("w",)),
        ir.AddGradient("dw", "w"),
        ir.ParkSaved("saved", (0,), "ddr", "block"),
    ],
    ids=ir.label,
)
def test_other_lines_send_nothing(line: Line) -> None:
    assert list(line_messages(line, {"x": 100.0}, stage(w=parameter()))) == []


# --- seconds


@pytest.mark.parametrize("nbytes", [8.0, 4096.0, 1e8])
@pytest.mark.parametrize(("axis", "size"), MESH.axes)
def test_a_message_alone_costs_its_bytes_and_its_hops(axis: str, size: int, nbytes: float) -> None:
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert Message(kind, axis, "", nbytes).seconds(pricer()) == pytest.approx(gathered(nbytes, size))
    assert Message("all_reduce", axis, "", nbytes).seconds(pricer()) == pytest.approx(reduced(nbytes, size))


@pytest.mark.parametrize(("axis", "size"), MESH.axes)
def test_a_message_in_a_bucket_costs_its_share_of_it(axis: str, size: int) -> None:
    small = Message("reduce_scatter", axis, "", 2048, bucketed=True)
    assert small.seconds(pricer()) == pytest.approx(gathered(BUCKET_BYTES, size) * 2048 / BUCKET_BYTES)
    assert small.seconds(pricer()) < replace(small, bucketed=False).seconds(pricer())


def test_what_fills_a_bucket_costs_what_it_costs_alone() -> None:
    large = Message("all_gather", "dp", "", 4 * BUCKET_BYTES, bucketed=True)
    assert large.seconds(pricer()) == pytest.approx(gathered(4 * BUCKET_BYTES, 2))


def test_a_gather_in_16_bits_reads_and_writes_its_shard_once_more() -> None:
    gather = ParameterGather("w", (GATHER_DP,), BF16)
    assert gather_seconds(gather, parameter(ON_DP), pricer()) == pytest.approx(
        (1024 + 512) / MEMORY + gathered(1024, 2)
    )
    whole = replace(gather, dtype=None)
    assert gather_seconds(whole, parameter(ON_DP), pricer()) == pytest.approx(gathered(2048, 2))


def function(lines: Iterable[Line], args: Mapping[str, tuple[TensorType, Spec]]) -> Function:
    return Function("forward", tuple(args), tuple(lines), (), dict(args))


def converted(name: str, out: str, step: Step, spec: Spec) -> Convert:
    return Convert(name, step, outs=(out,), types=(ROWS,), specs=(spec,))


X = {"x": (ROWS, BOTH)}
"""8192 bytes, of which a rank has 1024."""
CONVERTS = [
    converted("x", "a", Step("all_gather", "tp", 1), ON_DP),
    converted("a", "b", Step("all_gather", "dp", 0), WHOLE),
    converted("b", "c", Step("slice", "tp", 1), ON_TP),
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
    gather = ParameterGather("w", (GATHER_DP,), None)
    assert gather_seconds(gather, parameter(ON_DP), pricer(FULL)) == pytest.approx(0.25 * gathered(2048, 2))
    exposed = line_seconds(CONVERTS[0], {"x": 1024.0}, stage(), pricer(FULL))
    assert exposed == pytest.approx(0.5 * gathered(4096, 4) + COPIED_TO_GATHER)


def test_a_lines_seconds_are_the_sum_of_its_messages() -> None:
    line = ir.SumLoss("loss", ("dp", "tp"), outs=("total",), types=(SCALAR,), specs=(Spec(()),))
    expected = in_bucket("all_reduce", 4, 2) + in_bucket("all_reduce", 4, 4)
    assert line_seconds(line, {}, stage(), pricer()) == pytest.approx(expected)


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
    plan = TemplatePlan({relu.name: (factor, "R")}, {})
    compute = Compute("aten.relu.default", {"self": Ref("x")}, outs=("r",), node=relu.name)
    lowered = LoweredTemplate(
        name="block",
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
