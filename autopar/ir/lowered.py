"""The lowered program: the functions that every rank of a stage runs, its parameters, and what stages tell each other.

The functions are straight lines over local tensors (`autopar.ir.lines`). A stage has a pair of functions (or three) for
every template that it calls, and one for every kind of action, which calls these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autopar.ir.actions import StageGraph, Table
from autopar.ir.lines import Function, Line, Stored
from autopar.ir.mesh import Mesh
from autopar.ir.program import Join
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.runtime.program.order import Transfer


@dataclass(frozen=True, eq=False)
class LoweredTemplate:
    """forward(params…, inputs…) -> outputs…, saved; backward(saved, params…, tangents…) -> gradients. Stages that run a
    template alike share it.

    planned_as: the name under which the plan knows it. Where the schedule runs B and W apart, backward returns the gradients of
    the inputs and `later`, and weights(later) -> gradients of the parameters. late_params: slots of the parameters that backward
    reads as its own ops want them; again_params: slots of those that ops which run again want as in forward (after the former).
    kept: the template's values that `saved` holds. offload: places in `saved` of values that rest in `offload_tier` from forward
    to backward.
    """

    name: str
    planned_as: str
    forward: Function
    backward: Function | None
    saved: tuple[str, ...]
    random: bool
    outputs: tuple[Spec, ...]
    input_grads: tuple[Spec | None, ...]
    param_grads: tuple[Spec | None, ...]
    late_params: tuple[int, ...]
    weights: Function | None = None
    later: tuple[str, ...] = ()
    again_params: tuple[int, ...] = ()
    kept: frozenset[str] = frozenset()
    offload: tuple[int, ...] = ()
    offload_tier: str = ""

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(f for f in (self.forward, self.backward, self.weights) if f is not None)


@dataclass(frozen=True)
class StoredParameter:
    """How one parameter rests: spec, the finer spec of gradient and optimizer state, and the steps between them.

    owned: its optimizer state is here (a parameter of several stages is owned by one). tier: where the stored shard and
    its gradient rest, optimizer_tier: where the optimizer's state does ("": on the device). compression: how its gradient
    travels while it is reduced, a name of `runtime.gradients.compression.CODECS` ("": as it is). narrow: dtype of a copy of the
    stored shard that is made once a step for the uses that read it so (None: there is none). by_microbatch: the gradient is
    reduced after every microbatch, and its shards are summed, instead of once. room: those of the same lie one after another in
    one memory, in the order of the stage's table; the first one's name ("": it has a memory of its own).
    """

    name: str
    type: TensorType
    storage: Spec
    optimizer: Spec
    trainable: bool
    regather: tuple[RuntimeStep, ...]
    contributions: int
    reduce: tuple[RuntimeStep, ...]
    owned: bool = True
    tier: str = ""
    optimizer_tier: str = ""
    compression: str = ""
    narrow: torch.dtype | None = None
    by_microbatch: bool = False
    room: str = ""

    @property
    def tiers(self) -> dict[str, str]:
        """Where the parameter's state of each kind that can move rests (`autopar.ir.memory_levers.MOVABLE`)."""
        return {"parameters": self.tier, "optimizer": self.optimizer_tier}

    def type_of(self, read: Stored) -> TensorType:
        """The type of what rests, or of its copy in lower precision."""
        return TensorType(self.type.shape, self.narrow) if read.narrow and self.narrow else self.type

    def stored_bytes(self, mesh: Mesh, dtype: torch.dtype | None = None) -> float:
        """Bytes of the stored block on one rank, as it is or cast."""
        type_ = self.type if dtype is None else TensorType(self.type.shape, dtype)
        return float(self.storage.local_bytes(type_, mesh))

    def updated_bytes(self, mesh: Mesh) -> float:
        """Bytes of the block that the optimizer updates on one rank."""
        return float(self.optimizer.local_bytes(self.type, mesh))


@dataclass(frozen=True)
class Row:
    """An input or output of a stage: index among the program's, type of one microbatch; of an input the batch dim (None: it
    has none) and the axes over whose ranks its rows are shared, of an output what becomes of its microbatches' values. extra: of
    an output of a training step that it gives beside its loss, from which it stays until the step is over."""

    index: int
    name: str
    type: TensorType
    spec: Spec
    batch_dim: int | None = None
    join: Join = field(default_factory=lambda: Join("same"))
    row_axes: tuple[str, ...] = ()
    extra: bool = False


@dataclass(frozen=True)
class BoundaryEnd:
    """One end of a stage-boundary tensor: its name, and the value's spec on this stage's mesh."""

    name: str
    peer: int
    type: TensorType
    spec: Spec


@dataclass(frozen=True, eq=False)
class LoweredStage:
    """One stage's program: functions of its templates, and the functions that an action runs.

    forward(inputs…, received…, prepared…) -> outputs…, sent…, state…; backward(state…, received…) -> sent…, later…;
    weights(later…). prepare: functions (inputs…, prepared…) -> prepared…, where something must be known of the whole batch
    beforehand: one for every round, which is given what those before it left.
    """

    index: int
    mesh: Mesh
    templates: dict[str, LoweredTemplate]
    forward: Function
    backward: Function | None
    weights: Function | None
    prepare: tuple[Function, ...]
    parameters: dict[str, StoredParameter]
    buffers: dict[str, TensorType]
    inputs: tuple[Row, ...]
    outputs: tuple[Row, ...]
    received: tuple[BoundaryEnd, ...]
    sent: tuple[BoundaryEnd, ...]
    gradients_received: tuple[BoundaryEnd, ...]
    gradients_sent: tuple[BoundaryEnd, ...]
    training: bool
    microbatches: int
    prepared: tuple[str, ...] = ()
    """The reductions that put the microbatches' values of `prepare` together, of all rounds."""

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that actions run, in order."""
        return tuple(f for f in (*self.prepare, self.forward, self.backward, self.weights) if f is not None)

    @property
    def by_action(self) -> tuple[tuple[str, Function], ...]:
        """The functions of F, B and W that there are."""
        functions = zip("FBW", (self.forward, self.backward, self.weights), strict=True)
        return tuple((action, function) for action, function in functions if function is not None)

    @property
    def state(self) -> tuple[str, ...]:
        """The values that forward keeps for backward."""
        return tuple(n for n in self.forward.returns[len(self.outputs) + len(self.sent) :] if n)

    @property
    def later(self) -> tuple[str, ...]:
        """The values that backward keeps for weights."""
        return tuple(n for n in self.backward.returns[len(self.gradients_sent) :] if n) if self.backward else ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of all functions."""
        return tuple(line for f in self.functions for line in f.lines)


@dataclass(frozen=True)
class LoweredTransfer(Transfer):
    """A transfer with its value's type, and spec on either mesh."""

    type: TensorType
    source_spec: Spec
    target_spec: Spec


@dataclass(frozen=True)
class LoweredProgram:
    """All stages, what travels between them, and what every group does in a step.

    shared: parameters and buffers that several stages hold, the owner first.
    """

    stages: tuple[LoweredStage, ...]
    transfers: tuple[LoweredTransfer, ...]
    shared: dict[str, tuple[int, ...]]
    graph: StageGraph
    table: Table
