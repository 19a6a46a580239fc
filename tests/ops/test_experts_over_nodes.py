"""Mixtures of experts whose rows travel along two axes: to a node first, each once, and then inside it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.counter import ByteCounter
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.rules.sends import sent_by
from autopar.runtime import ExpertOverflow, run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.calls import Call, Message, Posted
from autopar.runtime.comm.comm import Comm
from autopar.runtime.kernels.experts import experts as local
from autopar.runtime.kernels.experts.dispatch import Promise, Spread
from autopar.runtime.kernels.experts.two_level_dispatch import legs
from tests.ops.execution import as_node, rule_of
from tests.ops.test_experts import GATES, ROUTES, Mixture, check, mixture

MESHES = (Mesh.of(a=2, b=2), Mesh.of(a=2, b=4), Mesh.of(a=4, b=2))
BOTH = ("+t0+e", "+t0+e")
GATE = GATES["swiglu"][0]


def sweep(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        mesh=st.sampled_from(MESHES),
        per_rank=st.sampled_from([(1,), (2,), (5,), (1, 3)]),
        experts=st.sampled_from([1, 2, 3]),
        choices=st.sampled_from([1, 2, 3, 8]),
        gate=st.sampled_from(list(GATES)),
        route=st.sampled_from(ROUTES),
        biased=st.booleans(),
        beside=st.sampled_from(["", "f", "t0", "between"]),
        imbalance=st.sampled_from([1.0, 1.25, 8.0]),
        seed=st.integers(0, 99),
    )
    def every(
        mesh: Mesh, per_rank: tuple[int, ...], experts: int, choices: int, gate: str, route: str, biased: bool, beside: str,
        imbalance: float, seed: int,
    ) -> None:  # fmt: skip
        strategy: tuple[str, ...] = BOTH
        if beside and mesh.size == 4:
            mesh = Mesh.of(a=2, b=2, c=2)
            strategy = (BOTH[0], "t0", BOTH[1]) if beside == "between" else (*BOTH, beside)
        tokens = (per_rank[0] * mesh.size, *per_rank[1:])
        one = mixture(tokens, experts * mesh.size, choices, gate=gate, route=route, biased=biased, seed=seed)
        check(replace(one, promise=(imbalance, "chunk")), mesh, strategy)

    every()


def test_rows_that_go_to_nodes_first_give_the_loops_values_and_gradients() -> None:
    sweep(12)


@pytest.mark.slow
def test_rows_that_go_to_nodes_first_give_the_loops_values_and_gradients_at_length() -> None:
    sweep(400)


@pytest.mark.few(6)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("choices", [1, 8])
def test_uneven_routing_of_one_token_a_rank(mesh: Mesh, route: str, choices: int) -> None:
    check(mixture((mesh.size,), mesh.size, choices, route=route), mesh, BOTH)


@given(
    sizes=st.sampled_from([(2, 2), (4, 2), (2, 4)]),
    experts=st.integers(1, 2),
    tokens=st.integers(1, 7),
    choices=st.integers(1, 4),
    imbalance=st.sampled_from([1.0, 1.25]),
    crowded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_token_visits_every_node_of_its_experts_once_and_no_leg_has_more_than_room(
    sizes: tuple[int, int], experts: int, tokens: int, choices: int, imbalance: float, crowded: bool, seed: int
) -> None:
    """Rows name rank and token; experts from the last one on do not exist."""
    nodes, inner = sizes
    of_node, room = experts * inner, max(Promise(imbalance, "chunk").most(tokens * min(choices, nodes)), nodes)

    def on_rank(comm: Comm) -> Tensor:
        generator = torch.Generator().manual_seed(seed + comm.rank)
        many = 2 if crowded else nodes * of_node + 1
        chosen = torch.randint(0, many, (tokens, choices), generator=generator)
        rows = torch.stack([torch.full((tokens,), comm.rank), torch.arange(tokens)], 1)
        back, came = torch.zeros(tokens, 2, dtype=torch.long), []
        for leg in legs(chosen, experts, Promise(imbalance, "chunk"), Spread(along=Along(comm, "a", "b"))):
            here = leg.out(rows).wait()
            assert len(here) <= room
            leg.add_to(back, leg.back(here).wait())
            came.append(here)
        wanted = [len({int(e) // of_node for e in row if e < nodes * of_node}) for row in chosen]
        assert torch.equal(back, rows * torch.tensor(wanted).unsqueeze(1))
        arrived = torch.cat(came)
        assert len(arrived.unique(dim=0)) == len(arrived)
        return arrived

    run_threads(nodes * inner, {"a": nodes, "b": inner}, on_rank, timeout_s=60)


class Bytes:
    """Bytes that a rank sends to others by exchanges, by axis."""

    def __init__(self, rank: int) -> None:
        self.rank, self.by_axis = rank, Counter[str]()

    def collective(self, call: Call, wait: Callable[[], None]) -> Callable[[], None]:
        if call.kind == "exchange":
            row = call.inp[0].nbytes if len(call.inp) else 0
            self.by_axis["".join(call.group.axes)] += row * (sum(call.sent) - call.sent[call.group.index])
        return wait

    def posted(self, messages: Sequence[Message], posted: Sequence[Posted]) -> list[Posted]:
        return list(posted)


@pytest.mark.parametrize("backward", [False, True])
def test_as_many_bytes_are_sent_as_are_priced(backward: bool) -> None:
    """Bytes are counted at no imbalance and random choices."""
    mesh, tokens, choices = Mesh.of(a=4, b=2), 512, 4
    one = replace(mixture((8 * tokens,), 16, choices, seed=1), promise=(1.0, "chunk"))
    case = one.cases(one.x)[backward]
    call = op_call(as_node(case, case.whole())[0])
    priced = Counter[str]()
    for sent in sent_by(call, rule_of(call), BOTH, mesh):
        if sent.kind == "exchange":
            priced[sent.axis] += sent.nbytes * (1 - 1 / mesh.sizes[sent.axis])

    def on_rank(comm: Comm) -> Counter[str]:
        watcher = Bytes(comm.rank)
        comm.watch(watcher)
        run(one, comm, backward)
        return watcher.by_axis

    found = run_threads(8, mesh.sizes, on_rank)
    for axis, nbytes in priced.items():
        assert sum(rank[axis] for rank in found) / 8 == pytest.approx(nbytes, rel=0.02)


def run(one: Mixture, comm: Comm, backward: bool = False, promise: tuple[float, str] = (1.0, "chunk")) -> Any:
    """This rank's part of a mixture, along all axes of the mesh."""
    ranks = comm.world_size
    own = [None if t is None else t.chunk(ranks)[comm.rank] for t in one.operands]
    along = Along(comm, *comm.mesh)
    if backward:
        return local.experts_grad(own[0], *own, True, *GATE, *promise, "model.py:7", along=along)  # type: ignore[arg-type]
    return local.experts(*own, *GATE, *promise, "model.py:7", along=along)  # type: ignore[arg-type]


def routed(name: str) -> Mixture:
    """8 ranks of 4 tokens with 2 choices among 16 experts, on 4 nodes."""
    one = mixture((32,), 16, 2)
    rank = torch.arange(32).view(32, 1) // 4
    chosen = {
        "compute": torch.full((32, 2), 15),
        "pass on": torch.where(rank % 2 == 0, torch.tensor([[0, 2]]), rank // 2 * 4),
        "even": torch.stack([torch.arange(32) % 16, (torch.arange(32) + 5) % 16], 1),
    }[name]
    return replace(one, chosen=chosen + torch.zeros(32, 2, dtype=torch.long))


@pytest.mark.parametrize(("what", "rank", "rows"), [("compute", 7, 64), ("pass on", 0, 32)])
def test_more_rows_than_promised_stop_every_rank_alike_by_name(what: str, rank: int, rows: int) -> None:
    """Expert 15 chosen by all; and a rank that is given all that others of its number send to one node, more than it computes."""
    one, promise = routed(what), (3.5, "stop")

    def on_rank(comm: Comm) -> Any:
        try:
            return run(one, comm, promise=promise)
        except ExpertOverflow as error:
            return error

    errors = run_threads(8, {"dp": 4, "ep": 2}, on_rank)
    assert len({str(error) for error in errors}) == 1
    for said in ("model.py:7", f"rank {rank} along dp, ep is to {what} {rows} rows", "No token is dropped"):
        assert said in str(errors[0]), errors[0]
    enough = run_threads(8, {"dp": 4, "ep": 2}, lambda comm: run(one, comm, promise=(8.0, "stop")))
    torch.testing.assert_close(torch.cat(enough), one.expected(one.x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("imbalance", [1.0, 1.25, 2.0])
def test_a_step_takes_no_more_memory_than_promised(imbalance: float, backward: bool) -> None:
    """The bytes that a rank holds at most, whatever the routing, against what they are on tensors without data."""
    tokens, count, d, inner, mesh = 32, 16, 64, 128, {"dp": 4, "ep": 2}
    generator = torch.Generator().manual_seed(0)
    w_in = torch.randn(count // 8, d, 2, inner, generator=generator)
    w_out = torch.randn(count // 8, inner, d, generator=generator)
    x, weights = torch.randn(tokens, d, generator=generator), torch.rand(tokens, 2, generator=generator)

    def peak(comm: Comm, chosen: Tensor, *tensors: Tensor) -> int:
        x, w_in, w_out, weights = tensors
        operands = (x, w_in, None, w_out, None, chosen, weights)
        function = functools.partial(local.experts_grad, x, *operands, True) if backward else local.experts
        counter = ByteCounter()
        with counter:
            function(*(() if backward else operands), *GATE, imbalance, "chunk", along=Along(comm, "dp", "ep"))
        return counter.peak

    numbers = torch.zeros(tokens, 2, dtype=torch.long)
    promised = peak(MetaComm(mesh), numbers.to("meta"), *(t.to("meta") for t in (x, w_in, w_out, weights)))
    routes: tuple[Callable[[int], Tensor], ...] = (
        lambda rank: numbers + count - 1,
        lambda rank: numbers + rank,
        lambda rank: numbers + torch.tensor([0, 2]) if rank % 2 == 0 else numbers + rank // 2 * 4,
        lambda rank: torch.arange(2 * tokens).view(-1, 2) % count,
        lambda rank: torch.randint(0, count, (tokens, 2), generator=torch.Generator().manual_seed(rank)),
    )
    for route in routes:
        found = run_threads(8, mesh, lambda comm, route=route: peak(comm, route(comm.rank), x, w_in, w_out, weights))
        assert max(found) <= promised * 1.005


def test_two_axes_may_take_the_choice_but_not_three() -> None:
    case = mixture((8,), 8, 2).cases(torch.zeros(8, 3, dtype=torch.float64))[0]
    rule, cube = rule_of(op_call(as_node(case, case.whole())[0])), Mesh.of(a=2, b=2, c=2)
    assert rule.allows((*BOTH, ""), cube)
    assert rule.allows(("t0", *BOTH), cube)
    assert not rule.allows((*BOTH, BOTH[0]), cube)
    assert not rule.allows((*BOTH, "e"), cube)
    spec = rule.operand_spec(1, (*BOTH, ""), cube)
    assert spec is not None
    assert spec.dims[0] == ("a", "b")
