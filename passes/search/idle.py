"""Plans that leave ranks idle: those of fewer ranks, for all that there are.

A number of ranks that neither the batch nor the dims divide by, or one that takes a slower link, may make a step longer than a
few ranks less would: 24 rows on 5 ranks want stages, on 4 of them every rank takes 6 rows. So where the ranks do not share the
batch evenly, a few smaller numbers that do are searched as if the cluster had so many, those that could win alone. The ranks beyond
start with the others, wait and end with them (`autopar/runtime/run/spares.py`).
"""

from __future__ import annotations

from itertools import islice
from math import gcd

from autopar.cluster import ClusterSpec, resized
from autopar.passes.search.lower_bounds import least_step_s, model_bytes
from autopar.passes.search.task import Task
from autopar.passes.shard.meshes import rows_of
from autopar.plan import Plan

MOST_NUMBERS = 2
"""Smaller numbers of ranks that are searched, of those that share the batch evenly."""
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


def could_win(smaller: Task, best_s: float) -> bool:
    """Whether bounds leave a plan on fewer ranks that fits and is faster than the best one so far."""
    state_bytes = sum(model_bytes(smaller, smaller.setting.offload).values())
    return state_bytes < smaller.room_bytes and least_step_s(smaller) < best_s


def _may_idle(task: Task) -> bool:
    """Whether the options leave the number of ranks to the search, and devices are alike."""
    options = task.options
    is_free = options.strategy == "auto" and not (options.mesh or options.pp or options.stage_boundaries or task.layout)
    return options.idle_ranks and is_free and task.cluster.homogeneous_devices


def fewer_ranks(task: Task) -> list[int]:
    """Smaller numbers of ranks that are worth a search, largest first; none where all are to have work."""
    if not _may_idle(task):
        return []
    ranks, node = task.cluster.size, task.cluster.levels[0].group_size if task.cluster.levels else task.cluster.size
    rows = (rows_of(task.program) or 1) * task.setting.microbatches

    def is_even(n: int) -> bool:
        """Whether n ranks share the rows evenly, or a power of two of ranks in a node each row, on whole nodes."""
        share = n // gcd(rows, n)
        return share & (share - 1) == 0 and share <= node and (n <= node or n % node == 0)

    if ranks & (ranks - 1) == 0 and is_even(ranks):
        return [node] if node < ranks else []
    numbers = {*islice(filter(is_even, range(ranks - 1, 0, -1)), MOST_NUMBERS)}
    if 1 < ranks <= FEW_RANKS:
        numbers.add(ranks - 1)
    return sorted(numbers, reverse=True)
