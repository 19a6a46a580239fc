"""Which stages a pipeline may have: what options, model and cluster leave open, and the submeshes that stages may run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.lower.cut import cut_points
from autopar.passes.schedule import SCHEDULES
from autopar.passes.search.microbatches import MOST_GROUPS
from autopar.passes.search.task import Task
from autopar.passes.shard.meshes import candidate_meshes, odd_part
from autopar.runtime.data.schema import did_you_mean

MIXED_RANKS = 16
"""Up to here stages may have submeshes of different sizes."""


def leaves_stages_open(options: Options, ranks: int) -> bool:
    """Whether the options leave it to the search how many stages there are."""
    return ranks > 1 and options.pp != 1 and options.strategy == "auto" and options.mesh is None


def check_pipeline_options(task: Task) -> None:
    """Raises InputError for more stages than there are places to cut, unknown schedules and boundaries, and for several stages
    per group where devices differ."""
    options = task.options
    if options.schedule not in ("auto", *SCHEDULES):
        raise InputError(
            f"Options.schedule {options.schedule!r} is unknown; choose auto or one of {', '.join(SCHEDULES)}"
            f"{did_you_mean(options.schedule, SCHEDULES)}"
        )
    if options.schedule == "forward" and task.program.training:
        raise InputError(
            "Options.schedule 'forward' is for inference, and this is a training step; choose auto or another schedule"
        )
    most = len(cut_points(task.program)) + 1
    fewest = options.pp or (2 if (options.chunks or 1) > 1 and options.stage_boundaries is None else 1)
    each = (_chunks(options) or 1) if options.asks_for_pipeline else 1
    if fewest * each > most or fewest > task.cluster.size:
        why = "Options.chunks" if options.chunks is not None else f"the schedule {options.schedule}"
        of_each = f" ({each} on each of {fewest} groups of ranks: {why})" if each > 1 else ""
        blocks = ", ".join(dict.fromkeys(place for c in task.program.calls if (place := c.path or c.start)))
        raise InputError(
            f"Options ask for {fewest * each} stages{of_each}; this model can be cut into {most} at most (its blocks: {blocks}), "
            f"and the cluster has {task.cluster.size} ranks; ask for fewer"
        )
    per_group = max(options.chunks or 1, 1 if options.schedule == "auto" else SCHEDULES[options.schedule].stages[0])
    if per_group > 1 and not task.cluster.homogeneous_devices:
        raise InputError(
            f"Options ask for {per_group} stages per group of ranks, for which groups are to be alike; this cluster has "
            f"{' and '.join(sorted({d.name for _, d in task.cluster.devices}))}; leave Options.chunks out, and choose 1f1b, a "
            "zb-h schedule or auto"
        )
    groups = options.pp
    if options.stage_boundaries is not None:
        _check_boundaries(task, options.stage_boundaries)
        groups = (len(options.stage_boundaries) + 1) // per_group
    if groups and per_group > 1 and task.cluster.size % groups:
        fit = [n for n in range(2, most // per_group + 1) if task.cluster.size % n == 0]
        numbers = f"{' or '.join(map(str, fit))} groups" if fit else "another number of ranks"
        raise InputError(
            f"Options ask for {per_group} stages on each of {groups} groups of ranks, for which groups are to be alike; "
            f"{task.cluster.size} ranks are no {groups} equal groups; choose {numbers}, 1f1b, a zb-h schedule or auto"
        )
    if options.mesh is not None and options.asks_for_pipeline:
        _check_mesh_of_stages(task)


def _check_mesh_of_stages(task: Task) -> None:
    """Raises InputError where the mesh that is asked for, one for each group of ranks, leaves ranks over or leaves one group."""
    options, ranks = task.options, task.cluster.size
    each, groups = options.mesh_ranks, StageLimits.of(task).pp
    if ranks != each * (groups or max(ranks // each, 2)):
        wanted = f"{groups} groups of ranks" if groups else "two or more groups of ranks"
        raise InputError(
            f"Options.mesh {dict(options.mesh or {})} is that of every group of ranks of a pipeline, and has {each}; the options "
            f"ask for {wanted}, the cluster has {ranks} ranks; "
            + (
                f"make the axis sizes multiply to {ranks // groups}"
                if groups and ranks % groups == 0
                else "choose a number of stages, and axis sizes, that multiply to the number of ranks"
            )
        )


def _check_boundaries(task: Task, paths: Sequence[str]) -> None:
    """Raises InputError for boundaries that make other numbers of stages than groups of ranks can run."""
    options, stages, per_group = task.options, len(boundary_calls(task.program, paths)) + 1, _chunks(task.options) or 1
    makes = f"Options.stage_boundaries {list(paths)} make {stages} stages"
    if per_group == 1 and options.pp not in (None, stages):
        raise InputError(
            f"{makes}, Options.pp is {options.pp}; leave one of them out, or say with Options.chunks how many stages a group of "
            "ranks runs"
        )
    if per_group > 1 and (stages % per_group or stages == per_group or options.pp not in (None, stages // per_group)):
        raise InputError(
            f"{makes}, of which every group of ranks runs {per_group} (Options.chunks, or the schedule {options.schedule}); "
            f"name {options.pp or 'pp'} x {per_group} stages in the model's order, for two groups or more, or leave one of the "
            "options out"
        )
    if stages // per_group > task.cluster.size:
        raise InputError(
            f"{makes} on {stages // per_group} groups of ranks, the cluster has {task.cluster.size} ranks; name fewer, or more "
            "stages per group with Options.chunks"
        )


def _chunks(options: Options) -> int | None:
    """Stages per group of ranks that the options or their schedule ask for, one where boundaries say no more; None: searched."""
    if options.chunks is not None or options.schedule != "auto":
        return options.chunks or SCHEDULES[options.schedule].stages[0]
    return 1 if options.stage_boundaries is not None else None


def boundary_calls(program: Program, paths: Sequence[str]) -> tuple[int, ...]:
    """First calls of stages that start at these module paths. Raises InputError for paths that no call starts at."""
    points = cut_points(program)
    firsts: list[int] = []
    for path in paths:
        first = next((i for i, c in enumerate(program.calls) if (c.start + ".").startswith(path + ".")), 0)
        if first not in points:
            places = dict.fromkeys(c.path.split("@")[0] or c.start for i, c in enumerate(program.calls) if i in points)
            raise InputError(
                f"Options.stage_boundaries: no stage can start at {path!r}; the places are "
                f"{', '.join(place for place in places if place) or 'none'}"
            )
        firsts.append(first)
    if firsts != sorted(set(firsts)):
        raise InputError(f"Options.stage_boundaries must be in the model's order and differ; they are {list(paths)}")
    return tuple(firsts)


@dataclass(frozen=True)
class StageLimits:
    """The freedom that options leave about the stages of a task.

    boundaries: first calls of the stages after the first one, where the options name them. pp: the number of groups of
    ranks, where the options say it; chunks: of stages per group. most_stages: as many as the program can be cut into. kinds:
    first rank of every run of equal devices. available: devices of every such run. mixed: whether stages may have submeshes of
    different sizes.
    """

    boundaries: tuple[int, ...] | None
    pp: int | None
    chunks: int | None
    most_stages: int
    kinds: list[int]
    available: tuple[int, ...]
    mixed: bool

    @classmethod
    def of(cls, task: Task) -> StageLimits:
        options, program, cluster = task.options, task.program, task.cluster
        named = options.stage_boundaries
        boundaries = boundary_calls(program, named) if named is not None else None
        chunks = _chunks(options)
        kinds = cluster.kind_starts
        ends = [*kinds[1:], cluster.size]
        return cls(
            boundaries,
            (len(boundaries) + 1) // (chunks or 1) if boundaries is not None else options.pp,
            chunks,
            len(cut_points(program)) + 1,
            kinds,
            tuple(end - first for first, end in zip(kinds, ends, strict=True)),
            cluster.size <= MIXED_RANKS or len(kinds) > 1,
        )

    def submeshes(self, task: Task) -> list[Mesh]:
        """Submeshes that stages may have, each of devices of one kind, fast links filled first."""
        ranks, pp = task.cluster.size, self.pp
        if task.options.mesh is not None:
            sizes = [task.options.mesh_ranks]
        elif pp is not None and ranks % pp == 0 and not self.mixed:
            sizes = [ranks // pp]
        else:
            sizes = [n for n in range(1, ranks) if self._may_have(n, ranks)]
        return [
            Mesh(mesh.axes, first)
            for first, available in zip(self.kinds, self.available, strict=True)
            for n in sizes
            if n <= available
            for mesh in reversed(candidate_meshes(task.cluster, task.options, n))
        ]

    def _may_have(self, n: int, ranks: int) -> bool:
        """Whether a stage may have a submesh of n ranks: the odd part of all ranks lies in the submeshes or in their number."""
        groups = ranks // n
        if self.mixed:
            return ranks % n == 0 or n & (n - 1) == 0
        few = 2 <= groups <= min(self.most_stages, MOST_GROUPS)
        return ranks % n == 0 and few and 1 in (odd_part(groups), odd_part(n))
