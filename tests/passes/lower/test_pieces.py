"""Blocks in pieces of the batch: that they compute the same, what travels meanwhile, and what they hold."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.costmodel.bill import call_seconds
from autopar.costmodel.software import Software
from autopar.errors import CheckError
from autopar.ir.lines import Compute, Convert, Cut, Function, Join, Line, Start
from autopar.passes.check.lines import check
from autopar.passes.lower.body import PlannedTemplate
from autopar.passes.lower.template import least_bill, lines_in_pieces, lower_in_order
from autopar.passes.price.bills import template_bill, template_seconds
from autopar.passes.price.pricer import Pricer
from autopar.passes.search.overlap import overlapping
from autopar.passes.search.pieces import in_pieces
from autopar.plan import GIVEN, Plan
from autopar.proof.random_plans import insisting, random_plan
from autopar.proof.verify import verify
from tests.measure import measure_peak
from tests.passes.lower.test_overlap import slow_cluster
from tests.zoo.models import ADAMW, token_loss
from tests.zoo.transformers import Gpt2, Llama, Moe


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    return ids, ids


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return Moe(seq=16) if kind == "moe" else {"llama": Llama, "gpt2": Gpt2}[kind]()


@functools.cache
def whole(kind: str, strategy: str = "megatron", **mesh: int) -> autopar.Program:
    options = autopar.Options(mesh=mesh, strategy=strategy, microbatches=1, recompute="none", overlap=False)
    return autopar.compile(
        model_of(kind), slow_cluster(), batch(), loss_fn=token_loss, optimizer=ADAMW, options=options
    )


def pieces_of(program: autopar.Program, count: int, plan: Plan | None = None) -> autopar.Program:
    """The program in pieces, whether they are predicted to be faster or not."""
    moved = program.with_plan(overlapping(plan or program.plan, "any"))
    return program.with_plan(insisting(in_pieces(moved.plan, count, moved.ir, moved.lowered, program.rules)))


def _cuts(function: Function) -> list[bool]:
    return [isinstance(line, Cut) for line in function.lines]


def lines(program: autopar.Program) -> list[Line]:
    return [line for s in program.lowered.stages for t in s.templates.values() for f in t.functions for line in f.lines]


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe"])
def test_pieces_compute_what_eager_does(kind: str, count: int) -> None:
    program = pieces_of(whole(kind, dp=1, tp=4), count)
    assert any(isinstance(line, Cut) for line in lines(program))
    assert verify(program, model_of(kind), batch()).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_plans_in_pieces_compute_what_eager_does(seed: int) -> None:
    kind = ("llama", "moe", "gpt2")[seed % 3]
    program = whole(kind, "auto", dp=2, tp=2)
    in_two = pieces_of(program, 2, random_plan(program, seed, pp=1 if seed % 2 else None, pieces=1))
    assert verify(in_two, model_of(kind), batch()).ok


def test_a_template_stays_whole_where_the_host_launches_pieces_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    program = whole("llama", dp=1, tp=4)
    moved = program.with_plan(overlapping(program.plan, "any"))
    cut = in_pieces(moved.plan, 2, moved.ir, moved.lowered, program.rules)
    assert any(isinstance(line, Cut) for line in lines(program.with_plan(cut)))
    monkeypatch.setattr(Software, "launch_host_s", 1.0)
    assert not any(isinstance(line, Cut) for line in lines(program.with_plan(cut)))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_pieces_of_a_call_take_no_less_than_their_bound(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = whole(kind, dp=1, tp=4)
    moved = plain.with_plan(overlapping(plain.plan, "any"))
    cut, pricer = pieces_of(plain, count), Pricer(plain.cluster, plain.plan.stages[0].mesh)
    some_can_win, some_cannot = False, False
    for launch_s, (name, template) in itertools.product((0.0, 1e-6, 1e-4), plain.ir.templates.items()):
        monkeypatch.setattr(Software, "launch_host_s", launch_s)
        plan = cut.plan.stages[0].templates[name]
        planned = PlannedTemplate(template, plan, pricer, plain.rules)
        in_order = lower_in_order(template, plan, pricer, plain.rules, backward=True)
        before, after = (one.lowered.stages[0].templates[name] for one in (moved, cut))
        price = plan, template, Pricer(plain.cluster, pricer.mesh), plain.rules
        bill = template_bill(before, *price)
        least = least_bill(bill, in_order, lines_in_pieces(in_order, planned), planned)
        least_s = call_seconds(least, pricer.software).total_s
        assert least_s <= sum(template_seconds(after, *price).values()) * (1 + 1e-9)
        whole_s = call_seconds(bill, pricer.software).total_s
        some_can_win, some_cannot = some_can_win or least_s < whole_s, some_cannot or least_s > whole_s
    assert some_can_win
    assert some_cannot


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 4])
def test_peak_is_what_is_measured(count: int) -> None:
    program = pieces_of(whole("llama", dp=1, tp=4), count)
    for measured in measure_peak(program, batch()):
        assert measured == pytest.approx(program.predicted.peak_bytes, abs=512)


def test_a_message_of_one_piece_travels_while_another_is_computed_with() -> None:
    program = pieces_of(whole("llama", dp=1, tp=4), 2)
    forward = max((t.forward for t in program.lowered.stages[0].templates.values()), key=lambda f: len(f.lines))
    sent = [line for line in forward.lines if isinstance(line, Start) and isinstance(line.line, Convert)]
    plain = whole("llama", dp=1, tp=4)
    before = max((t.forward for t in plain.lowered.stages[0].templates.values()), key=lambda f: len(f.lines))
    assert len(sent) > sum(isinstance(line, Convert) and line.step.kind != "shard" for line in before.lines)


def test_a_plan_in_pieces_comes_back_from_its_file() -> None:
    plan = pieces_of(whole("llama", dp=1, tp=4), 4).plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert {t.pieces for t in plan.stages[0].templates.values()} == {4}


def test_what_is_converted_before_a_call_is_converted_inside() -> None:
    plain = whole("llama", dp=1, tp=4)
    program = pieces_of(plain, 2)
    given = [key for t in program.plan.stages[0].templates.values() for key in t.specs if key.endswith(GIVEN)]
    between = [sum(isinstance(line, Convert) for line in one.lowered.stages[0].lines) for one in (plain, program)]
    assert bool(given) == (between[1] < between[0])


def test_pieces_that_are_not_equal_are_found() -> None:
    program = pieces_of(whole("llama", dp=1, tp=4), 2)
    stage = program.lowered.stages[0]
    name, template = next((n, t) for n, t in stage.templates.items() if any(_cuts(t.forward)))
    for wrong in (lambda line: replace(line, outs=line.outs[:1], types=line.types[:1], specs=line.specs[:1]),):
        changed = tuple(wrong(line) if isinstance(line, Cut) else line for line in template.forward.lines)
        bad = replace(template, forward=replace(template.forward, lines=changed))
        with pytest.raises(CheckError):
            check(replace(stage, templates={**stage.templates, name: bad}), program.rules)


def test_sums_of_pieces_are_in_the_order_of_the_pieces() -> None:
    program = pieces_of(whole("llama", dp=1, tp=4), 4)
    sums = [line for line in lines(program) if isinstance(line, Join) and line.dim is None]
    assert sums
    assert all(len(line.pieces) == 2 for line in sums)


def test_gradients_that_are_summed_beside_one_that_is_cut_are_made_in_pieces() -> None:
    """The backward of a layer norm gives a block of its input's gradient, and sums over samples for weight and bias."""
    plain = whole("gpt2", dp=1, tp=4)
    backward = [
        sum(isinstance(line, Compute) and line.op == "autopar.layer_norm_backward" for line in lines(program))
        for program in (plain, pieces_of(plain, 2))
    ]
    assert backward[1] == 2 * backward[0] > 0


class Padded(torch.nn.Module):
    """Encoder layers under a mask of padding: values that forward has whole and backward cuts."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = (
            torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            torch.nn.Linear(16, 1),
        )

    def forward(self, x: torch.Tensor, padding: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.encoder(x, src_key_padding_mask=padding))[..., 0] - y).pow(2).mean()


def padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    padding = torch.zeros(8, 6, dtype=torch.bool)
    padding[:, 4:] = True
    return torch.randn(8, 6, 16), padding, torch.randn(8, 6)


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}])
def test_pieces_keep_off_the_names_that_forward_left_on_the_tape(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, batch = Padded(), padded()
    options = autopar.Options(mesh=mesh, recompute="none", overlap=False)
    program = autopar.compile(model, slow_cluster(), batch, optimizer=ADAMW, options=options)
    for count in (2, 4):
        assert verify(pieces_of(program, count), model, batch).ok


def test_a_plan_that_cuts_along_a_dim_that_is_not_there_is_refused() -> None:
    program = pieces_of(whole("llama", dp=1, tp=4), 2)
    stage = program.plan.stages[0]
    wrong = {n: replace(t, cut=tuple((value, 7) for value, _ in t.cut)) for n, t in stage.templates.items()}
    with pytest.raises(autopar.PlanError, match="along dim 7"):
        program.with_plan(replace(program.plan, stages=(replace(stage, templates=wrong),)))
