"""Plan: decisions only. Small, JSON, hand-editable, diffable, replayable.

Per stage: which calls, on which mesh of ranks, and per template a strategy for every op (`"dp=b tp=o"`: mesh axis =
factor of the op's rule) and a spec for every decision point (`"x@save": "[@dp, ., .]"`), and per parameter how it is
stored and how its gradient and optimizer state are (together: ZeRO 0–3). `lower(program, plan)` is a function of
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.ir.actions import parse_row, show_row
from autopar.ir.memory_levers import PRECISIONS
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.rule import Strategy
from autopar.ir.spec import Spec, parse_spec
from autopar.runtime.data.datafile import read_json
from autopar.runtime.data.schema import (
    MOST_RANKS,
    SchemaError,
    choice,
    flag,
    identifier,
    integer,
    listed,
    must_be,
    number,
    parsed,
    record,
    row,
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


@dataclass(frozen=True)
class TemplatePlan:
    """strategies: op node -> choice per mesh axis. specs: placeholders and hubs -> spec; a placeholder that is given in another
    spec and converted inside also has that one, under its name with "@given".

    recompute: values of forward that backward makes again instead of their being kept (`autopar.passes.recompute`).
    offload: kept values that rest in the memory tier `offload_tier` from forward to backward (`autopar.passes.shard.offload`).
    overlap: which lines run while messages travel, a name of OVERLAPS (`autopar.passes.lower.overlap`).
    pieces: into how many pieces of the batch blocks are cut, so that messages of one travel while another is computed with; cut:
    the inputs and the gradients of outputs that are, each with its dim (`autopar.passes.lower.pieces`).
    insists: overlap and pieces are as said also where they are not estimated to be faster.
    """

    strategies: dict[str, Strategy]
    specs: dict[str, Spec]
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offload_tier: str = HOST_MEMORY.name
    overlap: str = ""
    pieces: int = 1
    cut: tuple[tuple[str, int], ...] = ()
    insists: bool = False

    def given(self, value: str) -> Spec:
        """The spec in which a placeholder is given to the template. Raises KeyError."""
        return self.specs.get(f"{value}{GIVEN}", self.specs[value])


@dataclass(frozen=True)
class ParameterPlan:
    """storage: how the parameter rests between steps. optimizer: gradient and optimizer state (refines storage).

    tier: the memory tier in which the stored shard and its gradient rest; optimizer_tier: that of the optimizer's state
    ("": on the device).
    """

    storage: Spec
    optimizer: Spec
    tier: str = ""
    optimizer_tier: str = ""


@dataclass(frozen=True)
class StagePlan:
    """calls: half-open range of call indices. mesh: axes over the stage's ranks, `mesh.offset` its first rank."""

    calls: tuple[int, int]
    mesh: Mesh
    templates: dict[str, TemplatePlan]
    parameters: dict[str, ParameterPlan]


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
    ranks: int
    stages: tuple[StagePlan, ...]
    microbatches: int = 1
    schedule: str = "none"
    origin: str = "solver"
    predicted: dict[str, float] = field(default_factory=dict, compare=False)
    table: tuple[str, ...] = ()
    placement: tuple[int, ...] = ()
    precision: str = ""
    order: int = 0
    gradient_compression: str = ""

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
        return {
            "autopar_plan": VERSION,
            "program": self.program,
            "cluster": self.cluster,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "origin": self.origin,
            "predicted": self.predicted,
            "table": list(self.table),
            "placement": list(self.placement),
            **({"precision": self.precision} if self.precision else {}),
            **({"order": self.order} if self.order else {}),
            **({"gradient_compression": self.gradient_compression} if self.gradient_compression else {}),
            "stages": [_stage_out(s) for s in self.stages],
        }

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
        version = data.get("autopar_plan", VERSION)
        if version != VERSION:
            raise PlanError(f"this plan is of format {shown(version)}, this autopar reads {VERSION}; plan again")
        try:
            return _plan_in(data)
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
            coarser = [
                fine[: len(whole)] != whole for fine, whole in zip(p.optimizer.dims, p.storage.dims, strict=False)
            ]
            if any(coarser) or len(p.optimizer.dims) != len(p.storage.dims):
                raise PlanError(
                    f"parameter {name}: the optimizer state {p.optimizer.show()} must be sharded at least like the stored "
                    f"parameter {p.storage.show()}, over the same axes first"
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


def _stage_out(stage: StagePlan) -> dict[str, Any]:
    return {
        "calls": list(stage.calls),
        "mesh": dict(stage.mesh.axes),
        "first_rank": stage.mesh.offset,
        "templates": {
            name: {
                "strategies": {n: show_strategy(s, stage.mesh) for n, s in t.strategies.items()},
                "specs": {n: s.show() for n, s in t.specs.items()},
                **({"recompute": list(t.recompute)} if t.recompute else {}),
                **({"offload": list(t.offload), "offload_tier": t.offload_tier} if t.offload else {}),
                **({"overlap": t.overlap} if t.overlap else {}),
                **({"pieces": t.pieces, "cut": dict(t.cut)} if t.pieces > 1 else {}),
                **({"insists": True} if t.insists else {}),
            }
            for name, t in stage.templates.items()
        },
        "parameters": {
            name: {
                "storage": p.storage.show(),
                "optimizer": p.optimizer.show(),
                **({"tier": p.tier} if p.tier else {}),
                **({"optimizer_tier": p.optimizer_tier} if p.optimizer_tier else {}),
            }
            for name, p in stage.parameters.items()
        },
    }


# --- what a plan's data may hold --------------------------------------------------------------------------------------------


def _tier(value: object, path: str) -> Any:
    what = f"a memory tier, of {', '.join(tier_names())}"
    return where(lambda name: isinstance(name, str) and name in tier_names(), what)(value, path)


def _tier_or_device(value: object, path: str) -> Any:
    what = f"a memory tier, of {', '.join(tier_names())} (or empty: on the device)"
    return where(lambda name: isinstance(name, str) and name in ("", *tier_names()), what)(value, path)


_NAMES = listed(text())
_SPEC = parsed(parse_spec)
_AXES = table(identifier(), integer(1, MOST_RANKS), most=16)

_PARAMETER = record(
    {"storage": _SPEC, "optimizer": _SPEC}, {"tier": _tier_or_device, "optimizer_tier": _tier_or_device}
)
_TEMPLATE = record(
    {"strategies": table(text(), text()), "specs": table(text(), _SPEC)},
    {
        "recompute": _NAMES,
        "offload": _NAMES,
        "offload_tier": _tier,
        "overlap": choice(OVERLAPS),
        "pieces": integer(1, MOST_PIECES),
        "cut": table(text(), integer(0)),
        "insists": flag(),
    },
)
_STAGE = record(
    {
        "calls": row(integer(), integer()),
        "mesh": _AXES,
        "first_rank": integer(0, MOST_RANKS),
        "templates": table(text(), _TEMPLATE),
        "parameters": table(text(), _PARAMETER),
    }
)
_PLAN = record(
    {
        "autopar_plan": integer(VERSION, VERSION),
        "program": text(),
        "cluster": text(),
        "ranks": integer(1, MOST_RANKS),
        "microbatches": integer(1),
        "schedule": text(),
        "origin": text(),
        "predicted": table(text(), number()),
        "stages": listed(_STAGE, least=1),
    },
    {
        "table": listed(parsed(lambda row: show_row(parse_row(row)), text(1 << 24))),
        "placement": listed(integer(0, MOST_RANKS)),
        "precision": choice(("", *PRECISIONS)),
        "order": integer(0, MOST_RANKS),
        "gradient_compression": choice(("", *CODECS)),
    },
)


def _plan_in(data: object) -> Plan:
    """The plan in the data of a plan.json. Raises SchemaError."""
    read = _PLAN(data, "")
    placement = tuple(read.get("placement", ()))
    if placement and sorted(placement) != list(range(read["ranks"])):
        raise must_be("placement", f"every rank from 0 to {read['ranks'] - 1} once", placement)
    return Plan(
        read["program"],
        read["cluster"],
        read["ranks"],
        tuple(_stage_in(stage, f"stages[{i}]") for i, stage in enumerate(read["stages"])),
        read["microbatches"],
        read["schedule"],
        read["origin"],
        read["predicted"],
        tuple(read.get("table", ())),
        placement,
        read.get("precision", ""),
        read.get("order", 0),
        read.get("gradient_compression", ""),
    )


def _stage_in(read: dict[str, Any], path: str) -> StagePlan:
    """The plan of a stage in the data of a plan.json. Raises SchemaError."""
    mesh = Mesh(tuple(read["mesh"].items()), read["first_rank"])
    if mesh.size > MOST_RANKS:
        raise must_be(f"{path}.mesh", f"of at most {MOST_RANKS} ranks", read["mesh"])
    strategy = parsed(lambda words: parse_strategy(words, mesh))
    templates = {
        name: TemplatePlan(
            {n: strategy(s, f"{path}.templates.{name}.strategies.{n}") for n, s in t["strategies"].items()},
            t["specs"],
            tuple(t.get("recompute", ())),
            tuple(t.get("offload", ())),
            t.get("offload_tier", HOST_MEMORY.name),
            t.get("overlap", ""),
            t.get("pieces", 1),
            tuple(t.get("cut", {}).items()),
            t.get("insists", False),
        )
        for name, t in read["templates"].items()
    }
    parameters = {
        name: ParameterPlan(p["storage"], p["optimizer"], p.get("tier", ""), p.get("optimizer_tier", ""))
        for name, p in read["parameters"].items()
    }
    for name, template in templates.items():
        for value, spec in template.specs.items():
            _check_axes(spec, mesh, f"{path}.templates.{name}.specs.{value}")
    for name, parameter in parameters.items():
        _check_axes(parameter.storage, mesh, f"{path}.parameters.{name}.storage")
        _check_axes(parameter.optimizer, mesh, f"{path}.parameters.{name}.optimizer")
    first, last = read["calls"]
    return StagePlan((first, last), mesh, templates, parameters)


def _check_axes(spec: Spec, mesh: Mesh, path: str) -> None:
    """Raises SchemaError for a spec over axes that the mesh does not have."""
    unknown = sorted(spec.axes - set(mesh.names))
    if unknown:
        raise SchemaError(f"{path}: {spec} uses axis {', '.join(unknown)}, the mesh is {mesh}")
