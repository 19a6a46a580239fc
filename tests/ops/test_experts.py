"""Mixtures of experts in one op against a loop over experts, on one rank and with rows travelling between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import autopar
from autopar.counter import ByteCounter
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ir.rule import factors_of
from autopar.ops import experts as ops
from autopar.ops.registry import find
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.rules.sends import sent_by
from autopar.passes.shard.uneven import balanced
from autopar.runtime import ExpertOverflow, run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.kernels.experts import experts as local
from tests.ops.execution import Case, as_node, check_strategy, rule_of

GATES: dict[str, tuple[tuple[Any, ...], int, Callable[..., Tensor]]] = {
    "plain relu": (("relu", 1.0, None, 0.0), 1, lambda h: F.relu(h[0])),
    "plain gelu": (("gelu", 1.0, None, 0.0), 1, lambda h: F.gelu(h[0])),
    "relu squared": (("relu2", 1.0, None, 0.0), 1, lambda h: F.relu(h[0]) ** 2),
    "swiglu": (("silu", 1.0, None, 0.0), 2, lambda h: F.silu(h[0]) * h[1]),
    "geglu": (("gelu_tanh", 1.0, None, 0.0), 2, lambda h: F.gelu(h[0], approximate="tanh") * h[1]),
    "gpt-oss": (
        ("silu", 1.702, 0.7, 1.0),
        2,
        lambda h: h[0].clamp(max=0.7) * torch.sigmoid(1.702 * h[0].clamp(max=0.7)) * (h[1].clamp(-0.7, 0.7) + 1),
    ),
}
"""Arguments of the op, gate and up or one, and what they are by torch's own functions."""
ROUTES = ("any", "all to one", "some experts have none", "one expert twice", "some choices are none")


@dataclass(frozen=True)
class Mixture:
    """A mixture on tensors, whose op and whose loop are to agree."""

    gate: str
    x: Tensor
    chosen: Tensor
    weights: Tensor
    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None
    promise: tuple[float, str] = (1.25, "chunk")

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return (self.x, self.w_in, self.b_in, self.w_out, self.b_out, self.chosen, self.weights)

    def loop(
        self, x: Tensor, w_in: Tensor, b_in: Any, w_out: Tensor, b_out: Any, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """Expert after expert, as its definition says."""
        _, _, value = GATES[self.gate]
        y = torch.zeros_like(x)
        for i in range(len(w_in)):
            for choice in range(chosen.shape[-1]):
                h = torch.einsum("...d,dgf->g...f", x, w_in[i])
                h = h if b_in is None else h + b_in[i].reshape(h.shape[0], *[1] * (x.ndim - 1), -1)
                out = value(h) @ w_out[i] + (0 if b_out is None else b_out[i])
                weight = torch.where(
                    chosen[..., choice] == i, weights[..., choice], torch.zeros_like(weights[..., choice])
                )
                y = y + out * weight.unsqueeze(-1)
        return y

    def expected(self, g: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loop's value, and the gradients of x, weights and the layers; one zero for a bias that is absent."""
        leaves = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in self.operands]
        y = self.loop(*leaves)  # type: ignore[arg-type]
        order = [leaves[0], leaves[6], *leaves[1:5]]
        grads = torch.autograd.grad(y, [t for t in order if t is not None], g, allow_unused=True)
        found = iter(grads)
        zero = torch.zeros(1, dtype=torch.float64)
        return y.detach(), [
            zero if t is None else torch.zeros_like(t) if (grad := next(found)) is None else grad for t in order
        ]

    def cases(self, g: Tensor) -> tuple[Case, Case]:
        config = GATES[self.gate][0]
        forward = Case(ops._experts, (*self.operands, *config, *self.promise), {})
        return forward, Case(ops.experts_grad, (g, *self.operands, True, *config, *self.promise), {})


def mixture(
    tokens: tuple[int, ...],
    count: int,
    choices: int,
    *,
    gate: str = "swiglu",
    route: str = "any",
    biased: bool = False,
    seed: int = 0,
) -> Mixture:
    generator = torch.Generator().manual_seed(seed)

    def f(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    d, inner, halves = 3, 4, GATES[gate][1]
    chosen = torch.randint(0, count, (*tokens, choices), generator=generator)
    if route == "all to one":
        chosen = torch.full_like(chosen, count - 1)
    elif route == "some experts have none":
        chosen = chosen // 2
    elif route == "one expert twice":
        chosen = chosen[..., :1].expand(chosen.shape).contiguous()
    elif route == "some choices are none":
        chosen = torch.where(torch.rand(chosen.shape, generator=generator) < 0.3, count, chosen)
    biases = (f(count, halves, inner), f(count, d)) if biased else (None, None)
    w_in, w_out = f(count, halves, inner, d).permute(0, 3, 1, 2), f(count, inner, d)
    return Mixture(gate, f(*tokens, d), chosen, f(*tokens, choices), w_in, biases[0], w_out, biases[1])


def check(one: Mixture, mesh: Mesh, strategy: tuple[str, ...], seed: int = 0) -> None:
    """Value and gradients under a strategy are those of the loop."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(one.x.shape, generator=generator, dtype=torch.float64)
    y, grads = one.expected(g)
    forward, backward = one.cases(g)
    check_strategy(forward, [y], mesh, strategy, generator)
    check_strategy(backward, [*grads], mesh, strategy, generator)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_the_op_computes_the_loop_over_experts_and_its_gradients(gate: str, biased: bool) -> None:
    one = mixture((3, 2), 4, 2, gate=gate, biased=biased)
    leaves = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in one.operands]
    x, w_in, b_in, w_out, b_out, chosen, weights = leaves
    act, alpha, limit, shift = GATES[gate][0]
    y = autopar.experts(x, chosen, weights, w_in, w_out, b_in, b_out, act=act, alpha=alpha, limit=limit, shift=shift)
    g = torch.randn_like(y)
    expected, grads = one.expected(g)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-11, atol=1e-11)
    order = [t for t in (x, weights, w_in, b_in, w_out, b_out) if t is not None]
    wanted = [grad for grad in grads if biased or grad.shape != (1,)]
    for got, grad in zip(torch.autograd.grad(y, order, g), wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-11, atol=1e-11)


def sweep(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        ranks=st.sampled_from([2, 4, 8]),
        per_rank=st.sampled_from([(1,), (2,), (5,), (1, 3)]),
        experts=st.sampled_from([1, 2, 3]),
        choices=st.sampled_from([1, 2, 8]),
        gate=st.sampled_from(list(GATES)),
        route=st.sampled_from(ROUTES),
        biased=st.booleans(),
        beside=st.sampled_from(["", "f", "t0", "e alone"]),
        imbalance=st.sampled_from([1.0, 1.25, 8.0]),
        seed=st.integers(0, 99),
    )
    def every(
        ranks: int, per_rank: tuple[int, ...], experts: int, choices: int, gate: str, route: str, biased: bool, beside: str,
        imbalance: float, seed: int,
    ) -> None:  # fmt: skip
        tokens = (per_rank[0] * ranks, *per_rank[1:])
        one = mixture(tokens, experts * ranks, choices, gate=gate, route=route, biased=biased, seed=seed)
        one = replace(one, promise=(imbalance, "chunk"))
        if beside == "e alone":
            check(one, Mesh.of(a=ranks), ("e",))
        elif beside and ranks > 2:
            check(one, Mesh.of(a=2, b=ranks // 2), (beside, "+t0+e") if seed % 2 else ("+t0+e", beside))
        else:
            check(one, Mesh.of(a=ranks), ("+t0+e",))

    every()


def test_rows_that_travel_to_their_experts_give_the_loops_values_and_gradients() -> None:
    sweep(20)


@pytest.mark.slow
def test_rows_that_travel_to_their_experts_give_the_loops_values_and_gradients_at_length() -> None:
    sweep(600)


@pytest.mark.few(17)
@pytest.mark.parametrize("promise", [(1.25, "chunk"), (10.0, "stop")], ids=str)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ranks", "experts", "tokens"), [(2, 3, (3,)), (3, 8, (7, 2)), (3, 4, (6,)), (7, 60, (9,))])
def test_ranks_with_unequal_numbers_of_experts_and_tokens_give_the_loops_values_and_gradients(
    ranks: int, experts: int, tokens: tuple[int, ...], route: str, promise: tuple[float, str]
) -> None:
    one = replace(mixture(tokens, experts, 2, route=route, biased=True), promise=promise)
    check(one, Mesh.of(a=shares(ranks, experts, tokens[0])), ("+t0+e",))


def shares(ranks: int, *units: int) -> Shares:
    """An axis along which what does not divide is shared as equally as it can be."""
    return Shares(*(balanced(n, ranks) for n in units if n % ranks))


def test_the_rank_with_most_experts_decides_what_a_mixture_takes() -> None:
    """The first of 3 ranks has 3 of 8 experts: work, and rows that come, are 9 eighths of the mean."""
    for case in mixture((27,), 8, 2).cases(torch.zeros(27, 3, dtype=torch.float64)):
        call = op_call(as_node(case, case.whole())[0])
        rule, mesh = rule_of(call), Mesh.of(a=shares(3, 8))
        assert rule.work_parts(("+t0+e",), mesh) == Fraction(8, 3)
        rows, equal = (
            [sent.nbytes for sent in sent_by(call, rule, ("+t0+e",), one) if sent.kind == "exchange"]
            for one in (mesh, Mesh.of(a=3))
        )
        assert rows == pytest.approx([9 / 8 * n for n in equal])


def test_two_axes_that_carry_take_equal_blocks() -> None:
    call = op_call(
        as_node(case := mixture((18,), 6, 2).cases(torch.zeros(18, 3, dtype=torch.float64))[0], case.whole())[0]
    )
    rule = rule_of(call)
    assert rule.allows(("+t0+e", "t0"), Mesh.of(a=shares(4, 6), b=3))
    assert not rule.allows(("+t0+e", "+t0+e"), Mesh.of(a=Shares((2, 1)), b=2))
    assert rule.allows(("+t0+e", "+t0+e"), Mesh.of(a=3, b=2))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("choices", [1, 2, 8])
def test_uneven_routing_of_one_token_a_rank(route: str, choices: int) -> None:
    check(mixture((4,), 4, choices, route=route), Mesh.of(a=4), ("+t0+e",))


def test_nothing_is_owed_over_an_axis_that_carries() -> None:
    forward, backward = mixture((4,), 4, 2).cases(torch.zeros(4, 3, dtype=torch.float64))
    for case in (forward, backward):
        call = op_call(as_node(case, case.whole())[0])
        rule, mesh = rule_of(call), Mesh.of(a=2)
        for i, labels in enumerate(rule.results):
            spec = rule.result_spec(i, ("+t0+e",), mesh)
            assert labels is None or (spec is not None and not spec.partial)


def test_work_is_priced_by_the_rows_of_one_expert() -> None:
    """An expert that has the rows of all ranks has as many as on one rank; where tokens alone are cut, each has a share. Of an
    inner dim of 4 the first product makes both halves, the second reads one: 6 in the mean."""
    for case in mixture((32,), 4, 2).cases(torch.zeros(32, 3, dtype=torch.float64)):
        call = op_call(as_node(case, case.whole())[0])
        dims, mesh, rule = find(call.op).dims, Mesh.of(a=2), rule_of(call)  # type: ignore[union-attr]
        assert dims is not None
        for choice, wanted in (
            ("", (16, 6, 3)),
            ("t0", (8, 6, 3)),
            ("+t0+e", (16, 6, 3)),
            ("e", (16, 6, 3)),
            ("f", (16, 3, 3)),
        ):
            parts = {name: 2 if name in factors_of(choice) else 1 for name in rule.factors}
            assert dims(call, parts, rule.work_parts((choice,), mesh)) == wanted, choice


def test_one_expert_is_priced_by_all_rows() -> None:
    """A dim of size one is no factor of a rule, so that nobody says into how many parts it is cut."""
    for case in mixture((32,), 1, 1).cases(torch.zeros(32, 3, dtype=torch.float64)):
        call, mesh = op_call(as_node(case, case.whole())[0]), Mesh.of(a=2)
        facts, rule = find(call.op), rule_of(call)
        assert facts is not None
        assert facts.dims is not None
        assert facts.grouped is not None
        parts, share = rule.parts(("t0",), mesh), rule.work_parts(("t0",), mesh)
        assert facts.dims(call, parts, share) == (16, 6, 3)
        assert facts.grouped(call, parts, share).groups == 1


def on_ranks(one: Mixture, ranks: int, promise: tuple[float, str]) -> list[Any]:
    """The results of every rank, or the error that it raises."""

    def on_rank(comm: Comm) -> Any:
        own = [None if t is None else t.chunk(ranks)[comm.rank] for t in one.operands]
        try:
            return local.experts(*own, *GATES[one.gate][0], *promise, "model.py:7", along=Along(comm, "ep"))  # type: ignore[arg-type]
        except ExpertOverflow as error:
            return error

    return run_threads(ranks, {"ep": ranks}, on_rank)


def test_more_rows_than_promised_stop_every_rank_alike_by_name() -> None:
    one = mixture((8,), 4, 2, route="all to one")
    errors = on_ranks(one, 4, (1.25, "stop"))
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    for said in (
        "model.py:7",
        "rank 3 along ep",
        "16 rows",
        "promised for 5",
        "[0, 0, 0, 16]",
        "expert 3",
        "expert_imbalance=4",
    ):
        assert said in text, text
    enough = on_ranks(one, 4, (4.0, "stop"))
    torch.testing.assert_close(torch.cat(enough), one.expected(torch.zeros_like(one.x))[0])


@pytest.mark.parametrize("imbalance", [1.0, 1.25, 2.0])
def test_in_pieces_a_step_takes_no_more_memory_than_promised(imbalance: float) -> None:
    """The bytes that a rank holds at most, whatever the routing, against what they are on tensors without data."""
    tokens, count, d, inner = 64, 8, 64, 128
    generator = torch.Generator().manual_seed(0)
    w_in, w_out = (
        torch.randn(count // 4, d, 2, inner, generator=generator),
        torch.randn(count // 4, inner, d, generator=generator),
    )
    weights, gate = torch.rand(tokens, 2, generator=generator), ("silu", 1.0, None, 0.0)
    x = torch.randn(tokens, d, generator=generator)

    def peak(comm: Comm, chosen: Tensor, *tensors: Tensor) -> int:
        x, w_in, w_out, weights = tensors
        counter = ByteCounter()
        with counter:
            local.experts_grad(
                x, x, w_in, None, w_out, None, chosen, weights, True, *gate, imbalance, "chunk", along=Along(comm, "ep")
            )
        return counter.peak

    numbers = torch.zeros(tokens, 2, dtype=torch.long)
    promised = peak(MetaComm({"ep": 4}), numbers.to("meta"), *(t.to("meta") for t in (x, w_in, w_out, weights)))
    for route in (
        lambda rank: numbers + 7,
        lambda rank: numbers + rank,
        lambda rank: torch.arange(2 * tokens).view(-1, 2) % 8,
    ):
        found = run_threads(
            4, {"ep": 4}, lambda comm, route=route: peak(comm, route(comm.rank), x, w_in, w_out, weights)
        )
        assert max(found) <= promised * 1.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_keeps_the_routers_weights(dtype: torch.dtype) -> None:
    one = mixture((16,), 4, 2)
    low = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in one.operands]
    low[6] = one.weights.float()
    y = local.experts(*low, *GATES[one.gate][0])  # type: ignore[arg-type]
    expected = one.expected(torch.zeros_like(one.x))[0]
    assert y.dtype == dtype
    assert float((y.double() - expected).abs().max() / expected.abs().max()) < 0.03
    grads = local.experts_grad(y, *low, True, *GATES[one.gate][0])  # type: ignore[arg-type]
    assert [t.dtype for t in grads[:3]] == [dtype, torch.float32, dtype]


def test_wrong_shapes_and_names_are_refused() -> None:
    one = mixture((4,), 4, 2)
    with pytest.raises(InputError, match="'swish' is unknown; choose one of silu"):
        autopar.experts(one.x, one.chosen, one.weights, one.w_in, one.w_out, act="swish")
    with pytest.raises(InputError, match=r"w_in \(experts, d, 1 or 2, f\)"):
        autopar.experts(one.x, one.chosen, one.weights, one.w_in.flatten(2), one.w_out)
