"""The seconds of a mixture of experts on a rank, by hand: as emitted programs run it, and as frameworks do that keep its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve
from autopar.cluster.link import LinkLevel
from autopar.costmodel.bill import Purpose
from autopar.costmodel.software import NEUTRAL, Software, StepConstants
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ir.rule import Rule, Strategy
from autopar.ops.experts import _experts, experts_grad
from autopar.passes.price.lines import dispatches
from autopar.passes.price.mixtures import moved_bytes
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.sends import sent_by
from autopar.runtime.comm.devices import CPU, LEAST_CUDA
from benchmarks.published_compiled import compile_row
from tests.ops.execution import Case, as_node, rule_of

TOKENS, D, F, EXPERTS, CHOICES, WIDTH = 1024, 64, 256, 8, 2, 4
PEAK, MEMORY, LAUNCH = 1e12, 1e11, 2e-6
CURVE = EfficiencyCurve(matmul=0.5, memory=0.5, half_dim=16.0)
DEVICE = DeviceSpec("test", {"float32": PEAK}, 1e12, 2 * MEMORY, LAUNCH, curve=CURVE)
NODE, NET = LinkLevel("node", 4, 1e11, 1e-6), LinkLevel("net", 16, 1e10, 1e-5)
CLUSTER = ClusterSpec("test", ((16, DEVICE),), (NODE, NET))
FRAMEWORK = replace(
    NEUTRAL, keeps_rows=True, kernels="fused", constants=StepConstants(grouped_share=0.8, permute_passes=4.0, fused_passes=1.5)
)  # fmt: skip
"""Passes over rows as a framework's kernels take, those between products as few as can be and a half."""
FLOPS_IN, FLOPS_OUT = 2.0 * TOKENS * CHOICES * D * 2 * F, 2.0 * TOKENS * CHOICES * D * F

MESH = Mesh.of(dp=2, ep=4, tp=2)
APART: Strategy = ("t0", "+t0+e", "f")
ROWS, INNER = TOKENS * CHOICES / 8, F / 2
ROW_BYTES, INNER_BYTES = ROWS * D * WIDTH, ROWS * INNER * 3 * WIDTH
"""Bytes of rows, and of their inner layer, of which gate and up are read and their product is written."""
SHARE = 0.5 / ((1 + 16 / (ROWS / 2)) * (1 + 16 / (1.5 * INNER)) * (1 + 16 / D))
"""The share of the peak that products of the rows of one of a rank's two experts reach."""


def mixture(backward: bool, promise: float = 1.0) -> tuple[OpCall, Rule]:
    """1024 tokens that choose 2 of 8 experts, gated; forward, or all gradients. promise: most rows over the mean."""
    x, chosen = torch.zeros(TOKENS, D), torch.zeros(TOKENS, CHOICES, dtype=torch.long)
    layers = (torch.zeros(EXPERTS, D, 2, F), None, torch.zeros(EXPERTS, F, D), None)
    operands = (x, *layers, chosen, torch.zeros(TOKENS, CHOICES))
    config = ("silu", 1.0, None, 0.0, promise, "stop")
    case = (
        Case(experts_grad, (x, *operands, True, *config), {}) if backward else Case(_experts, (*operands, *config), {})
    )
    call = op_call(as_node(case, case.whole())[0])
    return call, rule_of(call)


@pytest.mark.parametrize(("kind", "padding"), [("cpu", 1.0), ("gpu", 1.75)])
@pytest.mark.parametrize("backward", [False, True])
def test_emitted_programs_make_the_first_product_again_and_move_rows_op_by_op(
    backward: bool, kind: str, padding: float
) -> None:
    """On a GPU a rank's 256 rows take messages of 112 to each of 4, which is six standard deviations more than 64."""
    call, rule = mixture(backward)
    flops = 3 * FLOPS_IN + 2 * FLOPS_OUT if backward else FLOPS_IN + FLOPS_OUT
    moved = (15 if backward else 11) * ROW_BYTES + 5 / 3 * (
        1.5 if backward else 1
    ) * INNER_BYTES  # silu, times gate: 5 for 3
    expected = LAUNCH + flops / MESH.size / (PEAK * SHARE) + padding * moved / MEMORY
    cluster = replace(CLUSTER, devices=((16, replace(DEVICE, kind=kind)),))
    assert Pricer(cluster, MESH, NEUTRAL).op_s(call, rule, APART) == pytest.approx(expected)


@pytest.mark.parametrize("promise", [1.0, 4.0])
def test_messages_are_priced_by_the_mean_rows_as_products_are(promise: float) -> None:
    rows = TOKENS / 8 * CHOICES * D * WIDTH
    for backward, expected in ((False, [rows, rows]), (True, [rows, *2 * [rows * (1 + 1 / D)]])):
        call, rule = mixture(backward, promise)
        sent = [one.nbytes for one in sent_by(call, rule, APART, MESH) if one.kind == "exchange"]
        assert sent == pytest.approx(expected)


@pytest.mark.parametrize(("promise", "padding"), [(1.0, 1.75), (2.0, 2.0), (8.0, 4.0)])
def test_padded_messages_are_priced_as_they_are_sent(promise: float, padding: float) -> None:
    for backward in (False, True):
        call, rule = mixture(backward, promise)
        padded, exact = (sent_by(call, rule, APART, MESH, device) for device in (LEAST_CUDA, CPU))
        for one, other in zip(padded, exact, strict=True):
            factor = padding if one.kind == "exchange" else 1.0
            assert one.nbytes == pytest.approx(factor * other.nbytes)


@pytest.mark.parametrize(("dispatch", "passes"), [("once", 4 / 3), ("each", 4)])
@pytest.mark.parametrize("backward", [False, True])
def test_frameworks_that_keep_rows_do_not(backward: bool, dispatch: str, passes: float) -> None:
    call, rule = mixture(backward)
    flops = (2 if backward else 1) * (FLOPS_IN + FLOPS_OUT)
    moved = (1.5 if backward else 1) * (passes * ROW_BYTES + 1.5 * INNER_BYTES)
    expected = LAUNCH + flops / MESH.size / (PEAK * SHARE * 0.8) + moved / MEMORY
    software = replace(FRAMEWORK, dispatch=dispatch)
    assert Pricer(CLUSTER, MESH, software).op_s(call, rule, APART) == pytest.approx(expected)


def test_rows_that_stay_are_neither_sorted_nor_put_back_elsewhere() -> None:
    call, rule = mixture(False)
    pricer = Pricer(CLUSTER, MESH, NEUTRAL)
    apart, whole = (pricer.grouped(call, rule, strategy) for strategy in (APART, ("t0", "t0", "f")))
    assert apart is not None
    assert whole is not None
    assert (apart.passes, apart.groups, apart.row_bytes) == (11, EXPERTS // 4, ROW_BYTES)
    assert (whole.passes, whole.groups, whole.row_bytes) == (7, EXPERTS, ROW_BYTES)


def test_a_token_goes_once_to_a_node_from_one_of_the_ranks_that_hold_it() -> None:
    """A token on 4 ranks of 2 nodes has 1.3125 of the other three to visit, 2/3 of them inside, and 0.75 of the other node."""
    call, rule = mixture(True)
    grouped = Pricer(CLUSTER, MESH, FRAMEWORK).grouped(call, rule, APART)
    assert grouped is not None
    sent = list(dispatches(call, rule, APART, grouped, MESH))
    nbytes = TOKENS / 8 * D * WIDTH / 2
    assert [(d.axes, d.nbytes, d.choices) for d in sent] == [(("ep",), nbytes, CHOICES)] * 2
    inside_s, across_s = nbytes * 1.3125 * 2 / 3 / NODE.rate_Bps(), nbytes * 0.75 / NET.rate_Bps()
    latency_s = NODE.base_s + NODE.latency_s + NET.base_s + NET.latency_s
    assert sent[0].seconds(Pricer(CLUSTER, MESH, FRAMEWORK)) == pytest.approx(max(inside_s, across_s) + latency_s)
    assert sent[0].purpose == Purpose("ep", "ep_exposed")
    each = Pricer(CLUSTER, MESH, replace(FRAMEWORK, dispatch="each"))
    by_choice_s = nbytes * CHOICES / 2 / NET.rate_Bps()
    assert sent[0].seconds(each) == pytest.approx(by_choice_s + latency_s)


def test_what_shows_of_dispatches_is_said_by_how_they_are_made() -> None:
    fitted, shown = FRAMEWORK.constants.ep_exposed, [("once", False), ("each", False), ("once", True), ("each", True)]
    shares = [replace(FRAMEWORK, dispatch=how, overlap_ep=over).exposed_share("ep_exposed") for how, over in shown]
    assert shares == [fitted, 1.0, 0.0, 0.0]


def test_graphs_leave_the_host_what_they_do_not_hold() -> None:
    none, layers, step = (replace(FRAMEWORK, graphs=graphs) for graphs in ("", "layers", "step"))
    assert none.launch_host_s > 0 == layers.launch_host_s == step.launch_host_s
    assert none.mixture_host_s(4) == layers.mixture_host_s(4) > 0 == step.mixture_host_s(4)


def test_the_host_launches_a_mixture_by_its_experts() -> None:
    software = Software(constants=StepConstants(dense_host_s=1e-3, moe_host_s=4e-3, expert_host_s=1e-4))
    assert software.mixture_host_s(16) == pytest.approx(3e-3 + 16e-4)
    assert NEUTRAL.mixture_host_s(16) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 16, "ep": 8, "zero": 1},
        {"dp": 8, "tp": 2, "ep": 4, "zero": 1, "sequence_parallel": True},
        {"dp": 4, "pp": 4, "ep": 4, "zero": 1},
    ],
    ids=["dp ep", "dp ep tp", "dp ep pp"],
)
def test_both_writers_of_bills_say_the_same_of_a_mixture(plan: dict[str, int]) -> None:
    """The prediction of `compile` under a published plan, read as the framework's step, is that of the closed formulas."""
    row = {
        "id": "mixtral",
        "series": "mixtral",
        "category": {"arch": "moe"},
        "score_on": ["step_time"],
        "derived": {"step_time_s": 1.0},
        "model": {
            "layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "seq_len": 4096,
            "dtype": "bf16", "gated_mlp": True, "experts": 8, "topk": 2,
        },
        "hardware": {"gpu": "H100-SXM5-80GB", "gpus": 16, "gpus_per_node": 8},
        "parallel": plan,
        "batch": {"global": 128, "micro": 1},
        "schedule": "1f1b" if plan.get("pp") else "none",
    }  # fmt: skip
    compiled = compile_row(row, 1.0)
    assert compiled.predicted_s == pytest.approx(compiled.estimated_s, rel=0.05)


def test_over_two_axes_a_row_is_sent_once_to_a_node_and_then_to_every_expert_inside() -> None:
    """The choices of a token, 2 among 4 nodes, are 1.75 different ones; there and back, what is computed between hides
    nothing forward."""
    call, rule = mixture(False)
    mesh = Mesh.of(dp=4, ep=2)
    pricer, both = Pricer(CLUSTER, mesh, NEUTRAL), ("+t0+e", "+t0+e")
    sent = sent_by(call, rule, both, mesh)
    row, rows = D * WIDTH, TOKENS / 8
    copies, passed_on = 1.75 * rows, CHOICES * rows
    of_token = CHOICES * (8 + WIDTH)
    gathered = 8.0 * (EXPERTS + 4)
    assert [(s.kind, s.axis, s.nbytes) for s in sent] == [
        ("all_gather", "ep", 2 * gathered),
        ("all_gather", "dp", 8 * gathered),
        ("exchange", "dp", copies * (row + of_token)),
        ("all_gather", "ep", 8.0 * EXPERTS * 2 / 4),
        ("exchange", "ep", passed_on * row),
        ("exchange", "ep", passed_on * row),
        ("exchange", "dp", copies * row),
    ]
    grouped = pricer.grouped(call, rule, both)
    assert grouped is not None
    legs = moved_bytes(grouped, NEUTRAL, (4, 2)) - moved_bytes(grouped, NEUTRAL, (8,))
    assert legs == pytest.approx(6 * copies * row)


def test_what_hides_messages_hides_those_between_nodes() -> None:
    call, rule = mixture(True)
    work = 3 * FLOPS_IN + 2 * FLOPS_OUT
    shares = [FLOPS_IN / work, (FLOPS_IN + FLOPS_OUT) / work]
    along_dp, along_ep = (
        [s.behind for s in sent_by(call, rule, ("+t0+e", "+t0+e"), Mesh.of(dp=4, ep=2)) if s.axis == axis and s.behind]
        for axis in ("dp", "ep")
    )
    assert (along_dp, along_ep) == (pytest.approx(shares), [])
