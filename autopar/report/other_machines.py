"""The same steps on other machines: programs that are written beside one, for other numbers of ranks and for slower ranks.

A run may change from one to another at a save, so losses must not. Where random numbers are drawn, or microbatches are batches of
their own, these depend on microbatches and order of the plan, and both stay. Every entry and bucket is held to that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from autopar.cluster import ClusterSpec, resized
from autopar.cluster.given import as_cluster
from autopar.compiled import Compiled
from autopar.errors import AutoparError, InputError
from autopar.plan import Plan
from autopar.report.candidates import slower_cases, worth_moving_to
from autopar.request import Request
from autopar.runtime.data.schema import is_number, shown

MOST_SLOWER = 100.0
P = TypeVar("P", bound=Compiled)


def on_clusters(
    program: P, also: Sequence[int | ClusterSpec | str | Path], compile_again: Callable[[Request], P]
) -> list[P]:
    """The program for other clusters, or numbers of ranks of its own. compile_again: meets a request. Raises InputError,
    ClusterError, and what `compile` raises."""
    others = []
    for cluster in _clusters(program, also):
        try:
            request = program.request.on_cluster(cluster, *_kept_batches(program))
            others.append(_same_steps(program, compile_again(request)))
        except AutoparError as error:
            error.add_note(f"This is of the program for {cluster.size} ranks, {cluster.name}, in save(also=…).")
            raise
    return others


def where_slower(
    program: P, factors: Sequence[float], compile_again: Callable[[Request], P], with_plan: Callable[[Plan], P]
) -> list[P]:
    """The program under plans that are faster where a part of its ranks takes so many times as long. with_plan: gives the program
    under a plan. Raises InputError."""
    if not isinstance(factors, (list, tuple)) or not all(is_number(one, 1, MOST_SLOWER) and one > 1 for one in factors):
        raise InputError(f"save: slower is a list of factors above 1, such as [1.5, 2, 3], not {shown(factors)}")
    if factors and not (program.options.rebalance and program.training and program.plan.ranks == program.cluster.size):
        raise InputError(
            "save(slower=…) is for training programs compiled with Options(rebalance=True), whose plan leaves no rank idle "
            "(Options.idle_ranks)"
        )
    kept = [program]
    for cluster, slowness in slower_cases(program.request.cluster, program.plan, factors):
        try:
            request = program.request.where_slower(cluster, *_kept_batches(program))
            other = with_plan(_same_steps(program, compile_again(request)).plan)
        except AutoparError as error:
            warnings.warn(f"save(slower=…): no plan for {cluster.name}: {error}", stacklevel=4)
            continue
        if worth_moving_to(program.plan, program.pipeline, other.plan, other.pipeline, slowness) and all(
            (other.plan.stages, other.plan.placement) != (one.plan.stages, one.plan.placement) for one in kept
        ):
            kept.append(other)
    return kept[1:]


def _clusters(program: Compiled, also: Sequence[int | ClusterSpec | str | Path]) -> list[ClusterSpec]:
    """The clusters that `save` is told of. Raises InputError, ClusterError."""
    if isinstance(also, str) or not isinstance(also, Sequence):
        raise InputError(f"save: also is a list of numbers of ranks or of clusters, not {shown(also)}")
    clusters = [resized(program.request.cluster, one) if isinstance(one, int) else as_cluster(one) for one in also]
    sizes = [program.cluster.size, *(cluster.size for cluster in clusters)]
    twice = next((size for size in sizes if sizes.count(size) > 1), None)
    if twice is not None:
        raise InputError(
            f"save: there would be two programs for {twice} ranks, and run.py tells them apart by their number; name every "
            f"number in also= once, and not {program.cluster.size}, for which the program was compiled"
        )
    return clusters


def _fixed(program: Compiled) -> list[bool]:
    """Whether the losses of each form depend on microbatches and order."""
    return [form.request.options.coupled != "refuse" or form.ir.random for form in program.forms]


def _kept_batches(program: Compiled) -> tuple[int | None, int | None]:
    """Microbatches and order that other plans of the same steps are to have; None where they may have any."""
    if any(_fixed(program)):
        return program.plan.microbatches, program.plan.order
    return program.options.microbatches, program.options.order


def _same_steps(program: P, other: P) -> P:
    """The other program. Raises InputError where its steps are not the same."""
    ranks = other.cluster.size
    for ours, theirs, same in zip(program.forms, other.forms, _fixed(program), strict=True):
        if same and (ours.plan.microbatches, ours.plan.order) != (theirs.plan.microbatches, theirs.plan.order):
            raise InputError(
                f"save: on {ranks} ranks a batch of another shape would be cut into {theirs.plan.microbatches} "
                f"microbatches, not {ours.plan.microbatches}, and random numbers depend on that; set Options.microbatches"
            )
    differing = _tensors(program) ^ _tensors(other)
    if differing:
        raise InputError(
            f"save: the program for {ranks} ranks holds other tensors than that for {program.plan.ranks} "
            f"({', '.join(sorted(differing)[:5])}), so neither could go on from the other's steps; leave {ranks} out"
        )
    return other


def _tensors(program: Compiled) -> set[str]:
    """The names of all parameters and buffers."""
    return {name for form in program.forms for name in (*form.ir.parameters, *form.ir.buffers)}
