"""Options: everything a user may force or bound; the defaults let the planner choose. And entries, further steps of a program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, Final, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.ir.memory_levers import OFFLOAD_KINDS, PRECISIONS, RECOMPUTE_POLICIES
from autopar.ir.mesh import AxisSize, Mesh
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.data.fields import Identifier, check
from autopar.runtime.data.schema import (
    Schema,
    SchemaError,
    choice,
    did_you_mean,
    integer,
    is_identifier,
    is_number,
    number,
    positive,
    shown,
    where,
)
from autopar.runtime.gradients.compression import CODECS
from autopar.runtime.program.manifest import MOST_ENTRIES
from autopar.runtime.program.run_options import RunOptions, Seed
from autopar.runtime.update.update_rule import OptimizerFactory, UpdateRule

P = ParamSpec("P")
R = TypeVar("R")

BRANCHES = ("select", "guard", "refuse")
ON_OVERFLOW = ("stop", "chunk")
COUPLED = ("refuse", "per-microbatch")
MOST_SECONDS = 1e9
DATA_PARALLEL = ("dp", "zero1", "zero2", "zero3")
MEGATRON = ("megatron", "megatron-zero1", "megatron-zero2", "megatron-zero3")
INHERITED: Final = "inherited"
"""The loss of an entry that is the program's own."""
STRATEGIES = ("auto", *DATA_PARALLEL, *MEGATRON)
MESH_AXES = ("replica", "dp", "ep", "cp", "tp")
"""Axes of meshes that the search knows, major first."""


def with_suggestions(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose TypeError for a keyword that it does not take says which one is much like it."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                near = did_you_mean(name, names)
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{near}")
        return function(*args, **kwargs)

    return run


def _one_of(choices: Callable[[], Sequence[str]]) -> Schema[str]:
    """A name of a table, which may get rows: it is asked at every check."""
    return lambda value, path: choice(choices())(value, path)


def _as_number(schema: Schema[float]) -> Schema[float]:
    """A number of any type that is one, such as a Fraction or a scalar of NumPy."""
    return lambda value, path: schema(
        float(value) if isinstance(value, Real) and not isinstance(value, int) else value, path
    )


def _is_dim(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _are_batch_dims(value: Any) -> bool:
    """None, or a dim or None per input, by name or in order."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_dim, value.values()))
    return value is None or (isinstance(value, (list, tuple)) and all(map(_is_dim, value)))


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(path, str) for path in value)


Count = Annotated[int, integer(1)]
Seconds = Annotated[float, _as_number(number(0, MOST_SECONDS))]
PositiveSeconds = Annotated[float, _as_number(positive(MOST_SECONDS))]
Bytes = Annotated[float, _as_number(positive())]
RecomputePolicy = Annotated[str, _one_of(lambda: ("auto", *RECOMPUTE_POLICIES))]
OffloadKind = Annotated[str, _one_of(lambda: (*OFFLOAD_KINDS, "auto"))]
Precision = Annotated[str, _one_of(lambda: tuple(PRECISIONS))]
Codec = Annotated[str, _one_of(lambda: tuple(CODECS))]
ModulePaths = Annotated[Sequence[str], where(_are_texts, "a list of module paths, such as ['layers.8']")]
BatchDims = Annotated[
    Any,
    where(
        _are_batch_dims, "a mapping of inputs to their batch dims, such as {'x': 0, 'mask': None}, or a list of these"
    ),
]
Share = Annotated[float, _as_number(where(lambda share: is_number(share, 0, 1) and share > 0, "a number in (0, 1]"))]


@dataclass(frozen=True)
class Options(RunOptions):
    """Choices of one compilation; those that reach run time, such as `compiler`, stand in `RunOptions`.

    microbatches: pieces the global batch is cut into along its batch dim; gradients accumulate to those of the whole
        batch, synchronised once. None: what the search finds best.
    coupled: what microbatches of a program mean whose samples depend on each other (batch statistics, a contrastive loss):
        "refuse" them, or "per-microbatch": each is a batch of its own, and their losses are averaged.
    pp: groups of ranks that the program is cut over as a pipeline (1: none). None: searched.
    schedule: of the pipeline, a name of autopar.passes.schedule ("1f1b", "zb-h1", …) or "auto": the fastest that fits.
    chunks: stages per group of ranks (interleaved schedules). None: searched.
    stage_boundaries: module paths at which a stage starts, such as ["layers.8", "layers.16"]; with chunks those
        of all pp x chunks stages, which groups take in turn.
    mesh: force axis names and sizes, for example {"dp": 2, "tp": 2}; their product must be the number of ranks. A size may be
        lists of units that ranks along the axis hold, {"dp": [[3, 2, 1]]} (`Shares`).
    axes: sizes that single axes of meshes have, for example {"tp": 4}, of replica, dp, ep, cp and tp; what is left of the
        ranks goes to dp and tp where these are not named, and to stages.
    strategy: "auto" (solver), or a baseline: "dp" (parameters whole), "zero1" (optimizer state sharded), "zero2"
        (gradients between microbatches too), "zero3" (parameters too); "megatron": the last mesh axis is tensor-parallel as in
        Megatron-LM (column-parallel, then
        row-parallel products, the sequence sharded between them, vocabularies sharded), the others take the batch;
        "megatron-zero1", "-zero2" and "-zero3" with ZeRO over these others. With a baseline the axis `ep` takes the batch and has
        experts apart, and `cp` takes the sequence.
    idle_ranks: whether the search may leave ranks without work where a step is predicted to be faster so; it does where it
        chooses strategy, mesh and stages. False: every plan has a place for all ranks.
    recompute: what backward makes again instead of its being kept: "none", "full" (a block keeps its inputs alone),
        "selective" (attention and what is pointwise is made again), or "auto": what costs least, where memory is short.
    offload: what rests in the cluster's memory tiers (host memory, then NVMe) instead of on the device: "none",
        "optimizer" (its state), "activations" (what forward keeps for backward), "parameters" (stored shards with their
        gradients, and optimizer state), "all", or "auto": what costs least, where memory is short and the cluster
        describes tiers.
    precision: "bf16" or "fp16": products, attention, look-ups and what is pointwise compute in that dtype; norms, softmax,
        losses and other reductions in float32; parameters, gradient sums and optimizer state stay float32, parameters
        are cast before they are gathered. None: as the model is.
    constraints: name pattern (shell wildcards) -> spec, such as {"*.q.weight": "[@tp, .]"}. Patterns match parameter
        names (the spec is how the parameter is stored) and values as "template.value".
    memory_fraction: share of device memory that the program may have. Of that, context, workspaces, communicators and gaps of the
        allocator take their part on GPUs, and a tenth is left free on CPUs; the rest is for tensors.
    memory_bytes: limit of tensors per rank in bytes, instead of what memory_fraction leaves for them.
    solver_time_limit_s: seconds the solver may spend on one mesh.
    search_s: seconds that the search for a plan may take once there is one that fits; then the best so far is given, and the
        report names the kinds of plans that were left out. Ctrl-C ends it the same way. None: the search ends by itself.
    workers: processes that the search may use at once, itself included; the plan is the same for every number. None: as many as
        cores it may use. Others are forked, which is safe only where no library has left a lock taken (1, the default: never;
        nor elsewhere than on Linux, nor where the process has threads).
    explain_s: seconds that may be spent on the nearest changes that would do when nothing fits (0: none are looked for).
    seed: seed of every random number of the program (dropout).
    compensated_sums: add the gradients of microbatches with a compensation of what rounding loses (Kahan), for one more
        buffer per gradient while they are added.
    guards: check while the program runs what it assumes of its data: indices in range. False: only that batches have the
        shapes and dtypes of the example.
    branches: what becomes of branches on data (`if mask.any()`, `assert lengths.max() <= n`, `range(int(n))`): "guard": the
        program takes the example batch's way, and a batch that goes another one stops it by name; "select": the same, but one
        that only repairs values (`if not h.isfinite().all(): h = h.clamp(-c, c)`) is computed both ways, and each batch has
        its own (with several microbatches or stages it is a guard); or "refuse" them by name. Without guards they are
        refused, as nothing would check them.
    expert_imbalance: where the rows of a mixture travel to ranks that have its experts, how many a rank may get, as a multiple
        of what it would get if all got as many: memory is planned for that. On GPUs this is said of every pair of ranks, whose
        messages are always that large (or as large as random choices may ask), so that no host waits for counts.
    on_overflow: what becomes of a step in which a rank gets more: "stop" it by name (ExpertOverflow, on every rank of the axis
        alike; on GPUs on every rank, before the update), or "chunk": compute it in more pieces within the same memory, for which
        a GPU's host waits for counts in every layer.
    order: of the sequence of causal attention: n, in 2n chunks of which every rank of n has one from the front and one from the
        back, so that all do as much; 0, as it is. None: what the search finds best.
    overlap: let lines of a block run while messages of others travel, where that is faster and fits. False: every message is
        waited for where it starts, but those of parameters and gradients.
    gradient_compression: how gradients travel while they are reduced over ranks: None, as they are; "bf16", rounded to half the
        bytes of float32 and added in float32; "int8", a quarter of the bytes, with a scale for every 256 elements and error
        feedback: what rounding loses is kept on the rank, one float32 per element, and sent with the next step's gradient.
        Gradients of 16 bits, and those that rest in a memory tier, travel as they are. `verify` leaves it out.
    batch_dims: batch dim per input, by name or in order; None where an input has none. Default: dim 0.
    """

    microbatches: Count | None = None
    coupled: Annotated[str, choice(COUPLED)] = "refuse"
    pp: Count | None = None
    schedule: str = "auto"
    chunks: Count | None = None
    stage_boundaries: ModulePaths | None = None
    mesh: Mapping[Identifier, AxisSize] | None = None
    axes: Mapping[Annotated[str, choice(MESH_AXES)], Count] | None = None
    strategy: Annotated[str, choice(STRATEGIES)] = "auto"
    idle_ranks: bool = True
    recompute: RecomputePolicy = "auto"
    offload: OffloadKind = "auto"
    precision: Precision | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)
    memory_fraction: Share = 1.0
    memory_bytes: Bytes | None = None
    solver_time_limit_s: PositiveSeconds = 60.0
    search_s: Seconds | None = None
    workers: Count | None = 1
    explain_s: Seconds = 30.0
    seed: Seed = 0
    compensated_sums: bool = False
    guards: bool = True
    branches: Annotated[str, choice(BRANCHES)] = "select"
    expert_imbalance: Annotated[float, _as_number(number(1))] = 1.25
    on_overflow: Annotated[str, choice(ON_OVERFLOW)] = "stop"
    order: int | None = None
    overlap: bool = True
    gradient_compression: Codec | None = None
    batch_dims: BatchDims = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that its field does not allow."""
        try:
            check(self, "Options")
        except SchemaError as error:
            raise InputError(str(error)) from None
        if self.mesh is not None:
            sizes = {
                axis: Shares(*size) if isinstance(size, (list, tuple)) else size for axis, size in self.mesh.items()
            }
            object.__setattr__(self, "mesh", sizes)
        if self.axes is not None and self.mesh is not None:
            raise InputError(
                "Options.axes says sizes of some axes and Options.mesh those of all; leave one of them out"
            )
        if self.axes is not None and self.strategy in DATA_PARALLEL and max(self.axes.get("tp", 1), 1) > 1:
            raise InputError(
                f"Options.strategy {self.strategy!r} shards the batch over every axis, Options.axes asks for "
                f"tp={self.axes['tp']}; take a strategy of megatron, or auto"
            )
        if self.rebalance and (self.cuda_graphs or self.compiler == "inductor"):
            raise InputError(
                "Options.rebalance moves rows between ranks; what cuda_graphs captures and compiler='inductor' compiles is for "
                "the rows that ranks have at first; leave one of them out"
            )

    @property
    def asks_for_pipeline(self) -> bool:
        """Whether more than one stage is asked for."""
        return self.stage_boundaries is not None or (self.pp or 1) > 1 or (self.chunks or 1) > 1

    @property
    def mesh_ranks(self) -> int:
        """Ranks of the mesh that is asked for; 0 where none is."""
        return Mesh.from_dict(self.mesh).size if self.mesh is not None else 0

    def forced_mesh(self, ranks: int, cluster_ranks: int) -> Mesh | None:
        """The mesh that is asked for, of the whole cluster or of a stage of `ranks` ranks. Raises InputError where its
        axes have another number of ranks."""
        if self.mesh is None:
            return None
        mesh = Mesh.from_dict(self.mesh)
        if mesh.size != ranks:
            where = f"the cluster has {ranks}" if ranks == cluster_ranks else f"a stage of the pipeline has {ranks}"
            raise InputError(
                f"Options.mesh {dict(self.mesh)} has {mesh.size} ranks, {where}; make the axis sizes multiply to {ranks}"
            )
        return mesh

    def least_data_parallel(self, cluster_ranks: int) -> int:
        """Ranks that every microbatch is sharded over whatever the planner chooses."""
        if self.strategy in DATA_PARALLEL and self.mesh is None:
            stages = len(self.stage_boundaries or ()) + 1
            return cluster_ranks // (self.pp or max(stages // (self.chunks or 1), 1))
        mesh = self.mesh or self.axes or {}
        return int(mesh.get("dp", 1)) * (1 if self.strategy == "auto" else int(mesh.get("ep", 1)))


Options.__init__ = with_suggestions(Options.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class Entry:
    """Another step over a program's parameters: the model in eval mode, without gradients. Its result is the pair of the loss
    (None where there is none) and of what the model returns. With `train` it is a training step, in the mode that the model is
    in, and its result is the loss.

    example_inputs: a global batch as `compile` takes it, of any size; None: the program's own. loss_fn(output, *targets):
    "inherited" is the program's own; None: the model's output alone, or `.loss` of it. module: another nn.Module in the place
    of the model, such as a teacher, or one around some layers of the model: parameters and buffers that both have are one, and
    those that it alone has are called "entry name.own name". outputs: False for the loss alone, where nobody reads what the
    model returns. ema: evaluate with averages of the trained parameters of this decay, updated after every step that trains one
    of them, as AveragedModel and get_ema_multi_avg_fn of torch.optim.swa_utils have it; buffers are the model's. optimizer:
    of a training step, as of `compile`, or an autopar.UpdateRule; it has the parameters that the step trains, and state of
    its own; `parallelize` takes one that is made of these too. trains: them, as a module or as parameters, whatever their
    requires_grad says outside of the step (None: those that require a gradient). buckets, pad_values: other shapes of its
    batches, as of `compile`. options: of its own (None: the program's); meshes, stages and how parameters are stored are the
    program's in any case.
    """

    example_inputs: Any = None
    loss_fn: Callable[..., Any] | str | None = INHERITED
    module: nn.Module | None = None
    outputs: bool = True
    ema: float | None = None
    train: bool = False
    optimizer: OptimizerFactory | UpdateRule | Optimizer | None = None
    trains: nn.Module | Iterable[nn.Parameter] | None = None
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None
    pad_values: Mapping[str, float] | None = None
    options: Options | None = None


Entry.__init__ = with_suggestions(Entry.__init__)  # type: ignore[method-assign]


def checked_entries(entries: Mapping[str, Entry] | None) -> dict[str, Entry]:
    """The entries that `compile` is given. Raises InputError where they are none, or have a name that is no identifier."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping) or len(entries) > MOST_ENTRIES:
        raise InputError(
            f'entries maps at most {MOST_ENTRIES} names to steps, {{"evaluate": autopar.Entry(…)}}; it is {shown(entries)}'
        )
    for name, entry in entries.items():
        if not is_identifier(name):
            raise InputError(
                f"entries names a step {shown(name)}; take a name that could be a variable's, such as 'evaluate'"
            )
        if not isinstance(entry, Entry):
            raise InputError(f"entries[{name!r}] must be an autopar.Entry, not {type(entry).__name__}")
        if entry.loss_fn is not None and entry.loss_fn != INHERITED and not callable(entry.loss_fn):
            raise InputError(
                f"entries[{name!r}]: loss_fn must be callable (output, *targets) -> scalar, None, or {INHERITED!r}, not "
                f"{shown(entry.loss_fn)}"
            )
        if entry.module is not None and not isinstance(entry.module, nn.Module):
            raise InputError(f"entries[{name!r}]: module must be a torch.nn.Module, not {type(entry.module).__name__}")
        if entry.ema is not None and (entry.train or not (is_number(entry.ema, 0, 1) and 0 < entry.ema < 1)):
            raise InputError(
                f"entries[{name!r}]: ema is the decay of averages to evaluate with, between 0 and 1, of a step that does not "
                f"train; it is {shown(entry.ema)}"
            )
        if not entry.train and (entry.optimizer is not None or entry.trains is not None):
            raise InputError(f"entries[{name!r}]: optimizer and trains are for a step that trains; set train=True")
        if entry.options is not None and not isinstance(entry.options, Options):
            raise InputError(
                f"entries[{name!r}]: options must be autopar.Options(…), not {type(entry.options).__name__}"
            )
    return dict(entries)
