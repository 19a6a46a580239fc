"""Mixtures on a device that the host runs ahead of: messages of the plan's sizes, products, rows with no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import autopar
from autopar.counter import ByteCounter
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.rules.sends import sent_by
from autopar.runtime import ExpertOverflow, Session, run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.calls import Call, Message, Posted
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.devices import LEAST_CUDA
from autopar.runtime.kernels import grouped, overflow
from autopar.runtime.kernels.experts import experts as local
from autopar.runtime.kernels.experts import padded
from autopar.runtime.kernels.experts.dispatch import Promise
from autopar.runtime.kernels.grouped import Groups
from tests.ops.execution import as_node, rule_of
from tests.ops.test_experts import GATES, ROUTES, Mixture, check, mixture, shares
from tests.ops.test_experts_over_nodes import Bytes, run
from tests.passes.lower.test_overlap_experts import RANKS, batch, model, program

GATE = GATES["swiglu"][0]


@pytest.fixture(autouse=True, scope="module")
def host_that_runs_ahead() -> Iterator[None]:
    """The processors stand for a device of which the host knows nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (grouped, overflow, padded):
            patch.setattr(module, "runs_ahead", lambda device: True)
        yield


@settings(max_examples=16)
@given(
    sizes=st.sampled_from([(2,), (4,), (2, 2), (4, 2), (2, 4)]),
    per_rank=st.sampled_from([(1,), (2,), (5,), (1, 3)]),
    experts=st.sampled_from([1, 2, 3]),
    choices=st.sampled_from([1, 2, 8]),
    gate=st.sampled_from(list(GATES)),
    route=st.sampled_from(ROUTES),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padded_messages_give_the_loops_values_and_gradients(
    sizes: tuple[int, ...],
    per_rank: tuple[int, ...],
    experts: int,
    choices: int,
    gate: str,
    route: str,
    biased: bool,
    seed: int,
) -> None:
    """Every row has room, however uneven they are."""
    mesh = Mesh.of(**dict(zip("ab", sizes, strict=False)))
    tokens = (per_rank[0] * mesh.size, *per_rank[1:])
    one = mixture(tokens, experts * mesh.size, choices, gate=gate, route=route, biased=biased, seed=seed)
    check(replace(one, promise=(float(mesh.size), "stop")), mesh, ("+t0+e",) * len(sizes))


@pytest.mark.parametrize("wait_flops", [0.0, grouped.WAIT_FLOPS])
@pytest.mark.parametrize("strategy", ["", "e", "+t0+e"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uneven_rows_within_the_room_give_the_loops_values_and_gradients(
    ranks: int, strategy: str, wait_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens, of which the experts of the first rank get a fifth more than the others'."""
    monkeypatch.setattr(grouped, "WAIT_FLOPS", wait_flops)
    generator = torch.Generator().manual_seed(0)
    chances = torch.ones(256, 8)
    chances[:, : 8 // ranks] *= 1.2
    chosen = torch.multinomial(chances, 2, generator=generator)
    one = replace(mixture((256,), 8, 2, biased=True), chosen=chosen, promise=(1.25, "stop"))
    check(one, Mesh.of(a=ranks), (strategy,))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ranks", "experts", "tokens"), [(2, 3, (3,)), (3, 8, (7, 2)), (4, 10, (8,))])
def test_padded_messages_between_unequal_numbers_of_experts_and_tokens(
    ranks: int, experts: int, tokens: tuple[int, ...], route: str
) -> None:
    one = replace(mixture(tokens, experts, 2, route=route, biased=True), promise=(float(experts), "stop"))
    check(one, Mesh.of(a=shares(ranks, experts, tokens[0])), ("+t0+e",))


@pytest.mark.parametrize("backward", [False, True])
def test_messages_between_unequal_numbers_of_experts_have_the_bytes_that_are_priced(backward: bool) -> None:
    """Every message is as long as one to the rank with most experts, which has 3 of 8."""
    mesh = Mesh.of(ep=shares(3, 8))
    one = replace(mixture((3 * 257,), 8, 2), promise=(1.25, "stop"))
    case = one.cases(one.x)[backward]
    call = op_call(as_node(case, case.whole())[0])
    sent = sent_by(call, rule_of(call), ("+t0+e",), mesh, LEAST_CUDA)
    priced = sum(s.nbytes for s in sent if s.kind == "exchange") * 2 / 3

    def bytes_sent(comm: Comm) -> int:
        watcher = Bytes(comm.rank)
        comm.watch(watcher)
        own = [None if t is None else t.chunk(3)[comm.rank] for t in one.operands]
        for place in (1, 3):
            layers = one.operands[place]
            assert layers is not None
            own[place] = layers.split((3, 3, 2))[comm.rank]
        told: dict[str, Any] = {"along": Along(comm, "ep"), "experts": 8}
        if backward:
            local.experts_grad(own[0], *own, True, *GATE, *one.promise, **told)  # type: ignore[arg-type]
        else:
            local.experts(*own, *GATE, *one.promise, **told)  # type: ignore[arg-type]
        return watcher.by_axis["ep"]

    assert run_threads(3, mesh.sizes, bytes_sent) == [pytest.approx(priced, rel=0.01)] * 3


class Sizes:
    """Rows that a rank sends and receives by exchanges."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def collective(self, call: Call, wait: Callable[[], None]) -> Callable[[], None]:
        if call.kind == "exchange":
            self.sent.append((call.sent, call.received))
        return wait

    def posted(self, messages: Sequence[Message], posted: Sequence[Posted]) -> list[Posted]:
        return list(posted)


def test_every_message_has_the_size_that_the_plan_says() -> None:
    """576 pairs a rank and 4 ranks: 144 rows each if all got as many, 216 at six standard deviations."""
    one = replace(mixture((4 * 288,), 8, 2), promise=(1.25, "stop"))

    def on_rank(comm: Comm) -> list[Any]:
        watcher = Sizes()
        comm.watch(watcher)
        own = [None if t is None else t.chunk(4)[comm.rank] for t in one.operands]
        local.experts_grad(own[0], *own, True, *GATE, *one.promise, along=Along(comm, "ep"))  # type: ignore[arg-type]
        return watcher.sent

    assert Promise(1.25, "stop").room(576, 4, 576) == 216
    for sent in run_threads(4, {"ep": 4}, on_rank):
        assert sent == [((216,) * 4, (216,) * 4)] * 5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [{"ep": 4}, {"dp": 4, "ep": 2}], ids=["one axis", "two axes"])
def test_as_many_bytes_are_sent_as_are_priced(sizes: dict[str, int], backward: bool) -> None:
    mesh, ranks = Mesh.of(**sizes), math.prod(sizes.values())
    one = replace(mixture((256 * ranks,), 16, 2), promise=(1.25, "stop"))
    case = one.cases(one.x)[backward]
    call = op_call(as_node(case, case.whole())[0])
    sent = sent_by(call, rule_of(call), ("+t0+e",) * len(sizes), mesh, LEAST_CUDA)
    for found in run_threads(ranks, sizes, lambda comm: sent_bytes(one, comm, backward)):
        assert found == {
            axis: pytest.approx(sum(s.nbytes * (1 - 1 / n) for s in sent if (s.kind, s.axis) == ("exchange", axis)))
            for axis, n in sizes.items()
        }


def sent_bytes(one: Mixture, comm: Comm, backward: bool) -> dict[str, int]:
    watcher = Bytes(comm.rank)
    comm.watch(watcher)
    run(one, comm, backward, one.promise)
    return dict(watcher.by_axis)


@pytest.mark.few(4)
@pytest.mark.parametrize("wait_flops", [0.0, grouped.WAIT_FLOPS])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [{"ep": 4}, {"dp": 4, "ep": 2}], ids=["one axis", "two axes"])
def test_a_step_takes_the_memory_that_is_promised(
    sizes: dict[str, int], backward: bool, wait_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "WAIT_FLOPS", wait_flops)
    ranks, (tokens, count, d, inner) = math.prod(sizes.values()), (64, 16, 64, 128)
    w_in, w_out = torch.randn(count // ranks, d, 2, inner), torch.randn(count // ranks, inner, d)
    x, weights = torch.randn(tokens, d), torch.rand(tokens, 2)
    chosen = torch.arange(2 * tokens).view(-1, 2) % count

    def peak(comm: Comm, device: str) -> int:
        x_here, *operands = (
            None if t is None else t.to(device) for t in (x, x, w_in, None, w_out, None, chosen, weights)
        )
        counter = ByteCounter()
        with counter:
            if backward:
                local.experts_grad(x_here, *operands, True, *GATE, 1.25, "stop", along=Along(comm, *sizes))  # type: ignore[arg-type]
            else:
                local.experts(*operands, *GATE, 1.25, "stop", along=Along(comm, *sizes))  # type: ignore[arg-type]
        return counter.peak

    promised = peak(MetaComm(sizes), "meta")
    for found in run_threads(ranks, sizes, lambda comm: peak(comm, "cpu")):
        assert promised * 0.95 <= found <= promised * 1.005


def test_room_is_what_is_promised_or_what_random_choices_take() -> None:
    assert Promise(1.25, "stop").room(4096, 4, 4096) == 1280  # 1.25 · 1024
    assert Promise(1.0, "stop").room(4096, 4, 4096) == 1024 + 6 * 32
    assert Promise(1.25, "stop").room(6, 4, 6) == 6


@pytest.mark.parametrize(
    ("mesh", "choices", "said"),
    [
        ({"ep": 4}, 2, "rank 3 along ep is to get 64 rows of one rank, messages have room for 40 "),
        ({"dp": 2, "ep": 2}, 2, "rank 1 along ep is to get 128 rows of one rank, messages have room for 66 "),
        ({"dp": 4, "ep": 2}, 1, "rank 3 along dp is to get 32 tokens of one rank, messages have room for 25 "),
        ({"tp": 4}, 2, "this rank's experts are to compute 256 rows, and have room for 112 "),
    ],
    ids=["along an axis", "inside nodes", "to nodes", "of one rank"],
)
def test_rows_with_no_room_are_named_by_every_rank_alike(mesh: dict[str, int], choices: int, said: str) -> None:
    ranks = math.prod(mesh.values())
    one = mixture((32 * ranks,), 8, choices, route="all to one")

    def on_rank(comm: Comm) -> str:
        own = [None if t is None else t.chunk(ranks)[comm.rank] for t in one.operands]
        told: dict[str, Any] = {"along": Along(comm, *mesh)}
        if "tp" in mesh:
            own[0], own[5], own[6] = one.x, one.chosen, one.weights
            told = {"first": comm.rank * 2, "parts": 4}
        overflows = overflow.Overflows(comm, True)
        with overflows.noted():
            local.experts(*own, *GATE, 1.25, "stop", "model.py:7", **told)  # type: ignore[arg-type]
        overflows.tell()
        with pytest.raises(ExpertOverflow) as caught:
            overflows.end()
        overflows.end()
        return str(caught.value)

    texts = run_threads(ranks, mesh, on_rank)
    assert len(set(texts)) == 1
    assert said in texts[0]
    assert "model.py:7 (rank " in texts[0]


def test_rows_with_no_room_are_named_at_once_where_no_step_reads_them() -> None:
    one = mixture((128,), 8, 2, route="all to one")

    def on_rank(comm: Comm) -> None:
        own = [None if t is None else t.chunk(4)[comm.rank] for t in one.operands]
        with pytest.raises(ExpertOverflow, match="24 rows are too many"):
            local.experts(*own, *GATE, 1.25, "stop", along=Along(comm, "ep"))  # type: ignore[arg-type]

    run_threads(4, {"ep": 4}, on_rank)


# ---- in a step


def steps(crowded: bool) -> list[Any]:
    """The state before and after two steps on every rank, and the error that ended them. crowded: rows choose rank 0 alone."""
    made = program("any", on_overflow="stop")
    weights = made.weights()
    if crowded:
        weights["layers.1.router.bias"] = torch.tensor([9.0, 9.0, *6 * [0.0]])

    def rank(comm: Comm) -> Any:
        session = made.in_process.session(comm, made.request.update, made.options.seed)
        session.load_weights(weights)
        assert session.optimizer is not None
        before, text = state(session), ""
        try:
            for _ in range(2):
                session.train_step(list(batch()))
        except ExpertOverflow as error:
            text = str(error)
        after, states = state(session), len(session.optimizer.state)
        session.load_weights(made.weights())
        assert session.train_step(list(batch())).isfinite()  # another batch may follow
        return before, after, text, states

    return run_threads(RANKS, {"ep": RANKS}, rank)


def state(session: Session) -> list[Tensor]:
    return [tensor.clone() for stage in session.stages.values() for _, tensor in stage.stored()]


def test_rows_with_no_room_end_the_step_on_all_ranks_and_nothing_is_applied() -> None:
    """Messages have room for 25 of a rank's 32 pairs."""
    results = steps(crowded=True)
    assert len({text for _, _, text, _ in results}) == 1
    for before, after, text, states in results:
        for said in (
            "test_overlap_experts.py:44",
            "call 1 of 1 of this line",
            "rank 0 along ep is to get 32 rows of one rank, messages have room for 25 ",
            "7 rows are too many",
            "No update was made",
            "expert_imbalance=4",
            'on_overflow="chunk"',
        ):
            assert said in text, text
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert states == 0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("choice", "on_overflow", "said"),
    [
        ("+t0+e", "stop", True),
        ("e", "stop", True),
        ("t0", "stop", False),
        ("+t0+e", "chunk", False),
        ("f", "stop", False),
    ],
)
def test_a_program_says_whether_its_ranks_have_room_for_so_many_rows(choice: str, on_overflow: str, said: bool) -> None:
    made = program("", on_overflow=on_overflow, choice=choice)
    assert getattr(made.in_process.pipeline, "TELLS_ALL", False) == said


def test_steps_whose_rows_have_room_go_on() -> None:
    for before, after, text, states in steps(crowded=False):
        assert not text
        assert states > 0
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_with_padded_messages_computes_what_eager_does() -> None:
    assert autopar.verify(program("any", on_overflow="stop"), model(), batch()).max_error <= 1e-9


# ---- products


@pytest.mark.parametrize("wait_flops", [0.0, grouped.WAIT_FLOPS])
def test_products_of_all_rows_with_all_matrices_are_those_of_groups(
    wait_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "WAIT_FLOPS", wait_flops)
    generator = torch.Generator().manual_seed(0)
    rows, w, g = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12, 3), (4, 3, 5), (12, 5))
    )
    groups = Groups(torch.tensor([3, 3, 8, 11]), 12)
    y, dw = grouped.products(rows, w, groups), torch.zeros_like(w)
    sums = torch.zeros(4, 5, dtype=torch.float64)
    grouped.add_outer_products(dw, rows, g, groups)
    grouped.add_sums(sums, g, groups)
    assert torch.equal(y[11], torch.zeros(5, dtype=torch.float64))
    for i, (start, end) in enumerate([(0, 3), (3, 3), (3, 8), (8, 11)]):
        torch.testing.assert_close(y[start:end], rows[start:end] @ w[i], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dw[i], rows[start:end].t() @ g[start:end], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums[i], g[start:end].sum(0), rtol=1e-12, atol=1e-12)
