"""The plans that a search may choose from: every size, split, schedule, recompute and ZeRO level that published runs use.

Sizes multiply to the ranks and can cut what they cut (`ParallelConfig.cuts`, and the batch); layers may be split unevenly.
Zero-bubble schedules are offered only with as many microbatches as their closed forms were checked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from autopar.costmodel.estimator.schedules import ESTIMATED
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape


@dataclass(frozen=True)
class Space:
    """The space of plans that the search may choose from. max_chunks: most pipeline chunks per group (vpp); max_tp:
    widest tensor parallelism."""

    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-2p", "zb-v")
    recomputes: tuple[str, ...] = ("none", "selective", "mlp", "full")
    zeros: tuple[int, ...] = (1, 2, 0, 3)
    micro_batches: tuple[int, ...] | None = None
    max_chunks: int = 32
    max_tp: int = 64
    max_cp: int = 64


PLAIN = ("1f1b", "gpipe", "interleaved")
"""Schedules that every pipeline framework has."""


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def sizes(
    model: TransformerShape, ranks: int, batch: int, space: Space, unequal: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """(dp, tp, pp, cp, ep) that multiply to the ranks and cut model and batch. unequal: into parts that may differ by a unit."""
    for tp in (t for t in divisors(ranks) if t <= space.max_tp):
        for pp in (p for p in divisors(ranks // tp) if p <= model.most_stages):
            for cp in (c for c in divisors(ranks // (tp * pp)) if c <= space.max_cp):
                dp = ranks // (tp * pp * cp)
                if (batch < dp if unequal else batch % dp) or cp & (cp - 1):
                    continue
                for ep in divisors(model.experts) if model.experts else (1,):
                    plan = ParallelConfig(dp, tp, pp, cp, ep)
                    if (dp * cp * tp) % ep == 0 and not (ep > 1 and batch % dp) and not plan.impossible(model, unequal):
                        yield dp, tp, pp, cp, ep


def micro_batches(batch: int, dp: int, space: Space, unequal: bool = False) -> tuple[int, ...]:
    """Sequences that a rank may take at a time; the most of any rank, where they are unequal."""
    possible = divisors(batch // dp)
    if unequal:
        rows = (batch // m for m in divisors(batch) if batch // m >= dp)
        possible = tuple(sorted({-(-n // dp) for n in rows}))
    return tuple(b for b in possible if space.micro_batches is None or b in space.micro_batches)


def pipelines(model: TransformerShape, pp: int, m: int, space: Space) -> Iterator[tuple[str, int | None]]:
    """(schedule, vpp) that a pipeline of pp groups can run with m microbatches."""
    if pp == 1:
        yield "1f1b", None
        return
    for name in space.schedules:
        row = ESTIMATED[name]
        if row.chunks is None:
            if m % pp == 0:
                yield from ((name, v) for v in range(2, min(space.max_chunks, model.most_stages // pp) + 1))
        elif m >= row.least(pp) and (row.chunks == 1 or row.chunks * pp <= model.most_stages):
            yield name, None if row.chunks == 1 else row.chunks


@lru_cache(maxsize=4096)
def storages(ranks: int, zeros: tuple[int, ...], everything: bool) -> tuple[tuple[int, int | None], ...]:
    """(zero, shard_group): ZeRO over all data-parallel ranks or groups of 2, 4, 8, ... of them; ZeRO-3 is apart."""
    groups = [None] + [1 << i for i in range(1, ranks.bit_length()) if ranks % (1 << i) == 0 and 1 << i < ranks]
    chosen = [z for z in zeros if (z == 3) == everything and (ranks > 1 or z != 3)]
    if ranks == 1:
        return tuple((z, None) for z in chosen[:1])
    return tuple((z, g) for z in chosen for g in (groups if z else [None]))
