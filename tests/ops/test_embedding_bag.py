"""Bags of look-ups: values and gradients are torch's, tables are sharded by rows and columns, and bags are the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.program import Program
from autopar.ops.dialect import LIFT
from autopar.ops.embedding_bag import MAX, MEAN, SUM, look_up_bags
from autopar.passes.rules.book import RuleBook
from autopar.runtime.kernels import bags
from tests.ops.gradients import assert_equal_gradients, f

ROWS, WIDTH, BATCH, BAG = 12, 8, 8, 4
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
IDS = torch.tensor([[3, 3, 3, 3], [0, 3, 11, 0], [5, 6, 7, 8], [11, 10, 3, 3]])
FLAT, BEGINS = torch.tensor([3, 0, 3, 11, 0, 5, 3, 3]), torch.tensor([0, 1, 1, 5, 6])


@pytest.mark.parametrize("padding", [-1, 3, 0])
@pytest.mark.parametrize("form", ["rows", "offsets", "offsets with the last", "no bags of one"])
@pytest.mark.parametrize("mode", MODES)
def test_bags_are_torchs(mode: str, form: str, padding: int) -> None:
    index, offsets, last = {
        "rows": (IDS, None, False),
        "offsets": (FLAT, BEGINS, False),
        "offsets with the last": (FLAT, torch.cat([BEGINS, torch.tensor([8])]), True),
        "no bags of one": (FLAT.int(), torch.tensor([0, 8, 8], dtype=torch.int32), False),
    }[form]
    named = {"mode": mode, "include_last_offset": last, "padding_idx": padding if padding >= 0 else None}
    assert_equal_gradients(
        lambda w: _lifted(w, index, offsets, None, mode, padding, last),
        lambda w: F.embedding_bag(index, w, offsets, **named),
        f(ROWS, WIDTH),
    )


def _lifted(w: Tensor, index: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str, *rest: Any) -> Tensor:
    return LIFT[look_up_bags](w, index, offsets, weights, MODES[mode], *rest)


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize(("index", "offsets"), [(IDS, None), (FLAT, BEGINS)])
def test_weights_of_indices_have_gradients(index: Tensor, offsets: Tensor | None, padding: int) -> None:
    assert_equal_gradients(
        lambda w, s: _lifted(w, index, offsets, s, "sum", padding, False),
        lambda w, s: F.embedding_bag(
            index, w, offsets, mode="sum", per_sample_weights=s, padding_idx=padding if padding >= 0 else None
        ),
        *(f(ROWS, WIDTH), f(*index.shape)),
    )


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("index", "offsets"), [(IDS, None), (FLAT, BEGINS)])
def test_blocks_of_rows_give_terms_of_sums_and_their_own_gradients(
    index: Tensor, offsets: Tensor | None, weighted: bool, padding: int
) -> None:
    w, weights, begins = f(ROWS, WIDTH).detach(), f(*index.shape).detach() if weighted else None, range(0, ROWS, 4)
    whole = bags.embedding_bag(w, index, offsets, weights, padding)
    parts = [bags.embedding_bag(w[at : at + 4], index, offsets, weights, padding, offset=at) for at in begins]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(whole)
    dw = bags.embedding_bag_grad(g, index, offsets, weights, ROWS, padding, False)
    rows = [bags.embedding_bag_grad(g, index, offsets, weights, 4, padding, False, at) for at in begins]
    torch.testing.assert_close(torch.cat(rows), dw, rtol=1e-12, atol=1e-12)
    products = bags.embedding_bag_dweights(w, g, index, offsets, padding, False)
    terms = [bags.embedding_bag_dweights(w[at : at + 4], g, index, offsets, padding, False, at) for at in begins]
    torch.testing.assert_close(sum(terms), products, rtol=1e-12, atol=1e-12)


def test_a_row_that_many_bags_read_has_a_gradient_summed_in_float32() -> None:
    g, index = torch.full((4096, 1), 1.0, dtype=torch.bfloat16), torch.zeros(4096, 1, dtype=torch.int64)
    dw = bags.embedding_bag_grad(g, index, None, None, 2, -1, False)
    assert (dw[0].item(), dw.dtype) == (4096, torch.bfloat16)


# --- models -----------------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """A product of what a bag of ids stands for. weighted: ids have weights, which are data."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, *offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.head(self.table(ids, *offsets, per_sample_weights=weights))


class Weighted(Bags):
    """Each id is weighted by a learned number."""

    def __init__(self, **options: Any) -> None:
        super().__init__(mode="sum", **options)
        self.weights = nn.Parameter(torch.randn(ROWS))

    def forward(self, ids: Tensor, *_: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().forward(ids, weights=self.weights[ids])


def compiled(
    model: nn.Module, batch: tuple[Tensor, ...], constraints: Mapping[str, str], **options: Any
) -> autopar.Program:
    asked = autopar.Options(pp=1, constraints=dict(constraints), **{"mesh": {"dp": 2, "tp": 2}, **options})
    return autopar.compile(
        model,
        autopar.ClusterSpec.local(4),
        batch,
        loss_fn=F.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=asked,
    )


def assert_eagers(program: autopar.Program, model: nn.Module, batch: tuple[Tensor, ...], seeds: int = 2) -> None:
    for plan in (None, *(autopar.random_plan(program, seed) for seed in range(seeds))):
        one = program if plan is None else program.with_plan(plan)
        result = autopar.verify(one, model, batch, steps=2)
        assert result.ok, one.report()
        assert result.max_error <= 1e-9, result.errors


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, ROWS, (BATCH, BAG))
    ids[0], ids[1, 0] = 3, 3
    return ids, torch.randint(0, 4, (BATCH,))


def bag_rules(ir: Program, op: str) -> set[str]:
    """The rules of one of the ops, wherever it is called."""
    calls = (call for t in ir.templates.values() for call in t.op_calls.values() if call.op == f"autopar.{op}")
    return {str(RuleBook().rule(call)) for call in calls}


@pytest.mark.parametrize("table", ["[@tp, .]", "[., @tp]"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_table_of_bags_is_sharded_as_asked(mode: str, table: str) -> None:
    model, given = Bags(mode=mode, padding_idx=3), batch()
    program = compiled(model, given, {"table.weight": table})
    shape = {"[@tp, .]": "12@tp, 8", "[., @tp]": "12, 8@tp"}[table]
    source = program.source(0)
    assert f"weight: f32[{shape}]" in source, "the table is gathered"
    looked_up = next(line for line in source.splitlines() if "bags.embedding_bag(" in line)
    assert ("~sum(tp)" in looked_up) == ("12@tp" in shape), looked_up
    assert_eagers(program, model, given, seeds=1)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "mean", "scale_grad_by_freq": True}, {"mode": "sum"}])
def test_bags_under_random_plans_are_eagers(options: dict[str, Any]) -> None:
    model, given = Bags(padding_idx=3, **options), batch()
    assert_eagers(compiled(model, given, {}), model, given, seeds=4)


def test_weighted_bags_under_random_plans_are_eagers() -> None:
    model, given = Weighted(padding_idx=-1), batch()
    program = compiled(model, given, {"table.weight": "[@tp, .]"})
    assert bag_rules(program.ir, "embedding_bag_dweights") == {"v h, b h, b n -> b n"}
    assert_eagers(program, model, given, seeds=3)


def test_bags_that_are_rows_are_the_batch_and_may_be_cut_themselves() -> None:
    program = compiled(Bags(), batch(), {})
    assert bag_rules(program.ir, "embedding_bag") == {"v h, b n -> b h"}
    assert bag_rules(program.ir, "embedding_bag_grad") == {"b h, b n -> v h"}


def test_which_row_is_the_largest_takes_whole_bags_and_all_rows_to_say() -> None:
    program = compiled(Bags(mode="max"), batch(), {})
    assert bag_rules(program.ir, "embedding_bag_max") == {"v! h, b n! -> b h, b h"}


def test_microbatches_of_bags_are_eagers() -> None:
    model, given = Bags(mode="mean", padding_idx=3), batch()
    assert_eagers(compiled(model, given, {}, microbatches=2), model, given, seeds=0)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_that_begin_at_offsets_shard_the_table_alone(mode: str, last: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, ROWS, (16,))
    begins = torch.tensor([0, 2, 2, 7, 9, 12, 13, 15, *([16] * last)])
    model = Bags(mode=mode, padding_idx=3, include_last_offset=last)
    given = (ids, begins, torch.randint(0, 4, (8,)))
    program = compiled(model, given, {"table.weight": "[., @tp]" if mode == "max" else "[@tp, .]"})
    assert bag_rules(program.ir, "embedding_bag" + "_max" * (mode == "max")) == {
        f"v{'!' * (mode == 'max')} h, n!, o! -> b! h" + ", b! h" * (mode == "max")
    }
    assert_eagers(program, model, given)


def test_rows_of_an_index_have_no_last_offset() -> None:
    program = compiled(Bags(include_last_offset=True), batch(), {})
    assert bag_rules(program.ir, "embedding_bag") == {"v h, b n -> b h"}


def test_what_else_torchs_op_gives_can_be_read() -> None:
    class Sizes(Bags):
        def forward(self, ids: Tensor, *offsets: Tensor, weights: Tensor | None = None) -> Tensor:
            begins = torch.arange(0, ids.numel(), ids.shape[1])
            sums, _, sizes, _ = torch.embedding_bag(
                self.table.weight, ids.flatten(), begins, False, MEAN, False, None, False, None
            )
            return self.head(sums) * sizes.unsqueeze(1)

    assert_eagers(compiled(Sizes(), batch(), {}), Sizes(), batch(), seeds=0)
