"""Plans that leave ranks idle: those of fewer ranks, for all that there are.

A number of ranks that neither the batch nor the dims divide by, or one that takes a slower link, may make a step longer than a
few ranks less would: 24 rows on 5 ranks want stages, on 4 of them every rank takes 6 rows. So where the ranks do not share the
batch evenly, a few smaller numbers that do are searched as if the cluster had so many, those alone that could win. Ranks beyond
start with the others, wait and end with them (`autopar/runtime/run/spares.py`).
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import gcd

from autopar.cluster import ClusterSpec, resized
from autopar.passes.search.lower_bounds import least_step_s, model_bytes
from autopar.passes.search.task import Task
from autopar.passes.shard.uneven import rows_of
from autopar.plan import Plan

MOST_NUMBERS = 2
"""Smaller numbers of ranks that are searched, of those that share the batch evenly."""
MOSTLY_WAITING = 2.0
"""How many times its products, perfectly shared, a step takes at least where all ranks share evenly and fewer are searched."""
FEW_RANKS = 16
"""Up to so many ranks one rank less is searched too."""


def planned_ranks(cluster: ClusterSpec, plan: Plan) -> ClusterSpec:
    """The part of a cluster that a plan has ranks on."""
    return cluster if plan.ranks >= cluster.size else resized(cluster, plan.ranks)


def on_fewer_ranks(task: Task, ranks: int) -> Task:
    """The task on the first ranks of its cluster."""
    smaller = task.changed(cluster=resized(task.cluster, ranks))
    smaller.pricers = smaller.pricers.until(task.pricers.is_over)
    return smaller


def could_win(task: Task, smaller: Task, best_s: float) -> bool:
    """Whether a plan on fewer ranks may fit and be faster than the best one so far. Ranks that share the batch evenly lose to
    fewer by messages and launches alone, so products must leave most of the step to these."""
    products_s = least_step_s(smaller) * (MOSTLY_WAITING if _is_even(task, task.cluster.size) else 1.0)
    state_bytes = sum(model_bytes(smaller, smaller.setting.offload).values())
    return state_bytes < smaller.room_bytes and products_s < best_s


def _may_idle(task: Task) -> bool:
    """Whether the options leave the number of ranks to the search, and devices are alike."""
    options = task.options
    asked = options.mesh or options.axes or options.asks_for_pipeline or options.pp or task.layout
    is_free = options.strategy == "auto" and not asked
    return options.idle_ranks and is_free and task.cluster.homogeneous_devices


def _node(task: Task) -> int:
    """Ranks that the fastest links join."""
    return task.cluster.levels[0].group_size if task.cluster.levels else task.cluster.size


def _is_even(task: Task, ranks: int) -> bool:
    """Whether so many ranks share the rows evenly, or a power of two of ranks in a node each row, on whole nodes."""
    node, rows = _node(task), (rows_of(task.program) or 1) * task.setting.microbatches
    share = ranks // gcd(rows, ranks)
    return share & (share - 1) == 0 and share <= node and (ranks <= node or ranks % node == 0)


def fewer_ranks(task: Task) -> list[int]:
    """Smaller numbers of ranks that are worth a search, largest first; none where all are to have work."""
    if not _may_idle(task):
        return []
    ranks, is_even = task.cluster.size, partial(_is_even, task)
    if ranks & (ranks - 1) == 0 and is_even(ranks):
        return [_node(task)] if _node(task) < ranks else []
    numbers = {*islice(filter(is_even, range(ranks - 1, 0, -1)), MOST_NUMBERS)}
    if 1 < ranks <= FEW_RANKS:
        numbers.add(ranks - 1)
    return sorted(numbers, reverse=True)
