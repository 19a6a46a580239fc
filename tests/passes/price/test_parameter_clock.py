"""When gathers and gradients travel, on stages made by hand: two ranks, measured links of 1 GB/s without latency."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.costmodel.bill import CallBill, Work
from autopar.costmodel.software import NEUTRAL
from autopar.ir import lines as ir
from autopar.ir.lines import Function, GatherKey, Line, ParameterGather
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.price.parameter_clock import shown_parameters
from autopar.passes.price.pricer import Pricer

from .stages import CLUSTER, GATHER_DP, ON_DP, WHOLE, stage

DP = Mesh.of(dp=2)
MIB = 1 << 20
A_MIB_S = MIB / 1e9
ALL_REDUCE, SCATTER = RuntimeStep("all_reduce", ("dp",)), RuntimeStep("reduce_scatter", ("dp",), (0,))


def pricer(exposed: float = 1e-9, passes: bool = False) -> Pricer:
    """A pricer for links on which every collective takes a nanosecond a byte. passes: gradients are added and packed by
    passes."""
    line = ((1.0, 1e-9), (1e9, 1.0))
    measured = tuple((kind, 2, line) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    level = replace(CLUSTER.levels[0], measured=measured, exposed=exposed)
    return Pricer(replace(CLUSTER, levels=(level,)), DP, replace(NEUTRAL, gradient_passes=passes))


def of_mib(name: str, mib: int, storage: Spec = WHOLE, reduce: RuntimeStep = ALL_REDUCE) -> StoredParameter:
    """A parameter of so many MiB."""
    type_ = TensorType((mib * MIB // 4, 1), torch.float32)
    return StoredParameter(name, type_, storage, ON_DP if storage == ON_DP else WHOLE, True, (), 1, (reduce,))


def staged(forward: list[Line], backward: list[Line], *parameters: StoredParameter) -> LoweredStage:
    return replace(
        stage(DP, **{p.name: p for p in parameters}),
        forward=Function("forward", (), tuple(forward), ()),
        backward=Function("backward", (), tuple(backward), ()),
    )


def called(n: int) -> ir.CallForward:
    return ir.CallForward("block", n, (), (), outs=(f"y{n}",))


def back(n: int) -> ir.CallBackward:
    return ir.CallBackward("block", n, "saved", (), (), outs=("g",))


def gradient(name: str) -> ir.AddGradient:
    return ir.AddGradient("g", name)


LONG = {"block": CallBill(Work(1.0), Work(1.0))}
"""A call that lasts longer than any message here."""


def test_the_first_gather_has_nothing_to_hide_behind_and_the_next_hides_behind_a_call() -> None:
    weights = [of_mib(name, 4, ON_DP) for name in ("a", "b")]
    keys = [GatherKey(0), GatherKey(1)]
    first, second = (
        ir.Prefetch(k, (ParameterGather(p.name, (GATHER_DP,), None),)) for k, p in zip(keys, weights, strict=True)
    )
    taken = [ir.TakeParameters(key, outs=("w",)) for key in keys]
    one = staged([first, taken[0], second, called(0), taken[1], called(1)], [], *weights)
    assert shown_parameters(one, LONG, pricer()).each_forward_s == pytest.approx(4 * A_MIB_S)
    short = {"block": CallBill(Work(A_MIB_S))}
    assert shown_parameters(one, short, pricer()).each_forward_s == pytest.approx((4 + 3) * A_MIB_S)
    assert shown_parameters(one, LONG, pricer(0.5)).each_forward_s == pytest.approx((4 + 2) * A_MIB_S)


def test_the_first_bucket_sets_out_early_and_the_last_when_backward_is_over() -> None:
    one = staged([], [back(0), gradient("a"), back(1), gradient("b"), back(2)], of_mib("a", 2), of_mib("b", 3))
    assert shown_parameters(one, LONG, pricer()) == (0.0, 0.0, pytest.approx(3 * A_MIB_S))


def test_a_bucket_that_is_full_hides_behind_the_rest_of_backward() -> None:
    lines = [back(0), gradient("a"), back(1), gradient("b"), back(2), gradient("c")]
    one = staged([], lines, of_mib("a", 2), of_mib("b", 25), of_mib("c", 1))
    assert shown_parameters(one, LONG, pricer()).reduce_s == pytest.approx(A_MIB_S)
    short = {"block": CallBill(Work(0.0), Work(2 * A_MIB_S))}
    assert shown_parameters(one, short, pricer()).reduce_s == pytest.approx((28 - 4) * A_MIB_S)


def test_a_large_gradient_is_scattered_at_once() -> None:
    scattered = [of_mib(name, mib, ON_DP, SCATTER) for name, mib in (("a", 2), ("b", 1), ("c", 8))]
    one = staged([], [back(0), *map(gradient, "abc"), back(1)], *scattered)
    assert shown_parameters(one, LONG, pricer()).reduce_s == pytest.approx(A_MIB_S), (
        "b waits for its bucket, c for none"
    )


def test_a_gradient_is_sent_after_its_last_contribution() -> None:
    shared = replace(of_mib("a", 2), contributions=2)
    one = staged([], [back(0), gradient("a"), back(1), gradient("a")], shared)
    assert shown_parameters(one, LONG, pricer()).reduce_s == pytest.approx(2 * A_MIB_S)


def test_where_computing_hides_nothing_all_of_it_is_exposed() -> None:
    one = staged([], [back(0), gradient("a"), back(1), gradient("b")], of_mib("a", 2), of_mib("b", 3))
    assert shown_parameters(one, LONG, pricer(1.0)).reduce_s == pytest.approx(5 * A_MIB_S)


def test_a_bucket_is_full_by_half_of_what_all_sums_of_gradients_have_left() -> None:
    sums = (ALL_REDUCE, RuntimeStep("all_reduce", ("tp",)))
    a, b, c = (replace(of_mib(name, mib), reduce=sums) for name, mib in (("a", 2), ("b", 12), ("c", 5)))
    lines = [back(0), gradient("a"), back(1), gradient("b"), back(2), gradient("c")]
    mesh = Mesh.of(dp=2, tp=2)
    (level,) = pricer().cluster.levels
    two_axes = Pricer(replace(CLUSTER, levels=(replace(level, group_size=2), level)), mesh, pricer().software)
    shown = shown_parameters(replace(staged([], lines, a, b, c), mesh=mesh), LONG, two_axes)
    # b is no more than half of 2 · 17 MiB; the second sum of a follows when the first is waited for, after backward
    assert shown.reduce_s == pytest.approx((2 + 2 * (12 + 5)) * A_MIB_S)


def test_messages_hide_behind_the_copying_of_the_gradients_after_them() -> None:
    one = staged([], [back(0), gradient("a"), gradient("b")], of_mib("a", 2), of_mib("b", 3))
    short = {"block": CallBill(Work(0.0), Work(0.0))}
    packing_s = 2 * 3 * MIB * pricer().copy_s  # of b, which is read and written
    assert shown_parameters(one, short, pricer()).reduce_s == pytest.approx(5 * A_MIB_S)
    assert shown_parameters(one, short, pricer(passes=True)).reduce_s == pytest.approx(5 * A_MIB_S - packing_s)
