"""The data of program.json by their fields: `autopar.report.facts` fills them in, `autopar-dump` and `autopar-tune` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from autopar.compiled import Prediction, SolverFacts
from autopar.costmodel.simulate import Timeline, simulate
from autopar.ir.actions import Action, StageGraph, parse_row, show_row
from autopar.ir.by_node import AxisByNode
from autopar.ir.mesh import Mesh
from autopar.ir.sent import Sent
from autopar.passes.account.collectives import Collective
from autopar.passes.account.limits import ByLimit
from autopar.passes.account.spent import Spent
from autopar.passes.recompute.curve import Curve
from autopar.runtime.data.fields import Bytes, Length, Paragraph, Seconds, Stage, in_rows, kept, notation
from autopar.runtime.data.schema import MOST_RANKS, MOST_SIZE, SchemaError, integer, must_be, number
from autopar.runtime.program.machines import Machines

VERSION = 4
Types = Mapping[str, str]
"""A type by name: `float32[8, 16] [@dp, .]`."""
Row = Annotated[tuple[Action, ...], notation(parse_row, show_row, most=1 << 24)]
ByAction = Annotated[dict[tuple[int, str], float], in_rows(Stage, str, Seconds)]
"""Seconds of an action, by its stage and kind."""
ByTransfer = Annotated[dict[tuple[int, int], float], in_rows(Stage, Stage, Seconds)]
"""Seconds from one stage to another."""
INLINE = kept(inline=True)


@dataclass(frozen=True, kw_only=True)
class LineFacts:
    """A line of a function. call: of a template, by its number in the program."""

    out: tuple[str, ...]
    op: str
    reads: tuple[str, ...]
    specs: tuple[str, ...]
    phase: str
    source: Paragraph
    axis: str | None
    sent: tuple[Sent, ...]
    call: Annotated[int, integer(0)] | None = field(default=None, metadata=kept(sparse=True))


@dataclass(frozen=True)
class FunctionFacts:
    """A function of a stage or of a template."""

    arguments: Types
    lines: tuple[LineFacts, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class TemplateFacts:
    """The functions of a template. saved: for backward; later: for the gradients of weights."""

    saved: tuple[str, ...]
    later: tuple[str, ...]
    functions: Mapping[str, FunctionFacts]


@dataclass(frozen=True)
class ParameterFacts:
    """The storage of a parameter, and how its gradient is reduced. local_bytes: of the stored shard;
    resting: bytes on the device by kind, reduced gradients among them; summed_bytes: of the gradient before its
    reduction."""

    stored: str
    gradient_and_optimizer: str
    trained: bool
    local_bytes: Bytes
    reduction: Any
    resting: Mapping[str, Bytes]
    compression: str = field(default="", metadata=kept(sparse=True))
    summed_bytes: Bytes = field(default=0.0, metadata=kept(sparse=True))


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """A stage. seconds: of its actions by kind; step_s: of what comes once; resting: bytes by kind; held_bytes: for backward."""

    mesh: Mesh = field(metadata=INLINE)
    seconds: Mapping[str, Seconds]
    step_s: Seconds
    resting: Mapping[str, Bytes]
    held_bytes: Bytes
    inputs: Types
    outputs: Types
    templates: Mapping[str, TemplateFacts]
    functions: Mapping[str, FunctionFacts]
    collectives: tuple[Collective, ...]
    parameters: Mapping[str, ParameterFacts]


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """The actions of every group of ranks. exposed: seconds of a group's messages in layers that nothing hides, of a microbatch.
    By action: hidden, shown: of messages in layers behind work, and those that nothing hides; beside: of messages of parameters
    under way beside it in every microbatch; once: of those beside the first forward and the last backward of a step."""

    name: str
    peaks: tuple[Bytes, ...]
    graph: StageGraph = field(metadata=INLINE)
    table: tuple[Row, ...]
    seconds: ByAction
    hand_over: ByTransfer
    exposed: tuple[Seconds, ...]
    hidden: ByAction
    shown: ByAction = field(default_factory=dict)
    beside: ByAction = field(default_factory=dict)
    once: ByAction = field(default_factory=dict)

    def timeline(self) -> Timeline:
        """The predicted timeline, simulated again."""
        return simulate(self.table, self.graph, self.seconds, self.hand_over).with_messages(self.hidden)


@dataclass(frozen=True)
class TransferFacts:
    """A value that travels from stage to stage."""

    name: str
    kind: str
    source: Stage
    target: Stage
    nbytes: Bytes = field(metadata=kept(key="bytes"))
    source_type: str = field(metadata=kept(key="from"))
    target_type: str = field(metadata=kept(key="to"))


@dataclass(frozen=True)
class AlternativeFacts:
    """Another plan that was looked at. reason: why it was not chosen."""

    name: str
    step_time_s: Seconds
    peak_bytes: Bytes
    reason: str


@dataclass(frozen=True)
class CallFacts:
    """A call of a template, and the module that it is. held_bytes: that it keeps of a microbatch for backward; later_bytes: of
    these, or beside them, for the gradients of weights where these are computed apart."""

    template: str
    path: str
    held_bytes: Bytes
    later_bytes: Bytes = field(default=0.0, metadata=kept(sparse=True))


@dataclass(frozen=True)
class StageAtWorst:
    """A stage at the worst moment. waiting: its microbatches that wait for backward; later: for the gradients of weights; parts
    of one are those of which an action has let go. gradients: bytes, those in buckets under way too."""

    stage: Stage
    waiting: Annotated[float, number(0)]
    later: Annotated[float, number(0)]
    gradients: Bytes


@dataclass(frozen=True)
class WorstFacts:
    """The moment at which the fullest rank has most bytes. group: of ranks; action: that runs then ("": none, all are over);
    call: that of the program which ran last when most was needed (None: none of them)."""

    group: Stage
    action: str
    call: Annotated[int, integer(0)] | None
    stages: tuple[StageAtWorst, ...]


@dataclass(frozen=True)
class WorkFacts:
    """The work of a step on so many devices, and its rate. batch: samples; tokens: of inputs that are integers by sample and
    position; mfu: share of the devices' peak that the products take. None where there is no such number."""

    devices: Annotated[int, integer(1, MOST_RANKS)]
    batch: int | None
    tokens: int | None
    tokens_per_s: float | None
    mfu: float | None


@dataclass(frozen=True)
class RoomFacts:
    """The memory of the device that is fullest. causes: bytes that a process takes beside tensors; needed: tensors with these."""

    device: str
    causes: Mapping[str, Bytes]
    needed_bytes: Bytes
    device_bytes: Bytes

    @property
    def free_bytes(self) -> float:
        """Bytes that are left; below zero, those that are short."""
        return self.device_bytes - self.needed_bytes


@dataclass(frozen=True)
class FormFacts:
    """A step for batches of one combination of sizes, in short. inputs: the shapes of its batch; plan: its meshes."""

    inputs: Paragraph
    plan: str
    step_time_s: Seconds
    peak_bytes: Bytes


@dataclass(frozen=True)
class LongRunFacts:
    """A run of weeks on a cluster that fails. mtbf_s: between two failures; stall_s, write_s: of a save, in which the step waits
    and in which files are written; save_every: steps; goodput: share of the time in which work was done that stayed."""

    mtbf_s: Annotated[float, number(0)]
    stall_s: Annotated[float, number(0)]
    write_s: Annotated[float, number(0)]
    save_every: Annotated[int, integer(0, MOST_SIZE)]
    goodput: Annotated[float, number(0, 1)]


@dataclass(frozen=True)
class GroupLimits:
    """A step of a group of ranks by what limits it (`passes/account/limits.py`). seconds: parts that add up to the step; stages:
    those of the actions of each of its stages alone."""

    seconds: ByLimit
    stages: tuple[ByLimit, ...]


@dataclass(frozen=True, kw_only=True)
class ProgramFacts:
    """Everything about a program that its plan does not say."""

    version: Annotated[int, integer(VERSION, VERSION)] = field(
        default=VERSION, metadata=kept(key="autopar_program", required=True)
    )
    torch: str
    python: str
    training: bool
    ranks: Annotated[int, integer(1, MOST_RANKS)]
    origin: str
    solver: SolverFacts
    predicted: Prediction
    work: WorkFacts
    spent: Spent
    room: RoomFacts
    timings: Mapping[str, float]
    memory: Mapping[str, Bytes]
    peak_bytes: Bytes
    alternatives: tuple[AlternativeFacts, ...]
    microbatches: Annotated[int, integer(1)]
    model: str
    cluster: str
    cluster_described: Any
    long_run: LongRunFacts | None
    machines: Machines
    calls: tuple[CallFacts, ...]
    schedule: ScheduleFacts
    transfers: tuple[TransferFacts, ...]
    worst: WorstFacts | None = None
    recompute: tuple[Curve, ...] = ()
    by_node: tuple[AxisByNode, ...] = ()
    shared: Mapping[str, Annotated[tuple[Stage, ...], Length(1)]]
    stages: Annotated[tuple[StageFacts, ...], Length(1, 1 << 16)]
    buckets: tuple[FormFacts, ...]
    entries: Mapping[str, tuple[FormFacts, ...]] = field(default_factory=dict)
    limits: tuple[GroupLimits, ...]

    def as_read(self, path: str) -> ProgramFacts:
        """The facts as a file has them. Raises SchemaError for parts that do not go together."""
        schedule, stages, groups = self.schedule, len(self.stages), self.schedule.graph.groups
        if sorted(stage for group in groups for stage in group) != list(range(stages)):
            raise must_be("schedule.groups", f"groups that hold each of the {stages} stages once", groups)
        for key, entries in {"table": schedule.table, "peaks": schedule.peaks, "exposed": schedule.exposed}.items():
            if len(entries) != len(groups):
                raise must_be(f"schedule.{key}", f"a list with an entry per group, {len(groups)}", entries)
        if [len(own.stages) for own in self.limits] != list(map(len, groups)):
            raise must_be("limits", "a list with an entry per group, which has one per stage", self.limits)
        for g, (group, actions) in enumerate(zip(groups, schedule.table, strict=True)):
            if any(action.stage not in group for action in actions):
                raise SchemaError(f"schedule.table[{g}]: has an action of a stage that is not of its group")
        edges = (*schedule.graph.edges, *(schedule.graph.gradients or ()))
        named = {stage for several in (*edges, *self.shared.values()) for stage in several}
        named |= {stage for transfer in self.transfers for stage in (transfer.source, transfer.target)}
        if not named <= set(range(stages)):
            raise SchemaError(f"a stage {min(named - set(range(stages)))} is named, but there are {stages}")
        if any(u >= v for u, v in edges):
            raise must_be("schedule.edges", "edges from earlier to later stages", schedule.graph.edges)
        worst = self.worst
        if worst is not None:
            if worst.group >= len(groups) or any(one.stage not in groups[worst.group] for one in worst.stages):
                raise must_be("worst", "a group of ranks and stages of it", worst.group)
            if worst.call is not None and worst.call >= len(self.calls):
                raise must_be("worst.call", f"one of {len(self.calls)} calls", worst.call)
        if len(self.recompute) not in (0, stages):
            raise must_be("recompute", f"a list with an entry per stage, {stages}", self.recompute)
        return self
