"""The messages of hand-made lines, counted by hand, and their seconds, by the formulas of rings and trees.

The mesh is dp=2 × tp=4 on one level of links that carry 1 GB/s with 10 µs a hop. A parameter w is f32[16, 32], 2048 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir import lines as ir
from autopar.ir.lines import Compute, Convert, GatherKey, Line, ParameterGather, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.passes.price.lines import (
    Message,
    conversion_messages,
    gather_messages,
    gradient_messages,
    line_messages,
    regather_messages,
)
from autopar.runtime.gradients.bucket_sizes import BUCKETED
from autopar.runtime.gradients.gather import GATHERED

from .stages import (
    BF16,
    BOTH,
    BUCKET_BYTES,
    GATHER_DP,
    GATHER_TP,
    MEMORY,
    MESH,
    ON_DP,
    ON_TP,
    SCALAR,
    WEIGHT,
    WHOLE,
    gathered,
    non_overlapped_s,
    parameter,
    pricer,
    reduced,
    stage,
)

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
    assert [(m.kind, m.nbytes, m.bucketed) for m in messages] == [("all_gather", 2048, False)]


def test_a_gather_of_its_own_is_no_part_of_a_cheap_sum() -> None:
    """Inside a bucket a scatter and a gather would be as cheap as a sum; the runtime sends that gather by itself."""
    owed = replace(WHOLE, partial=(("dp", "sum"),))
    prices = pricer()
    (step,) = (s for s, _ in prices.lattice(WEIGHT, joined=BUCKETED).path(owed, WHOLE))
    assert step.kind == "all_reduce"
    alone_s, joined_s = (prices.joined_s(kinds)("all_gather", 2048, "dp") for kinds in (BUCKETED, GATHERED))
    assert alone_s == pytest.approx(gathered(2048, 2))
    assert joined_s == pytest.approx(gathered(BUCKET_BYTES, 2) * 2048 / BUCKET_BYTES)


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


@pytest.mark.parametrize("kind", ["shard", "to_partial"])
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
    low, whole = (ir.Prefetch(GatherKey(0), (ParameterGather("w", (GATHER_DP,), dtype),)) for dtype in (BF16, None))
    assert non_overlapped_s(low, pricer(), parameter(ON_DP)) == pytest.approx((1024 + 512) / MEMORY + gathered(1024, 2))
    assert non_overlapped_s(whole, pricer(), parameter(ON_DP)) == pytest.approx(gathered(2048, 2))
