"""The tables of emitted files, read and checked: what a stage module holds, and what pipeline.py says of all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..comm.mesh import mesh_size, show_mesh, sizes_of
from ..comm.nodes import ByNode
from ..errors import RuntimeProgramError
from ..gradients.compression import CODECS
from ..gradients.grads import GradEntry
from ..guards import InputLike, InputRange
from .actions import Action, parse_row
from .extras import Extras
from .layout import TensorInfo, dtype_of, spec_dims
from .order import Transfer
from .transfer import Placed

Modules = Sequence[Any] | Callable[[int], Any]
Conditions = Mapping[str, Sequence[Sequence[tuple[int, Sequence[int]]]]]
"""By parameter: a gradient of it there is if, in one of the lists, every output (by its index) counts some of its numbers."""


PORTS = (
    ("RECEIVES", "value", "target"),
    ("SENDS", "value", "source"),
    ("GRADIENT_RECEIVES", "gradient", "target"),
    ("GRADIENT_SENDS", "gradient", "source"),
)


class StageTables:
    """The tables of a stage module about its tensors. No tensor is made: other ranks' stages are read too."""

    def __init__(self, index: int, module: Any, mesh: Mapping[str, int], dtype: torch.dtype | None) -> None:
        self.index = int(getattr(module, "STAGE", index))
        self.module = module
        self.mesh = sizes_of(module.MESH)
        if self.index != index or list(self.mesh.items()) != list(mesh.items()):
            raise RuntimeProgramError(
                f"stage {index} of the pipeline is for {show_mesh(mesh)}, its module is stage {self.index} for "
                f"{show_mesh(self.mesh)}"
            )
        self.parameters = {name: TensorInfo(name, row, dtype) for name, row in module.PARAMETERS.items()}
        self.buffers = {name: TensorInfo(name, row, dtype) for name, row in module.BUFFERS.items()}
        self.inputs = [TensorInfo(row["name"], row, dtype) for row in module.INPUTS]
        self.outputs = [TensorInfo(row["name"], row, dtype) for row in module.OUTPUTS]
        self.gradients = {
            name: GradEntry(
                int(row["contributions"]),
                tuple(tuple(step) for step in row["steps"]),
                self.parameters[name].dtype,
                _compression(name, row),
                bool(row.get("by_microbatch", False)),
            )
            for name, row in getattr(module, "GRADS", {}).items()
            if row["contributions"] > 0
        }

    def info(self, name: str) -> TensorInfo | None:
        """A parameter's or buffer's row."""
        return self.parameters.get(name) or self.buffers.get(name)


class BoundaryTensor:
    """A row of TRANSFERS: a transfer with its tensor and its placement on either mesh."""

    def __init__(self, transfer: Transfer, row: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        self.transfer = transfer
        self.shape = tuple(row["shape"])
        own = dtype_of(row["dtype"])
        self.dtype = dtype if dtype is not None and own.is_floating_point else own
        self.source_spec = spec_dims(row["source_spec"])
        self.target_spec = spec_dims(row["target_spec"])


class Pipeline:
    """pipeline.py, and the stage modules it names (read when they are asked for)."""

    def __init__(
        self, pipeline: Any, modules: Modules, dtype: torch.dtype | None = None, compiler: str = "none"
    ) -> None:
        self.world = int(pipeline.WORLD)
        self.microbatches = int(pipeline.MICROBATCHES)
        self.training = bool(pipeline.TRAINING)
        self.dtype, self.compiler = dtype, compiler
        self.inputs = [_input(row, dtype) for row in pipeline.INPUTS]
        self.ranges = tuple(InputRange(**dict(row, also=tuple(row["also"]))) for row in getattr(pipeline, "RANGES", ()))
        self.meshes = [(sizes_of(row["mesh"]), int(row["first_rank"])) for row in pipeline.STAGES]
        self.boundary_tensors = [
            BoundaryTensor(Transfer(n, row["name"], row["kind"], row["source"], row["target"]), row, dtype)
            for n, row in enumerate(pipeline.TRANSFERS)
        ]
        self._written = [dict(mesh) for mesh, _ in self.meshes]
        self.most_units: tuple[int, ...] = tuple(getattr(pipeline, "MOST_UNITS", ()))
        self.busy_s: tuple[float, ...] = tuple(getattr(pipeline, "BUSY_S", ()))
        self.tells_all = bool(getattr(pipeline, "TELLS_ALL", False))
        self.in_order = bool(getattr(pipeline, "IN_ORDER", False))
        self.conditions: Conditions = getattr(pipeline, "CONDITIONS", {})
        self.extras: Extras | None = getattr(pipeline, "EXTRAS", None)
        self.shared = {name: tuple(holders) for name, holders in pipeline.SHARED.items()}
        self._trained: tuple[str, ...] = tuple(getattr(pipeline, "TRAINED", ()))
        self.groups = [tuple(group) for group in pipeline.GROUPS]
        self.nodes = [tuple(ranks) for ranks in getattr(pipeline, "NODES", ())]
        self.by_node = [ByNode(**row) for row in getattr(pipeline, "BY_NODE", ())]
        self.rows: tuple[tuple[Action, ...], ...] = tuple(map(parse_row, pipeline.TABLE))
        self._modules = modules
        self._tables: dict[int, StageTables] = {}
        self._check()

    def tables(self, stage: int) -> StageTables:
        """A stage's tables."""
        if stage not in self._tables:
            module = self._modules(stage) if callable(self._modules) else self._modules[stage]
            self._tables[stage] = StageTables(stage, module, self._written[stage], self.dtype)
            self._check_ends(stage, module)
        return self._tables[stage]

    @property
    def stages(self) -> range:
        return range(len(self.meshes))

    def covers(self, stage: int) -> bool:
        """Whether every rank runs this stage."""
        return mesh_size(self.meshes[stage][0]) == self.world

    def group_of(self, rank: int) -> int:
        """The group that a rank belongs to."""
        for group, stages in enumerate(self.groups):
            mesh, first = self.meshes[stages[0]]
            if first <= rank < first + mesh_size(mesh):
                return group
        raise RuntimeProgramError(f"rank {rank} belongs to no group of the pipeline's {self.world} ranks")

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or buffer, its owner first."""
        if name in self.shared:
            return self.shared[name]
        holders = tuple(stage for stage in self.stages if self.tables(stage).info(name) is not None)
        if not holders:
            raise RuntimeProgramError(f"the program has no parameter or buffer {name!r}")
        return holders

    def trained(self) -> list[TensorInfo]:
        """The parameters that are updated in any stage, in the model's order: all that an optimizer is given, as in eager."""
        rows = {row.name: row for stage in self.stages for row in self.optimized(stage)}
        return [rows[name] for name in self._trained] or list(rows.values())

    def optimized(self, stage: int) -> list[TensorInfo]:
        """The parameters that are updated in a stage: it owns them, and they get a gradient there or elsewhere."""
        tables = self.tables(stage)
        return [
            info
            for name, info in tables.parameters.items()
            if info.trainable
            and self.owns(stage, name)
            and (name in tables.gradients or (name in self.shared and bool(self.earners(name))))
        ]

    def owns(self, stage: int, name: str) -> bool:
        """Whether a tensor that a stage holds has its optimizer state and checkpoint entry there."""
        return name not in self.shared or self.shared[name][0] == stage

    def earners(self, name: str) -> tuple[int, ...]:
        """The stages of a shared parameter that compute a gradient of it."""
        return tuple(stage for stage in self.shared[name] if name in self.tables(stage).gradients)

    def placed(self, stage: int, spec: Any) -> Placed:
        """A spec on a stage's mesh."""
        return Placed(*self.meshes[stage], spec)

    def loss(self) -> tuple[int, TensorInfo]:
        """Stage and row of the loss, program output 0."""
        for stage in reversed(self.stages):
            for info in self.tables(stage).outputs:
                if info.index == 0:
                    return stage, info
        raise RuntimeProgramError("no stage of this program makes its loss (output 0)")

    def outputs(self) -> list[tuple[int, TensorInfo]]:
        """Stage and row of every program output, in order."""
        pairs = [(stage, info) for stage in self.stages for info in self.tables(stage).outputs]
        return sorted(pairs, key=lambda pair: pair[1].index)

    def show(self) -> str:
        """`dp=2 × tp=2`, or `2 stages: dp=2 | dp=2`."""
        return show_meshes([mesh for mesh, _ in self.meshes])

    def _check(self) -> None:
        ranks: list[int] = []
        for stages in self.groups:
            places = {(first, mesh_size(mesh)) for mesh, first in (self.meshes[stage] for stage in stages)}
            if len(places) != 1:
                raise RuntimeProgramError(f"the stages {list(stages)} of one group are on different ranks: {places}")
            first, size = places.pop()
            ranks += range(first, first + size)
        if sorted(ranks) != list(range(self.world)) or len(self.rows) != len(self.groups):
            raise RuntimeProgramError(
                f"the pipeline's {len(self.groups)} groups have the ranks {sorted(ranks)} and {len(self.rows)} rows of "
                f"actions; they must be ranks 0 to {self.world - 1} once each, with a row per group"
            )

    def _check_ends(self, stage: int, module: Any) -> None:
        for table, kind, end in PORTS:
            own = sorted(getattr(module, table, ()))
            transferred = sorted(
                c.transfer.name
                for c in self.boundary_tensors
                if c.transfer.kind == kind and getattr(c.transfer, end) == stage
            )
            if own != transferred:
                raise RuntimeProgramError(
                    f"stage {stage}: its {table} are {own}, the pipeline's TRANSFERS say {transferred}"
                )


def _compression(name: str, row: Mapping[str, Any]) -> str:
    """How a gradient travels. Raises RuntimeProgramError for a codec that this runtime does not have."""
    compression = str(row.get("compression", ""))
    if compression and compression not in CODECS:
        raise RuntimeProgramError(
            f"gradient of {name!r}: compression {compression!r} is unknown, this runtime has {', '.join(CODECS)}; emit the "
            "program again"
        )
    return compression


def _input(row: Mapping[str, Any], dtype: torch.dtype | None) -> InputLike:
    """The demands on an input. dtype: that all floating tensors are held in instead of the table's, if any."""
    own = dtype_of(row["dtype"])
    other = (dtype,) if dtype is not None and own.is_floating_point else ()
    return InputLike(str(row["name"]), tuple(row["shape"]), (own, *other), row.get("batch_dim"))


def show_meshes(meshes: Sequence[Mapping[str, int]]) -> str:
    """`dp=2 × tp=2`, or `2 stages: dp=2 | dp=2`."""
    shown = [show_mesh(mesh) for mesh in meshes]
    return shown[0] if len(shown) == 1 else f"{len(shown)} stages: {' | '.join(shown)}"


def world_mesh(pipeline: Any) -> dict[str, int]:
    """The mesh of all ranks for a pipeline module: that of the only stage, or ranks in a row."""
    stages = pipeline.STAGES
    return sizes_of(stages[0]["mesh"]) if len(stages) == 1 else {"rank": int(pipeline.WORLD)}
