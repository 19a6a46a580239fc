"""Lines run while messages travel: which order is taken, and that nothing else changes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.lines import Compute, Convert, Function, Line, Ref, Start
from autopar.ir.lowered import LoweredStage
from autopar.ir.spec import Spec
from autopar.ir.steps import Step
from autopar.passes.lower import context, lower
from autopar.passes.lower.overlap import overlapped
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.overlap import overlapping
from autopar.plan import OVERLAPS, TemplatePlan
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from tests.measure import measure_peak
from tests.passes.price.stages import ROWS, WHOLE, pricer, reduced
from tests.zoo.models import ADAMW, token_loss
from tests.zoo.transformers import Gpt2

OWED = Spec(WHOLE.dims, (("tp", "sum"),))
MESSAGE_S = reduced(ROWS.nbytes, 4)


def op(out: str, *reads: str, spec: Spec = WHOLE) -> Compute:
    return Compute(
        "aten.relu.default", {str(i): Ref(n) for i, n in enumerate(reads)}, outs=(out,), types=(ROWS,), specs=(spec,)
    )


def sums(value: str, out: str) -> Convert:
    return Convert(value, Step("all_reduce", "tp"), value, outs=(out,), types=(ROWS,), specs=(WHOLE,))


def in_order(lines: list[Line], overlap: str, seconds: Mapping[str, float], insists: bool = False) -> list[str]:
    """The values that are made and started, in turn. seconds: of ops that take as long as so many messages."""
    function = Function("f", ("g", "x"), tuple(lines), (lines[-1].outs[0],), {"g": (ROWS, WHOLE), "x": (ROWS, WHOLE)})
    plan = TemplatePlan({}, {}, overlap=overlap, insists=insists)
    result = overlapped(function, plan, pricer(), lambda line: MESSAGE_S * seconds.get(line.outs[0], 0.0))
    assert (result.args, result.returns, result.arg_types) == (function.args, function.returns, function.arg_types)
    return [f"start {line.line.outs[0]}" if isinstance(line, Start) else line.outs[0] for line in result.lines]


BACKWARD = [op("dw", "g", "x"), op("dx", "g", spec=OWED), sums("dx", "dx_sum"), op("y", "dx_sum")]
"""Backward of a row-parallel product: the gradient of its weights, of its input, the sum of that and who reads it."""


def test_what_a_message_does_not_need_runs_while_it_travels() -> None:
    assert in_order(BACKWARD, "next", {"dw": 1.0}) == ["dx", "start dx_sum", "dw", "dx_sum", "y"]


def test_lines_that_stay_in_place_run_beside_messages_that_they_do_not_need() -> None:
    assert in_order(BACKWARD, "between", {"dw": 1.0}) == ["dw", "dx", "dx_sum", "y"]
    moved = [BACKWARD[1], BACKWARD[2], BACKWARD[0], BACKWARD[3]]
    assert in_order(moved, "between", {"dw": 1.0}) == ["dx", "start dx_sum", "dw", "dx_sum", "y"]


def test_a_function_that_does_not_become_faster_stays_as_it_is() -> None:
    assert in_order(BACKWARD, "any", {"dw": 0.0, "dx": 1.0}) == ["dw", "dx", "dx_sum", "y"]
    assert in_order(BACKWARD, "", {"dw": 1.0}) == ["dw", "dx", "dx_sum", "y"]


def test_a_plan_that_insists_moves_lines_also_where_that_is_slower() -> None:
    moved = in_order(BACKWARD, "any", {"dw": 0.0, "dx": 1.0}, insists=True)
    assert moved == ["dx", "start dx_sum", "dw", "dx_sum", "y"]


def test_lines_that_no_message_needs_wait_for_the_next_message_or_for_any() -> None:
    again = [op("z", "y", spec=OWED), sums("z", "z_sum"), op("end", "z_sum")]
    lines = [op("dw", "g", "x"), op("dv", "x"), *BACKWARD[1:], *again]
    seconds = {"dw": 1.0, "dv": 1.0}
    first = ["dx", "start dx_sum", "dw"]
    assert in_order(lines, "next", seconds) == [*first, "dv", "dx_sum", "y", "z", "z_sum", "end"]
    assert in_order(lines, "any", seconds) == [*first, "dx_sum", "y", "z", "start z_sum", "dv", "z_sum", "end"]


def test_messages_set_out_as_soon_as_they_can() -> None:
    operands = [op("a", "g", spec=OWED), op("b", "x", spec=OWED)]
    lines = [*operands, sums("a", "a_sum"), sums("b", "b_sum"), op("w", "g"), op("y", "b_sum", "a_sum")]
    order = in_order(lines, "any", {"w": 2.0})
    assert order == ["a", "start a_sum", "b", "start b_sum", "w", "b_sum", "a_sum", "y"]


# --- whole programs


@functools.cache
def program() -> autopar.Program:
    torch.manual_seed(0)
    options = autopar.Options(mesh={"dp": 1, "tp": 4}, strategy="megatron", microbatches=1, overlap=False)
    model = Gpt2(256, 64, 128, 8, 2)
    return autopar.compile(model, slow_cluster(), batch(), loss_fn=token_loss, optimizer=ADAMW, options=options)


def slow_cluster() -> autopar.ClusterSpec:
    cluster = autopar.ClusterSpec.local(4)
    return replace(cluster, levels=(replace(cluster.levels[0], bandwidth_Bps=1e8, latency_s=1e-5),))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    return ids, ids


def started(stage: LoweredStage) -> int:
    return sum(isinstance(line, Start) for t in stage.templates.values() for f in t.functions for line in f.lines)


def trained(one: autopar.Program) -> list[torch.Tensor]:
    """Losses and rank 0's shards after two steps."""

    def rank(comm: Comm) -> list[torch.Tensor]:
        session = one.in_process.session(comm, one.request.update, one.options.seed)
        session.load_weights(one.weights())
        losses = [torch.as_tensor(session.train_step(list(batch()))) for _ in range(2)]
        return [*losses, *(tensor.clone() for stage in session.stages.values() for _, tensor in stage.stored())]

    return run_threads(4, one.plan.stages[0].mesh.sizes, rank)[0]


def test_overlap_is_faster_the_further_lines_move_and_changes_no_bit() -> None:
    plain = program()
    seconds, reference = plain.predicted.step_time_s, trained(plain)
    for overlap in OVERLAPS[1:]:
        other = plain.with_plan(overlapping(plain.plan, overlap))
        assert other.predicted.step_time_s <= seconds
        seconds = other.predicted.step_time_s
        assert all(torch.equal(a, b) for a, b in zip(trained(other), reference, strict=True))
        assert other.predicted.comm_time_s == pytest.approx(plain.predicted.comm_time_s)
    assert seconds < 0.99 * plain.predicted.step_time_s
    assert started(other.stages[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
def test_peak_is_what_is_measured(overlap: str) -> None:
    other = program().with_plan(overlapping(program().plan, overlap))
    assert started(other.stages[0])
    for measured in measure_peak(other, batch()):
        assert measured == pytest.approx(other.predicted.peak_bytes, abs=256)


def test_the_search_overlaps_where_it_is_faster_and_fits() -> None:
    plain = program()
    any_order = plain.with_plan(overlapping(plain.plan, "any"))
    assert any_order.predicted.peak_bytes > plain.predicted.peak_bytes
    for memory, expected in ((any_order.predicted.peak_bytes, {"any"}), (plain.predicted.peak_bytes, {"", "between"})):
        options = replace(plain.options, overlap=True, memory_bytes=memory)
        found = autopar.compile(
            Gpt2(256, 64, 128, 8, 2), slow_cluster(), batch(), loss_fn=token_loss, optimizer=ADAMW, options=options
        )
        assert {t.overlap for t in found.plan.stages[0].templates.values()} <= expected
        assert found.predicted.peak_bytes <= memory


# --- torch's own layers, whose backward goes in pieces while messages travel


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, x, src_key_padding_mask=padding, memory_key_padding_mask=padding)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(Encoder, marks=pytest.mark.slow), Translator])
def test_every_value_of_a_function_has_a_name_of_its_own(model: type[nn.Module]) -> None:
    """A name that is given twice has readers before it is made, for which there is no place among the lines."""
    options = autopar.Options(mesh={"dp": 1, "tp": 2}, overlap=True)
    rows = torch.randn(4, 8, 16), torch.arange(8).expand(4, 8) > 5, torch.randn(4, 8, 16)
    found = autopar.compile(
        model(), autopar.ClusterSpec.local(2), rows, loss_fn=nn.functional.mse_loss, options=options
    )
    (stage,) = found.lowered.stages
    assert {t.overlap for t in found.plan.stages[0].templates.values()} >= {"any"}
    for function in (*stage.functions, *(f for t in stage.templates.values() for f in t.functions)):
        given = [*function.args, *(out for line in function.lines for out in line.outs if out != "_")]
        assert len(given) == len(set(given)), function.name


def test_plans_that_differ_in_overlap_share_their_lines_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered one after another with one memo, they are what each is with a memo of its own, insisting ones too."""
    plain = program()
    cluster = slow_cluster()
    rules, plans = RuleBook(), [overlapping(plain.plan, overlap) for overlap in OVERLAPS]

    def lines_of(plan: autopar.Plan, pricers: Pricers) -> list[tuple[Line, ...]]:
        (stage,) = lower(plain.ir, plan, pricers, rules).stages
        return [function.lines for template in stage.templates.values() for function in template.functions]

    plans += [
        replace(
            plan,
            stages=tuple(
                replace(s, templates={n: replace(t, insists=True) for n, t in s.templates.items()}) for s in plan.stages
            ),
        )
        for plan in plans
    ]
    alone = [lines_of(plan, Pricers(cluster)) for plan in plans]
    made, whole = list[str](), context.lower_in_order
    monkeypatch.setattr(context, "lower_in_order", lambda t, *rest: made.append(t.name) or whole(t, *rest))
    shared = Pricers(cluster)
    assert [lines_of(plan, shared) for plan in plans] == alone
    assert sorted(made) == sorted(plain.ir.templates)
    assert len({*map(str, alone)}) > 2
