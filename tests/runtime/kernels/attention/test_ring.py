"""Attention whose keys go round the ranks is eager's attention of the whole sequence, forward and backward."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.counter import ByteCounter
from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.kernels.attention import attention, rings
from autopar.runtime.kernels.attention.triangle import Run, pieces
from tests.runtime import ring_worker
from tests.runtime.ring_cases import Call, call, eager, joined, on_rank, unsharded
from tests.warm import torchrun

TOLERANCE = 1e-9
MESHES = ({"cp": 2}, {"cp": 4}, {"cp": 8}, {"dp": 2, "cp": 2}, {"dp": 2, "cp": 4}, {"dp": 4, "cp": 2})
KINDS = ("none", "none", "bool", "float", "hidden rows", "hidden blocks")


def agree(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def ring(c: Call, mesh: dict[str, int], in_turns: bool = False) -> dict[str, Tensor]:
    """in_turns: also blocks as small as these go round some heads after the others."""
    size = math.prod(mesh.values())
    with pytest.MonkeyPatch.context() as patch:
        if in_turns:
            patch.setattr(rings, "LEAST_BYTES", 1)
        return joined(c, mesh, run_threads(size, mesh, on_rank(c, mesh), timeout_s=60))


def sweep(examples: int, p: float) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        def pick(*options: object) -> object:
            return data.draw(st.sampled_from(options))

        mesh = pick(*MESHES)
        c = call(pick, data.draw(st.integers(0, 999)), math.prod(mesh.values()), KINDS, p)
        agree(ring(c, mesh, pick(False, True)), unsharded(c) if p else eager(c))

    check()


def test_a_ring_is_eagers_attention() -> None:
    sweep(16, 0.0)


@pytest.mark.slow
def test_a_ring_is_eagers_attention_at_length() -> None:
    sweep(600, 0.0)


def test_dropout_in_a_ring_draws_what_one_rank_draws() -> None:
    sweep(15, 0.4)


@pytest.mark.slow
def test_dropout_in_a_ring_draws_what_one_rank_draws_at_length() -> None:
    sweep(300, 0.4)


# --- what hides


def filled(mask: Tensor | None, causal: bool = False, s: int = 8) -> Call:
    generator = torch.Generator().manual_seed(1)
    q, k, v, g = (torch.randn(1, 2, s, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    return Call(q, k, v, mask, g, 0.0, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_sees_nothing_gives_and_gets_nothing(causal: bool) -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    mask[:, :, 2] = False
    mask[:, :, 5, :6] = False  # of these a causal row 5 sees all
    c = filled(mask, causal)
    got = ring(c, {"cp": 4})
    assert (got["out"][:, :, 2] == 0).all()
    assert (got["dq"][:, :, 2] == 0).all()
    assert (got["out"][:, :, 5] == 0).all() == causal
    agree(got, eager(c))
    agree(got, unsharded(c))


def test_a_row_of_lowest_numbers_weighs_all_keys_alike() -> None:
    """A mask of the lowest finite number instead of -inf: scores are lost in rounding, and so is the log of their number."""
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    mask[:, :, 3] = torch.finfo(torch.float64).min
    c = filled(mask)
    got = ring(c, {"cp": 4})
    torch.testing.assert_close(got["out"][:, :, 3], c.v.mean(2), rtol=1e-12, atol=1e-12)
    agree(got, unsharded(c))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_few_bits_a_ring_is_as_near_to_the_truth_as_one_rank(dtype: torch.dtype) -> None:
    exact = filled(None, True, 64)
    c = Call(*(x.to(dtype) for x in (exact.q, exact.k, exact.v)), None, exact.g.to(dtype), 0.0, True)
    truth = eager(Call(*(x.double() for x in (c.q, c.k, c.v)), None, c.g.double(), 0.0, True))
    got, one = ring(c, {"cp": 4}), unsharded(c)
    assert got["lse"].dtype == one["lse"].dtype == torch.float32
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        errors = [(x[name].double() - truth[name]).abs().max() for x in (got, one)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps, name


# --- what is sent and held


def test_keys_go_round_once_and_their_gradients_home() -> None:
    c = filled(None, True)
    counts = {}

    def run(comm: Comm) -> None:
        shifted: list[int] = []
        along = Along(comm, "cp")
        start = comm.start_shift
        comm.start_shift = lambda x, *rest: (shifted.append(x.numel()), start(x, *rest))[1]  # type: ignore[method-assign]
        q, k, v, g = (x.chunk(4, 2)[along.index] for x in (c.q, c.k, c.v, c.g))
        told = {"offset": along.index * 2, "along": along}
        out, lse = attention.attention(q, k, v, None, *c.config, **told)
        forward = len(shifted)
        attention.attention_grad(g, q, k, v, None, out, lse, *c.config, **told)
        counts[comm.rank] = (forward, len(shifted) - forward, {n // k.numel() for n in shifted})

    run_threads(4, {"cp": 4}, run, timeout_s=60)
    assert set(map(str, counts.values())) == {str((2 * 3, 4 * 3, {1}))}


@pytest.mark.parametrize(("heads", "in_turns"), [(2, 1), (4, 4), (6, 3)])
def test_a_ring_holds_two_blocks_of_keys_and_values(heads: int, in_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward at its peak: two blocks of keys and values and of results. Backward: the parts of a block, its sums as they leave
    and as they come, and both gradients of this rank's own rows. In turns, all that is under way is a fraction."""
    s, d, ranks = 1024, 16, 4
    block = heads * s // ranks * d * 4
    monkeypatch.setattr(rings, "LEAST_BYTES", 2 * block // in_turns)
    peaks = {}

    def run(comm: Comm) -> None:
        along = Along(comm, "cp")
        q, k, v, g = (torch.randn(1, heads, s // ranks, d) for _ in range(4))
        counter = ByteCounter()
        with torch.no_grad(), counter:
            out, lse = attention.attention(q, k, v, None, 0.0, False, 0.25, along=along)
            forward = counter.peak
            before = counter.alive
            counter.restart()
            attention.attention_grad(g, q, k, v, None, out, lse, 0.0, False, 0.25, along=along)
            peaks[comm.rank] = (forward, counter.peak - before)

    run_threads(ranks, {"cp": ranks}, run, timeout_s=60)
    rows = heads * s // ranks * 4
    at_home = 0 if in_turns == 1 else 2
    for forward, backward in peaks.values():
        assert forward <= (4 / in_turns + 1 + 1 / in_turns) * block + 12 * rows
        assert backward <= ((4 + 6 + 1) / in_turns + 1 + at_home) * block + 12 * rows


def test_small_blocks_go_round_at_once_and_heads_that_cannot_be_shared_out_too() -> None:
    def run(comm: Comm) -> list[int]:
        along = Along(comm, "cp")
        sizes = ((4, 1 << 8), (4, 1 << 18), (6, 1 << 20), (5, 1 << 20), (8, 1 << 20), (1, 1 << 20))
        return [rings.turns(along, [torch.empty(1, heads, n, 1, device="meta")]) for heads, n in sizes]

    assert run_threads(2, {"cp": 2}, run, timeout_s=60) == [[1, 4, 3, 1, 4, 1]] * 2
    assert rings.turns(None, [torch.empty(1, 4, 1 << 20, 1, device="meta")]) == 1


# --- the triangle


@given(st.data())
def test_pieces_are_what_a_causal_row_sees_and_no_score_twice(data: st.DataObject) -> None:
    """The pieces are right also of blocks of several runs, as an order that balances causal work has them."""

    def block(label: str) -> tuple[Run, ...]:
        ends = data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True), label=label)
        ends = sorted(ends)[: len(ends) // 2 * 2]
        return tuple(Run(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True))

    rows, keys, causal = block("rows"), block("keys"), data.draw(st.booleans())
    row_positions, key_positions = ([i for run in one for i in range(*run)] for one in (rows, keys))
    seen = torch.zeros(len(row_positions), len(key_positions), dtype=torch.int64)
    for piece in pieces(rows, keys, causal):
        square = torch.ones(piece.rows.size, piece.keys.size, dtype=torch.int64)
        assert row_positions[piece.row] == piece.rows.start
        assert key_positions[piece.key] == piece.keys.start
        assert not piece.triangle or piece.rows == piece.keys
        part = seen[piece.row : piece.row + piece.rows.size, piece.key : piece.key + piece.keys.size]
        part += square.tril() if piece.triangle else square
    wanted = [[int(not causal or key <= row) for key in key_positions] for row in row_positions]
    assert seen.tolist() == wanted


def test_the_kernel_and_the_formula_agree_on_rows_that_see_nothing() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)
    q, k, v = (torch.randn(1, 2, 4, 4, dtype=torch.float64) for _ in range(3))
    out, lse = attention.attention(q, k, v, mask, 0.0, False, 0.5)
    plain, plain_lse = attention.attention(q, k, v[..., :3], mask, 0.0, False, 0.5)
    torch.testing.assert_close(out[..., :3], plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-12, atol=1e-12)
    assert (lse[:, :, 0] == 0).all()


# --- processes


@pytest.mark.slow
def test_a_ring_of_processes_is_one_of_threads(tmp_path: Path) -> None:
    done = torchrun(4, Path(ring_worker.__file__), tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    meshes = {"-".join(mesh): mesh for mesh in ring_worker.MESHES} | {name: {"cp": 4} for name in ("turns", "native")}
    for name, mesh in meshes.items():
        for i, c in enumerate(ring_worker.calls()):
            got = joined(c, mesh, [result[name][i] for result in results])
            agree(got, unsharded(c) if c.p else eager(c))
