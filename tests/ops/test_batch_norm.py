"""Batch norm: one message each way where the batch is cut, eager's numbers whatever is cut, and in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ops import batch_norm
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.sends import sent_by
from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.kernels import batch_norm as local
from autopar.runtime.kernels.images import pools
from tests.capture.equal import assert_equal_to_eager
from tests.ops.execution import Case, as_node, check_strategy

RULES = RuleBook()
CLASSES = torch.arange(8) % 4
X = torch.randn(8, 6, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W, B = torch.linspace(0.5, 2, 6, dtype=torch.float64), torch.linspace(-1, 1, 6, dtype=torch.float64)


def case(backward: bool) -> Case:
    if not backward:
        return Case(batch_norm.batch_norm, (X, W, B, 1e-5), {})
    mean, var = X.mean([0, 2, 3]), X.var([0, 2, 3], correction=0)
    return Case(batch_norm.batch_norm_backward, (X.flip(0), X, W, mean, var, 1e-5, True), {})


def sent(backward: bool, strategy: tuple[str, ...], mesh: Mesh) -> list[tuple[str, str, float]]:
    one = case(backward)
    call = op_call(as_node(one, one.whole())[0])
    return [(s.kind, s.axis, s.nbytes) for s in sent_by(call, RULES.rule(call), strategy, mesh)]


# --- messages


@pytest.mark.parametrize("choice", ["+n", "+s2", "+s3"])
def test_two_numbers_a_channel_are_sent_in_one_message_each_way(choice: str) -> None:
    mesh, own = Mesh.of(dp=2), 2 * 6 * 8
    assert sent(False, (choice,), mesh) == [("all_gather", "dp", 2 * own)]
    assert sent(True, (choice,), mesh) == [("all_reduce", "dp", own)]


def test_of_cut_channels_each_rank_sends_its_own() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert sent(True, ("+n", "c"), mesh) == [("all_reduce", "dp", 2 * 2 * 8)]
    assert sent(True, ("", "c"), mesh) == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", [("+n", "+n"), ("+n", "+s2"), ("+s2", "+s3"), ("c", "+n"), ("+s2", "c")], ids=str)
def test_several_axes_cut_batch_image_and_channels(strategy: tuple[str, ...], backward: bool) -> None:
    one = case(backward)
    assert sent(backward, strategy, Mesh.of(a=2, b=2))
    check_strategy(one, one.whole(), Mesh.of(a=2, b=2), strategy, torch.Generator().manual_seed(0))


def test_three_axes_cut_one_batch() -> None:
    one = case(True)
    check_strategy(one, one.whole(), Mesh.of(a=2, b=2, c=2), ("+n", "+n", "+n"), torch.Generator().manual_seed(0))


def data_parallel(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[autopar.ParallelProgram, list[str]]:
    """The program on two ranks, and the lines of its batch norms."""
    options = autopar.Options(pp=1, strategy="dp", mesh={"dp": 2})
    program = autopar.compile(model, autopar.ClusterSpec.local(2), batch, loss_fn=F.cross_entropy, options=options)
    return program, [line for line in program.source(0).splitlines() if " batch_norm.batch_norm" in line]


# --- against eager


def model(norm: type[nn.Module], rank: int, **options: Any) -> nn.Module:
    conv = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank]
    sizes = ((4, 8), (3, 8, 3), (3, 8, 3), (3, 8, 3))[rank]
    layers = [conv(*sizes), norm(8, **options), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 4**rank, 4)]
    return nn.Sequential(*layers)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 4 if rank == 0 else 3, *[6] * rank, generator=generator), CLASSES


NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.4, "eps": 1e-2}], ids=str
)
def test_every_plan_has_the_statistics_of_the_whole_batch(options: dict[str, Any], ranks: int, rank: int) -> None:
    norm = model(NORMS[rank], rank, **options)
    assert_equal_to_eager(norm, batch(rank), F.cross_entropy, ranks=ranks, steps=2, seeds=(0, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", range(4))
def test_given_statistics_take_no_message(rank: int) -> None:
    norm = model(NORMS[rank], rank).eval()
    norm[1].running_mean.normal_()  # type: ignore[index]
    norm[1].running_var.uniform_(0.5, 2)  # type: ignore[index]
    assert_equal_to_eager(norm, batch(rank), F.cross_entropy, ranks=4, seeds=(0,))
    _, lines = data_parallel(norm, batch(rank))
    assert len(lines) == 2
    assert not any("along" in line for line in lines)


def test_data_parallel_plans_cut_the_batch_at_every_norm() -> None:
    program, lines = data_parallel(model(nn.BatchNorm2d, 2), batch(2))
    assert len(lines) == 2
    assert all("along_n=rt.along('dp')" in line for line in lines)
    assert autopar.verify(program, program.model, batch(2)).ok


# --- numbers


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_as_near_as_torchs_own(dtype: torch.dtype, ranks: int) -> None:
    x, g = (X + 3).to(dtype), X.flip(0).to(dtype)
    w, b = W.float(), B.float()

    def on_rank(comm: Any) -> tuple[Tensor, ...]:
        along = {"along_n": Along(comm, "dp")} if ranks > 1 else {}
        own, own_g = (t.chunk(ranks)[comm.rank] for t in (x, g))
        y, mean, var = local.batch_norm(own, w, b, 1e-5, **along)
        assert (y.dtype, mean.dtype, var.dtype) == (dtype, torch.float32, torch.float32)
        return y, *local.batch_norm_backward(own_g, own, w, mean, var, 1e-5, True, **along)

    blocks = run_threads(ranks, {"dp": ranks}, on_rank, timeout_s=60.0)
    got = [torch.cat([block[i] for block in blocks]) for i in range(2)] + list(blocks[0][2:])
    exact = eager(x.double(), g.double(), W, B)
    torchs = eager(x, g, w, b)
    for mine, theirs, true in zip(got, torchs, exact, strict=True):
        assert (mine.double() - true).abs().max() <= 2 * (theirs.double() - true).abs().max() + 1e-6


def eager(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """The norm and its gradients."""
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, eps=1e-5)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernel_that_is_for_gpus_gives_the_same_statistics(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank(comm: Any) -> tuple[Tensor, ...]:
        along = {"along_n": Along(comm, "dp")} if ranks > 1 else {}
        return local.batch_norm(X.chunk(ranks)[comm.rank], W, B, 1e-5, **along)

    sums = run_threads(ranks, {"dp": ranks}, on_rank, timeout_s=60.0)
    monkeypatch.setattr(local, "has_fused_norm", lambda device: True)
    fused = run_threads(ranks, {"dp": ranks}, on_rank, timeout_s=60.0)
    for mine, theirs in zip((t for one in sums for t in one), (t for one in fused for t in one), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """Variances are of what is left when the mean is taken off."""
    x = (X + 1e4).float()
    _, _, var = local.batch_norm(x, None, None, 1e-5)
    torch.testing.assert_close(var.double(), x.double().var([0, 2, 3], correction=0), rtol=1e-4, atol=0)


# --- maxima beside it


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(
    "pool", [([3, 3], [2, 2], [1, 1], [1, 1], False), ([3, 2], [1, 2], [1, 0], [2, 1], True)], ids=str
)
def test_maxima_found_by_channels_are_where_torch_finds_them(pool: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Maxima are found so also of equal numbers, of -inf alone, and where there is a NaN."""
    x = torch.randint(-2, 3, (3, 17, 9, 11), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        x[0, 3, 4, 4], x[1], x[2, 0] = torch.nan, -torch.inf, torch.nan
    expected = torch.ops.aten.max_pool2d_with_indices(x, *pool)
    for mine, theirs in zip(pools.max_pool2d_with_indices(x, *pool), expected, strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
