"""A mask of positions becomes a flag of attention only where the flag allows the same keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.capture.graph.position_masks import without_position_masks
from autopar.proof.verify import verify

SGD = functools.partial(torch.optim.SGD, lr=0.1)
B, H, S, D = 2, 4, 6, 8
COMPARISONS = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq)
SHIFTS = {
    "top left": lambda queries, keys: 0,
    "bottom right": lambda queries, keys: keys - queries,
    "one before": lambda queries, keys: -1,
}


def attending(
    allowed: Callable[[Tensor, Tensor], Tensor], queries: int, keys: int
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Attention with a mask of the positions of queries (queries, 1) and keys (1, keys), as a graph; its inputs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = allowed(torch.arange(queries)[:, None], torch.arange(keys)[None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(B, 1, queries, keys))

    inputs = [torch.randn(B, H, n, D, dtype=torch.float64) for n in (queries, keys, keys)]
    return make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*inputs), inputs


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [10, 1 << 20], ids=["intervals", "values"])
@pytest.mark.parametrize("key_first", [False, True], ids=["query first", "key first"])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 8), (8, 4), (1, 8)])
def test_a_mask_of_compared_positions_allows_the_same_as_a_flag(
    queries: int, keys: int, key_first: bool, limit: int
) -> None:
    """The oracle is attention with the mask: strict or not, written either way round, aligned at either corner."""
    flags = 0
    for compare in COMPARISONS:
        for shift in SHIFTS.values():
            by = shift(queries, keys)

            def allowed(i: Tensor, j: Tensor, compare: Any = compare, by: int = by) -> Tensor:
                return compare(j, i + by) if key_first else compare(i + by, j)

            module, inputs = attending(allowed, queries, keys)
            want = module(*inputs)
            without_position_masks(module.graph, limit)
            module.recompile()
            torch.testing.assert_close(module(*inputs), want, rtol=1e-12, atol=1e-12, equal_nan=True)
            (call,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default)
            flags += call.args[3] is None
    assert flags >= (queries == keys)


@pytest.mark.parametrize("limit", [10, 1 << 20], ids=["intervals", "values"])
def test_masks_that_are_no_intervals_or_no_triangles_stay(limit: int) -> None:
    shuffled = lambda positions: (positions * 5) % 7  # noqa: E731
    for allowed in (
        lambda i, j: shuffled(j) <= shuffled(i),
        lambda i, j: -j <= -i,
        lambda i, j: (j <= i) & (j > i - 3),
        lambda i, j: (j <= i) & (i <= j + 2),
        lambda i, j: (j <= i) & (j >= 1),
        lambda i, j: (j <= i) & (i // 3 == j // 3),
        lambda i, j: (j <= 2 * i) & (j <= i + 1),
    ):
        module, inputs = attending(allowed, S, S)
        want = module(*inputs)
        without_position_masks(module.graph, limit)
        module.recompile()
        torch.testing.assert_close(module(*inputs), want, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("corner", ["top left", "bottom right"])
def test_causal_attention_to_more_keys_than_queries_equals_eager(corner: str) -> None:
    by = SHIFTS[corner](S - 2, S)

    class Later(nn.Module):
        """The last queries of a sequence whose first keys are there already."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(S)[None, :] <= torch.arange(S - 2)[:, None] + by
            q, k, v = self.q(x[:, :, 2:]), self.k(x), self.v(x)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()

    model, x = Later(), torch.randn(B, H, S, D)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (x,), optimizer=SGD)
    assert verify(program, model, (x,)).ok


@pytest.mark.parametrize("all_true", [True, False])
@pytest.mark.parametrize("shape", [(1, S), (B, 1, 1, S), (S, 1), (1, 1)], ids=str)
def test_a_mask_that_is_stretched_over_queries_or_keys_is_read_as_it_is_stretched(
    shape: tuple[int, ...], all_true: bool
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(math.prod(shape)).reshape(shape) >= (0 if all_true else 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = [torch.randn(B, H, S, D, dtype=torch.float64) for _ in range(3)]
    module = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*inputs)
    want = module(*inputs)
    without_position_masks(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*inputs), want, rtol=1e-12, atol=1e-12, equal_nan=True)
