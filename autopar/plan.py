"""Plan: decisions only. Small, JSON, hand-editable, diffable, replayable.

Per stage: which calls, on which mesh of ranks, and per template a strategy for every op (`"dp=b tp=o"`: mesh axis =
factor of the op's rule) and a spec for every decision point (`"x@save": "[@dp, ., .]"`), and per parameter how it is
stored and how its gradient and optimizer state are (together: ZeRO 0–3). `lower(program, plan)` is a function of
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from autopar.errors import PlanError
from autopar.ir.actions import parse_row, show_row
from autopar.ir.memory_levers import PRECISIONS
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.rule import Strategy
from autopar.ir.spec import Spec, parse_spec
from autopar.runtime.data.datafile import read_json
from autopar.runtime.data.fields import Form, Length, Pairs, from_data, kept, notation, to_data
from autopar.runtime.data.schema import (
    MOST_RANKS,
    SchemaError,
    choice,
    integer,
    is_integer,
    must_be,
    parsed,
    shown,
    table,
    text,
    where,
)
from autopar.runtime.data.whole_files import replace_file
from autopar.runtime.gradients.compression import CODECS
from autopar.runtime.memory.tiers import HOST_MEMORY, tier_names

VERSION = 1
OVERLAPS = ("", "between", "next", "any")
"""How far lines change places to run while messages travel: not at all, each message being waited for where it starts (""), and
ever further, with ever more that is held meanwhile."""
GIVEN = "@given"
MOST_PIECES = 64
"""The most pieces of a block that are run one beside another's messages."""


def _tier(value: object, path: str, device: str | None = None) -> Any:
    """The schema of a tier's name. device: what stands for none."""
    names = tier_names() if device is None else ("", *tier_names())
    what = f"a memory tier, of {', '.join(tier_names())}{'' if device is None else f' (or empty: {device})'}"
    return where(lambda name: isinstance(name, str) and name in names, what)(value, path)


Tier = Annotated[str, _tier]
TierOrDevice = Annotated[str, partial(_tier, device="on the device")]
SpecText = Annotated[Spec, notation(parse_spec, Spec.show)]
StrategyTexts = Annotated[dict[str, Strategy], Form(table(text(), text()), dict)]
"""Strategies as text: what it says depends on the mesh of the stage, which reads and writes it."""
Row = Annotated[str, parsed(lambda row: show_row(parse_row(row)), text(1 << 24))]
SPARSE = kept(sparse=True)
REQUIRED = kept(required=True)


@dataclass(frozen=True)
class TemplatePlan:
    """strategies: op node -> choice per mesh axis. specs: placeholders and hubs -> spec; a placeholder that is given in another
    spec and converted inside also has that one, under its name with "@given".

    recompute: values of forward that backward makes again instead of their being kept (`autopar.passes.recompute`).
    recompute_calls: the first calls of the template in the stage that do so, of those that have a backward (None: all);
    recompute_after: what the calls after these make again instead.
    offload: kept values that rest in the memory tier `offload_tier` from forward to backward (`autopar.passes.shard.offload`).
    overlap: which lines run while messages travel, a name of OVERLAPS (`autopar.passes.lower.overlap`).
    pieces: into how many pieces of the batch blocks are cut, so that messages of one travel while another is computed with; cut:
    the inputs and the gradients of outputs that are, each with its dim (`autopar.passes.lower.pieces`).
    insists: overlap and pieces are as said also where they are not estimated to be faster.
    """

    strategies: StrategyTexts
    specs: dict[str, SpecText]
    recompute: tuple[str, ...] = field(default=(), metadata=SPARSE)
    recompute_calls: Annotated[int, integer(1)] | None = field(default=None, metadata=SPARSE)
    recompute_after: tuple[str, ...] = field(default=(), metadata=kept(beside="recompute_calls"))
    offload: tuple[str, ...] = field(default=(), metadata=SPARSE)
    offload_tier: Tier = field(default=HOST_MEMORY.name, metadata=kept(beside="offload"))
    overlap: Annotated[str, choice(OVERLAPS)] = field(default="", metadata=SPARSE)
    pieces: Annotated[int, integer(1, MOST_PIECES)] = field(default=1, metadata=SPARSE)
    cut: Annotated[tuple[tuple[str, int], ...], Pairs()] = field(default=(), metadata=kept(beside="pieces"))
    insists: bool = field(default=False, metadata=SPARSE)

    def given(self, value: str) -> Spec:
        """The spec in which a placeholder is given to the template. Raises KeyError."""
        return self.specs.get(f"{value}{GIVEN}", self.specs[value])


@dataclass(frozen=True)
class ParameterPlan:
    """storage: how the parameter rests between steps. optimizer: gradient and optimizer state (refines storage).

    tier: the memory tier in which the stored shard and its gradient rest; optimizer_tier: that of the optimizer's state
    ("": on the device). narrow: a copy of the shard in the lower precision that calls read rests beside it and is made once a
    step, where else every use casts it. by_microbatch: the gradient is reduced after every microbatch, so that its shard alone
    rests in between, and not once after the last.
    """

    storage: SpecText
    optimizer: SpecText
    tier: TierOrDevice = field(default="", metadata=SPARSE)
    optimizer_tier: TierOrDevice = field(default="", metadata=SPARSE)
    narrow: bool = field(default=False, metadata=SPARSE)
    by_microbatch: bool = field(default=False, metadata=SPARSE)

    @property
    def unassigned(self) -> ParameterPlan:
        """The plan with the first rank as its owner, where it has one."""
        return replace(self, storage=self.storage.unassigned, optimizer=self.optimizer.unassigned)


@dataclass(frozen=True)
class StagePlan:
    """calls: half-open range of call indices. mesh: axes over the stage's ranks, `mesh.offset` its first rank."""

    calls: tuple[int, int]
    mesh: Mesh = field(metadata=kept(inline=True))
    templates: dict[str, TemplatePlan]
    parameters: dict[str, ParameterPlan]

    def as_written(self) -> StagePlan:
        """The stage with its strategies as text, as files have them."""
        return self._with_strategies(lambda strategy, _: show_strategy(strategy, self.mesh))

    def as_read(self, path: str) -> StagePlan:
        """Inverse of `as_written`. Raises SchemaError where a strategy or a spec is of other axes than the mesh's."""
        stage = self._with_strategies(parsed(lambda words: parse_strategy(words, self.mesh)), path)
        for name, template in self.templates.items():
            for value, spec in template.specs.items():
                _check_axes(spec, self.mesh, f"{path}.templates.{name}.specs.{value}")
                if spec.run:
                    raise SchemaError(
                        f"{path}.templates.{name}.specs.{value}: {spec} has a run, as parameters alone rest"
                    )
        for name, parameter in self.parameters.items():
            _check_axes(parameter.storage, self.mesh, f"{path}.parameters.{name}.storage")
            _check_axes(parameter.optimizer, self.mesh, f"{path}.parameters.{name}.optimizer")
        return stage

    def _with_strategies(self, convert: Callable[[Any, str], Any], path: str = "") -> StagePlan:
        """The stage with every strategy converted. path: of the stage in its file."""
        templates = {
            name: replace(
                t,
                strategies={n: convert(s, f"{path}.templates.{name}.strategies.{n}") for n, s in t.strategies.items()},
            )
            for name, t in self.templates.items()
        }
        return replace(self, templates=templates)


@dataclass(frozen=True)
class Plan:
    """Everything the compiler decided. `origin` says who decided (solver, a baseline's name, random seed, a person).

    stages: in program order; stages on the same ranks are interleaved. schedule: a name of `passes.schedule`. table: the
    actions of every group where they do not follow from the name ("F0.0 F1.0 B0.0 …"). placement: logical rank of every
    physical one (empty: the same). precision: "bf16" or "fp16" where the program computes in it ("": as the model is).
    order: causal sequences are in zigzag order of so many blocks (`autopar.passes.order`; 0: as they are). gradient_compression:
    how gradients travel while they are reduced, a name of `runtime.gradients.compression.CODECS` ("": as they are).
    """

    program: str
    cluster: str
    ranks: Annotated[int, integer(1, MOST_RANKS)]
    stages: Annotated[tuple[StagePlan, ...], Length(1)] = field(metadata=kept(last=True))
    microbatches: Annotated[int, integer(1)] = field(default=1, metadata=REQUIRED)
    schedule: str = field(default="none", metadata=REQUIRED)
    origin: str = field(default="solver", metadata=REQUIRED)
    predicted: dict[str, float] = field(default_factory=dict, compare=False, metadata=REQUIRED)
    table: tuple[Row, ...] = ()
    placement: tuple[Annotated[int, integer(0, MOST_RANKS)], ...] = ()
    precision: Annotated[str, choice(("", *PRECISIONS))] = field(default="", metadata=SPARSE)
    order: Annotated[int, integer(0, MOST_RANKS)] = field(default=0, metadata=SPARSE)
    gradient_compression: Annotated[str, choice(("", *CODECS))] = field(default="", metadata=SPARSE)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def show_meshes(self) -> str:
        """`dp=2×tp=2`, or the meshes of a pipeline's stages: `1f1b of 2 stages on dp=2`."""
        meshes = list(dict.fromkeys(str(stage.mesh) for stage in self.stages))
        if len(self.stages) == 1:
            return meshes[0] + (f", {self.microbatches} microbatches" if self.microbatches > 1 else "")
        shown = ", ".join(meshes[:4]) + (", …" if len(meshes) > 4 else "")
        return f"{self.schedule} of {len(self.stages)} stages on {shown}, {self.microbatches} microbatches"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"autopar_plan": VERSION, **to_data(self)}

    def as_read(self, path: str) -> Plan:
        """The plan as a file has it. Raises SchemaError where its placement does not name every rank once."""
        if self.placement and sorted(self.placement) != list(range(self.ranks)):
            raise must_be("placement", f"every rank from 0 to {self.ranks - 1} once", self.placement)
        return self

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Inverse of `to_dict`. Raises PlanError where anything is missing or malformed."""
        if (
            not isinstance(data, Mapping)
            or not isinstance(data.get("stages", [0]), list)
            or not data.get("stages", [0])
        ):
            raise PlanError(
                "the plan is corrupt: it must be a JSON object with a list of stages; compile again to write a new one"
            )
        fields = dict(data)
        version = fields.pop("autopar_plan", "none")
        if not is_integer(version, VERSION, VERSION):
            raise PlanError(f"this plan is of format {shown(version)}, this autopar reads {VERSION}; plan again")
        try:
            return from_data(Plan, fields)
        except SchemaError as error:
            raise PlanError(f"the plan is corrupt: {error}; compile again to write a new one") from error

    def to_json(self) -> str:
        """The text of plan.json."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write JSON. Raises PlanError where the file cannot be written."""
        try:
            replace_file(Path(path), self.to_json().encode())
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}: {error.strerror}") from error

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read JSON. Raises PlanError when the file is missing or corrupt."""
        try:
            data = read_json(Path(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{path} is no JSON of a plan ({error}); compile again to write a new plan") from error
        return Plan.from_dict(data)


def checked_plan(plan: Plan | str | Path) -> Plan:
    """A plan that the user made or changed, or the path of one. Raises PlanError where it could not come from a file."""
    if not isinstance(plan, Plan):
        return Plan.load(plan)
    try:
        data = plan.to_dict()
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise PlanError(f"the plan is corrupt: {error}; change plans with dataclasses.replace") from error
    Plan.from_dict(data)
    return plan


def check_plan(plan: Plan, program: Program) -> None:
    """Raises PlanError where stages, calls and parameters of a plan for `program` do not add up."""
    ranks = sum(size for _, size in {(s.mesh.offset, s.mesh.size) for s in plan.stages})
    if ranks != plan.ranks:
        raise PlanError(f"the plan is corrupt: its meshes have {ranks} ranks in all, it says {plan.ranks}")
    ends = [0, *(s.calls[1] for s in plan.stages)]
    if [s.calls[0] for s in plan.stages] != ends[:-1] or ends[-1] != len(program.calls) or ends != sorted(ends):
        held = ", ".join(f"{first} to {last}" for first, last in (s.calls for s in plan.stages))
        raise PlanError(
            f"the plan is corrupt: its stages hold calls {held}; in order they must hold each of the program's "
            f"{len(program.calls)} once"
        )
    for stage in plan.stages:
        for name, p in stage.parameters.items():
            if not p.optimizer.refines(p.storage):
                raise PlanError(
                    f"parameter {name}: the optimizer state {p.optimizer.show()} must be sharded at least like the stored "
                    f"parameter {p.storage.show()}, over the same axes first; beside a run it is the same run"
                )
            owner = p.optimizer.owner
            if owner is not None and (owner >= stage.mesh.product(p.optimizer.run) or p.tier or any(p.optimizer.dims)):
                raise PlanError(
                    f"parameter {name}: {p.optimizer.show()} must name one of {stage.mesh.product(p.optimizer.run)} ranks, which "
                    "has all of the tensor in its device's memory"
                )
            if any(stage.mesh.sizes[axis] == 1 for axis in p.optimizer.run):
                raise PlanError(
                    f"parameter {name}: the run {p.optimizer.show()} is over an axis of one rank; leave that out"
                )


def show_strategy(strategy: Strategy, mesh: Mesh) -> str:
    """`dp=b tp=o`; axes without a choice are left out."""
    return " ".join(f"{axis}={choice}" for axis, choice in zip(mesh.names, strategy, strict=True) if choice)


def parse_strategy(words: str, mesh: Mesh) -> Strategy:
    """Inverse of `show_strategy`. Raises PlanError on an axis that the mesh does not have."""
    if not isinstance(words, str) or not all("=" in part for part in words.split()):
        raise PlanError(f"{words!r} is no strategy; write axis=factor per mesh axis, such as 'dp=b tp=o', or ''")
    choices = dict(part.split("=", 1) for part in words.split())
    if len(choices) < len(words.split()):
        raise PlanError(f"strategy {words!r} has a mesh axis twice; give each axis one factor")
    unknown = set(choices) - set(mesh.names)
    if unknown:
        raise PlanError(f"strategy {words!r} uses {', '.join(sorted(unknown))}, the mesh has {', '.join(mesh.names)}")
    return tuple(choices.get(axis, "") for axis in mesh.names)


def _check_axes(spec: Spec, mesh: Mesh, path: str) -> None:
    """Raises SchemaError for a spec over axes that the mesh does not have."""
    unknown = sorted(spec.axes - set(mesh.names))
    if unknown:
        raise SchemaError(f"{path}: {spec} uses axis {', '.join(unknown)}, the mesh is {mesh}")
