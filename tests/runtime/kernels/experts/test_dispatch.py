"""Rows on their way to experts and back: pieces, and processes that send them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.errors import ExpertOverflow
from autopar.runtime.kernels.experts import experts
from autopar.runtime.kernels.experts.dispatch import Piece, Promise, Spread, pieces
from tests.runtime import experts_worker
from tests.warm import torchrun


@given(
    ranks=st.sampled_from([2, 4]),
    experts=st.integers(1, 3),
    tokens=st.integers(1, 6),
    choices=st.integers(1, 4),
    imbalance=st.sampled_from([1.0, 1.25, 3.0]),
    uneven=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_pair_travels_once_to_its_expert_and_no_piece_is_larger_than_promised(
    ranks: int, experts: int, tokens: int, choices: int, imbalance: float, uneven: bool, seed: int
) -> None:
    """Rows name token, choice and expert; experts from number ranks · experts on do not exist."""
    most = Promise(imbalance, "chunk").most(tokens * choices)

    def on_rank(comm: Comm) -> None:
        generator = torch.Generator().manual_seed(seed + comm.rank)
        chosen = torch.randint(0, 2 if uneven else ranks * experts + 1, (tokens, choices), generator=generator)
        pairs = torch.stack(
            [torch.full((chosen.numel(),), comm.rank), torch.arange(chosen.numel()), chosen.flatten()], 1
        )
        seen: list[Tensor] = []
        parts: list[Piece] = list(pieces(chosen, experts, Promise(imbalance, "chunk"), Spread(along=Along(comm, "ep"))))
        for piece in parts:
            arrived = piece.to_experts(pairs[piece.pairs]).wait()
            assert len(arrived) <= most
            starts = [0, *piece.groups.ends.tolist()]
            for i in range(experts):
                assert (arrived[starts[i] : starts[i + 1], 2] == comm.rank * experts + i).all()
            assert torch.equal(piece.back(arrived).wait(), pairs[piece.pairs])
            assert torch.equal(piece.place.flatten()[piece.pairs], torch.arange(len(piece.pairs)))
            seen.append(piece.pairs)
        sent = torch.cat(seen) if seen else torch.empty(0, dtype=torch.long)
        assert torch.equal(sent.sort()[0], (chosen.flatten() < ranks * experts).nonzero().flatten())

    run_threads(ranks, {"ep": ranks}, on_rank, timeout_s=60)


def test_pieces_of_one_rank_hold_every_pair_once_and_say_where() -> None:
    """Experts 1 and 2 of four live here and get more than half of the rows: the promise rounds up, the last piece is short."""
    chosen = torch.tensor([[1, 2], [2, 1], [2, 0], [2, 3], [2, 2]])
    most = Promise(0.9, "chunk").most(chosen.numel(), 2)
    assert most == 5
    parts = list(pieces(chosen, 2, Promise(0.9, "chunk"), Spread(first=1, parts=2)))
    assert [len(piece.pairs) for piece in parts] == [5, 3]
    assert [piece.groups.ends.tolist() for piece in parts] == [[2, 5], [0, 3]]
    assert torch.cat([chosen.flatten()[piece.pairs] for piece in parts]).tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    for piece in parts:
        place = piece.place.flatten()
        here = (place >= 0) & (place < len(piece.pairs))
        assert sorted(here.nonzero().flatten().tolist()) == sorted(piece.pairs.tolist())
        assert torch.equal(place[piece.pairs], torch.arange(len(piece.pairs)))


@pytest.mark.parametrize("imbalance", [2.0, 1.75])
def test_a_rank_that_computes_as_many_rows_as_are_promised_stops_nobody(imbalance: float) -> None:
    """All of both ranks' four rows go to rank 0: eight are twice the mean."""

    def on_rank(comm: Comm) -> None:
        chosen = torch.zeros(4, 1, dtype=torch.long)
        sent = pieces(chosen, 1, Promise(imbalance, "error"), Spread(along=Along(comm, "ep")))
        if imbalance == 2.0:
            assert [len(piece.pairs) for piece in sent] == [4]
            return
        with pytest.raises(ExpertOverflow, match=r"rank 0 along ep is to compute 8 rows"):
            list(sent)

    run_threads(2, {"ep": 2}, on_rank, timeout_s=30)


def test_no_rank_sends_more_rows_at_once_than_one_may_compute() -> None:
    """A rank's own rows may be more where the mean is that of others (by node)."""

    def on_rank(comm: Comm) -> None:
        chosen = (torch.arange(8) % 2).view(8, 1)
        parts = list(pieces(chosen, 1, Promise(1.0, "chunk"), Spread(along=Along(comm, "ep"), mean=4)))
        assert all(len(piece.pairs) <= 4 for piece in parts)
        assert sorted(torch.cat([piece.pairs for piece in parts]).tolist()) == list(range(8))

    run_threads(2, {"ep": 2}, on_rank, timeout_s=30)


def whole(case: tuple[str, int]) -> tuple[Tensor, ...]:
    *operands, g = experts_worker.mixture(*case)
    y = experts.experts(*operands, *experts_worker.GATE)  # type: ignore[arg-type]
    return y, *experts.experts_grad(g, *operands, True, *experts_worker.GATE)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_experts_of_four_ranks_are_those_of_one(name: str, tmp_path: Path) -> None:
    if name == "threads":
        results = {"threads": run_threads(4, {"ep": 4}, lambda comm: experts_worker.on_rank(comm, "ep"), timeout_s=60)}
    else:
        done = torchrun(4, Path(experts_worker.__file__), tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
        results = {kind: [rank[kind] for rank in ranks] for kind in ("gloo", "native", "over nodes")}
        results |= {f"rows {i}": [rank["beside another axis"] for rank in ranks[i : i + 2]] for i in (0, 2)}
    for kind, of_ranks in results.items():
        assert len({rank[-1] for rank in of_ranks}) == 1
        assert f"along {'dp, ep' if kind == 'over nodes' else 'ep'} is to compute" in of_ranks[0][-1]
        for i, case in enumerate(experts_worker.cases()):
            for expected, *parts in zip(whole(case), *(rank[i] for rank in of_ranks), strict=True):
                torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-10, atol=1e-10)
