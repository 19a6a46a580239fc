"""Rules: what a line means, what it allows, and what is wrong with a line that fits no shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Carried, Factor, parse_rule
from autopar.ir.spec import Spec, parse_spec

LINEAR = parse_rule("b s i, o i -> b s o", [(4, 6, 8), (2, 8)], [(4, 6, 2)])
MESH = Mesh.of(dp=2, tp=2)


def test_row_parallel_linear_owes_one_sum() -> None:
    assert LINEAR.operand_spec(0, ("", "i"), MESH) == parse_spec("[., ., @tp]")
    assert LINEAR.operand_spec(1, ("", "i"), MESH) == parse_spec("[., @tp]")
    assert LINEAR.result_spec(0, ("", "i"), MESH) == parse_spec("[., ., .] ~sum(tp)")


def test_column_parallel_linear_owes_nothing() -> None:
    assert LINEAR.operand_spec(1, ("b", "o"), MESH) == parse_spec("[@tp, .]")
    assert LINEAR.result_spec(0, ("b", "o"), MESH) == parse_spec("[@dp, ., @tp]")
    assert LINEAR.work_parts(("b", "o"), MESH) == 4


def test_two_axes_on_one_factor_nest_major_first() -> None:
    assert LINEAR.result_spec(0, ("b", "b"), MESH) == Spec((("dp", "tp"), (), ()))


def test_strategies_are_those_whose_parts_divide() -> None:
    assert LINEAR.shardable == ("b", "s", "i", "o")
    assert not LINEAR.allows(("o", "o"), MESH)
    assert not LINEAR.allows(("s", "s"), MESH)
    assert LINEAR.allows(("i", "i"), MESH)
    assert len(LINEAR.strategies(MESH)) == 5 * 5 - 2
    assert LINEAR.strategies(Mesh.of(dp=1)) == [("",)]
    assert LINEAR.whole().strategies(MESH) == [("", "")]


def test_the_major_factor_of_a_composite_dim_can_be_sharded() -> None:
    rule = parse_rule("b h d -> b (h d)", [(4, 3, 8)], [(4, 24)])
    assert set(rule.shardable) == {"b", "h"}
    assert str(rule) == "b h d! -> b (h d!)"
    flat = parse_rule("b (one d) -> b one d", [(4, 8)], [(4, 1, 8)], {"one": 1, "d": 8})
    assert set(flat.shardable) == {"b", "d"}


def test_a_minor_factor_can_be_sharded_where_the_major_one_is_cut_up() -> None:
    rule = parse_rule("b s d -> (b s) d", [(2, 8, 3)], [(16, 3)])
    assert rule.inner == ("s",)
    assert rule.allows(("b", "s"), MESH)
    assert rule.operand_spec(0, ("b", "s"), MESH) == parse_spec("[@dp, @tp, .]")
    assert rule.result_spec(0, ("b", "s"), MESH) == parse_spec("[@dp.tp, .]")
    assert not rule.allows(("s", "b"), MESH), "blocks of the composite dim would not be contiguous"
    assert not rule.allows(("", "s"), MESH)
    assert not rule.allows(("b", "s"), Mesh.of(dp=1, tp=2))
    longer = parse_rule("b s d -> (b s) d", [(4, 8, 3)], [(32, 3)])
    assert not longer.allows(("b", "s"), MESH), "two rows on a rank"


def test_a_factor_behind_a_whole_one_stays_whole() -> None:
    assert parse_rule("b h s -> (b h!) s", [(2, 2, 8)], [(4, 8)]).inner == ()
    assert parse_rule("b h s -> (b h! s)", [(2, 2, 8)], [(32,)]).inner == ()


RING = replace(
    parse_rule("s, t!, t! -> s", [(8,), (4,), (4,)], [(8,)]), carried=(Carried(("s", "t"), owed=()), Carried(("t",)))
)


def test_a_choice_with_messages_shards_its_factors_together() -> None:
    assert RING.choices() == ("s", "", "+s+t", "+t")
    assert RING.operand_spec(0, ("s", "+s+t"), MESH) == parse_spec("[@dp.tp]")
    assert RING.operand_spec(1, ("s", "+s+t"), MESH) == parse_spec("[@tp]")
    assert RING.result_spec(0, ("s", "+s+t"), MESH) == parse_spec("[@dp.tp]")
    assert RING.work_parts(("s", "+s+t"), MESH) == 4


def test_choices_with_messages_exclude_each_other() -> None:
    assert not RING.allows(("+s+t", "+s+t"), MESH), "two axes"
    assert not RING.allows(("+t", "+s+t"), MESH), "keys twice"
    assert RING.allows(("", "+t"), MESH)
    assert not RING.allows(("", "+s+t"), Mesh.of(dp=2, tp=8)), "keys do not divide"
    small = replace(RING, factors={**RING.factors, "t": Factor(1, whole=True)})
    assert small.choices() == ("s", "")


def test_a_carried_factor_owes_what_the_rule_says() -> None:
    rule = replace(parse_rule("h! -> o", [(8,)], [(3,)]), carried=(Carried(("h",), owed=(0,)),))
    assert rule.result_spec(0, ("+h", ""), MESH) == parse_spec("[.] ~sum(dp)")
    assert replace(rule, carried=(Carried(("h",)),)).result_spec(0, ("+h", ""), MESH) == parse_spec("[.]")


def test_a_contracted_factor_can_owe_a_maximum() -> None:
    rule = parse_rule("b h<max -> b", [(4, 8)], [(4,)])
    assert rule.result_spec(0, ("h", ""), MESH) == parse_spec("[.] ~max(dp)")


def test_linear_groups_let_partial_sums_pass() -> None:
    rule = parse_rule("b, b -> b", [(4,), (4,)], [(4,)], linear=[{0, 1}])
    assert rule.choices() == ("b", "", "~0")
    assert rule.operand_spec(1, ("~0", "b"), MESH) == parse_spec("[@tp] ~sum(dp)")
    assert rule.result_spec(0, ("~0", "b"), MESH) == parse_spec("[@tp] ~sum(dp)")
    assert rule.work_parts(("~0", "b"), MESH) == 2


def test_dims_of_size_one_broadcast() -> None:
    rule = parse_rule("b d, b d -> b d", [(4, 8), (1, 8)], [(4, 8)])
    assert rule.operands[1] == ((), ("d",))
    assert rule.operand_spec(1, ("b", "d"), MESH) == parse_spec("[., @tp]")


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("a, b -> a", [(4,)], [(4,)], "names 2 tensors on one side, the op has 1"),
        ("a -> a, b", [(4,)], [(4,)], "names 2 tensors on one side, the op has 1"),
        ("a b -> a", [(4,)], [(4,)], r"'a b' has 2 dims, the tensor has shape \(4,\)"),
        ("a, a -> a", [(4,), (6,)], [(4,)], "factor a is 4 and 6 at once"),
        ("(a b) -> a", [(8,)], [(4,)], r"size of factor a in '\(a b\)' is not given"),
        ("a b -> (a b)", [(4, 3)], [(8,)], r"'\(a b\)' does not multiply to shape \(8,\)"),
    ],
)
def test_a_line_that_does_not_fit_says_where(
    text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        parse_rule(text, operands, results)
