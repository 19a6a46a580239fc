"""Options: everything a user may force or bound; the defaults let the planner choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from autopar.errors import InputError
from autopar.ir.memory_levers import OFFLOAD_KINDS, PRECISIONS, RECOMPUTE_POLICIES
from autopar.ir.mesh import Mesh
from autopar.runtime.compiled.inductor import COMPILERS
from autopar.runtime.data.schema import MOST_COUNT, MOST_NUMBER, is_identifier, is_integer, shown
from autopar.runtime.gradients.compression import CODECS

BRANCHES = ("refuse", "as-example")
ON_OVERFLOW = ("stop", "chunk")
COUPLED = ("refuse", "per-microbatch")
MOST_SECONDS = 1e9
MEGATRON = ("megatron", "megatron-zero1", "megatron-zero3")
STRATEGIES = ("auto", "dp", "zero1", "zero3", *MEGATRON)


@dataclass(frozen=True)
class Options:
    """Choices of one compilation.

    microbatches: pieces the global batch is cut into along its batch dim; gradients accumulate to those of the whole
        batch, synchronised once. None: what the search finds best.
    coupled: what microbatches of a program mean whose samples depend on each other (batch statistics, a contrastive loss):
        "refuse" them, or "per-microbatch": each is a batch of its own, and their losses are averaged.
    pp: groups of ranks that the program is cut over as a pipeline (1: none). None: searched.
    schedule: of the pipeline, a name of autopar.passes.schedule ("1f1b", "zb-h1", …) or "auto": the fastest that fits.
    chunks: stages per group of ranks (interleaved schedules). None: searched.
    stage_boundaries: module paths at which a stage starts, such as ["layers.8", "layers.16"].
    mesh: force axis names and sizes, for example {"dp": 2, "tp": 2}; their product must be the number of ranks.
    strategy: "auto" (solver), or a baseline: "dp" (parameters whole), "zero1" (optimizer state sharded), "zero3"
        (parameters sharded); "megatron": the last mesh axis is tensor-parallel as in Megatron-LM (column-parallel, then
        row-parallel products, the sequence sharded between them, vocabularies sharded), the others take the batch;
        "megatron-zero1" and "megatron-zero3" with ZeRO over these others. With a baseline the axis `ep` takes the batch and has
        experts apart, and `cp` takes the sequence.
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
    memory_fraction: share of device memory that a plan may use.
    memory_bytes: limit per rank in bytes instead of the device's memory times memory_fraction.
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
    branches: what becomes of branches on data (`if mask.any()`, `assert lengths.max() <= n`, comparisons of `.item()`):
        "refuse" them by name, or "as-example": the program takes the example batch's way, and stops, where guards run, on
        a batch that goes another.
    expert_imbalance: where the rows of a mixture travel to ranks that have its experts, how many a rank may get, as a multiple
        of what it would get if all got as many: memory is planned for that.
    on_overflow: what becomes of a step in which a rank gets more: "stop" it by name (ExpertOverflow, on every rank of the axis
        alike), or "chunk": compute it in more pieces within the same memory.
    order: of the sequence of causal attention: n, in 2n chunks of which every rank of n has one from the front and one from the
        back, so that all do as much; 0, as it is. None: what the search finds best.
    overlap: let lines of a block run while messages of others travel, where that is faster and fits. False: every message is
        waited for where it starts, but those of parameters and gradients.
    compiler: of what the program computes between its messages: "none", or "inductor": each distinct block is compiled once by
        torch's inductor, at the end of the first step. Memory is promised for the program as it is written.
    cuda_graphs: capture forward and backward of a step on a GPU once as a CUDA graph and play it from then on, so that the
        host starts one thing instead of every kernel. Where that cannot be (several ranks, dropout, sizes that data decides,
        …) a CudaGraphWarning says why when the program runs, and steps run as they are written. Memory is promised for these.
    gradient_compression: how gradients travel while they are reduced over ranks: None, as they are; "bf16", rounded to half the
        bytes of float32 and added in float32; "int8", a quarter of the bytes, with a scale for every 256 elements and error
        feedback: what rounding loses is kept on the rank, one float32 per element, and sent with the next step's gradient.
        Gradients of 16 bits, and those that rest in a memory tier, travel as they are. `verify` leaves it out.
    batch_dims: batch dim per input, by name or in order; None where an input has none. Default: dim 0.
    """

    microbatches: int | None = None
    coupled: str = "refuse"
    pp: int | None = None
    schedule: str = "auto"
    chunks: int | None = None
    stage_boundaries: Sequence[str] | None = None
    mesh: Mapping[str, int] | None = None
    strategy: str = "auto"
    recompute: str = "auto"
    offload: str = "auto"
    precision: str | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)
    memory_fraction: float = 0.9
    memory_bytes: float | None = None
    solver_time_limit_s: float = 60.0
    search_s: float | None = None
    workers: int | None = 1
    explain_s: float = 30.0
    seed: int = 0
    compensated_sums: bool = False
    guards: bool = True
    branches: str = "refuse"
    expert_imbalance: float = 1.25
    on_overflow: str = "stop"
    order: int | None = None
    overlap: bool = True
    compiler: str = "none"
    cuda_graphs: bool = False
    gradient_compression: str | None = None
    batch_dims: Any = None

    def __post_init__(self) -> None:
        for name, right, wrong in _CHECKS:
            value = getattr(self, name)
            if not right(value):
                shown = _Shown(dict(value) if isinstance(value, Mapping) else value)
                words = wrong if isinstance(wrong, str) else wrong()
                raise InputError(f"Options.{name} {words}".format(value=shown, kind=type(value).__name__))
        if self.solver_time_limit_s <= 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise InputError("Options.solver_time_limit_s and Options.memory_bytes must be positive")

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
        if self.strategy in ("dp", "zero1", "zero3") and self.mesh is None:
            return cluster_ranks // (self.pp or len(self.stage_boundaries or ()) + 1)
        mesh = self.mesh or {}
        return int(mesh.get("dp", 1)) * (1 if self.strategy == "auto" else int(mesh.get("ep", 1)))


class _Shown:
    """A value in a message: one short line, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return shown(self.value)

    __str__ = __repr__


def _is_number(kind: type, optional: bool = False) -> Callable[[Any], bool]:
    return lambda value: (optional and value is None) or (isinstance(value, kind) and not isinstance(value, bool))


def _one_of(choices: Callable[[], Sequence[str | None]]) -> tuple[Callable[[Any], bool], Callable[[], str]]:
    """choices: asked at every check, as tables may get rows."""

    def wrong() -> str:
        named = ", ".join(choice for choice in choices() if choice is not None)
        return f"{{value!r}} is unknown; choose one of {named}{', or None' if None in choices() else ''}"

    return lambda value: value in choices(), wrong


def _is_finite(optional: bool = False) -> Callable[[Any], bool]:
    number = _is_number(Real, optional)
    return lambda value: number(value) and (value is None or abs(float(value)) <= MOST_NUMBER)


def _are_batch_dims(value: Any) -> bool:
    """None, or a dim or None per input, by name or in order."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and _are_batch_dims(list(value.values()))
    dim = _is_number(int, optional=True)
    return value is None or (isinstance(value, (list, tuple)) and all(map(dim, value)))


def _are_paths(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(path, str) for path in value))


_COUNTS = ("microbatches", "pp", "chunks", "workers")
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str | Callable[[], str]], ...] = (
    *(
        (name, lambda value: value is None or isinstance(value, Mapping), "must be a dict, it is a {kind}")
        for name in ("mesh", "constraints")
    ),
    *((name, _is_number(int, optional=True), "must be a number, it is {value!r}") for name in (*_COUNTS, "order")),
    *(
        (name, _is_finite(), "must be a number, it is {value!r}")
        for name in ("memory_fraction", "solver_time_limit_s", "explain_s", "expert_imbalance")
    ),
    *((name, _is_finite(optional=True), "must be a number, it is {value!r}") for name in ("memory_bytes", "search_s")),
    *(
        (name, lambda seconds: seconds is None or 0 <= seconds <= MOST_SECONDS, "must lie in [0, 1e9], it is {value}")
        for name in ("explain_s", "search_s")
    ),
    ("solver_time_limit_s", lambda seconds: seconds <= MOST_SECONDS, "must be at most 1e9, it is {value}"),
    *(
        (name, lambda value: isinstance(value, bool), "must be True or False, it is {value!r}")
        for name in ("guards", "overlap", "cuda_graphs")
    ),
    ("seed", _is_number(int), "must be a number, it is {value!r}"),
    ("seed", lambda seed: is_integer(seed, -(1 << 63), (1 << 63) - 1), "must fit into 64 bits, it is {value}"),
    ("compensated_sums", lambda value: isinstance(value, bool), "must be True or False, it is {value!r}"),
    ("schedule", lambda value: isinstance(value, str), "must be the name of a schedule or 'auto', it is {value!r}"),
    (
        "batch_dims",
        _are_batch_dims,
        "maps inputs to their batch dims, such as {{'x': 0, 'mask': None}}, or lists these; it is {value!r}",
    ),
    (
        "constraints",
        lambda value: all(isinstance(part, str) for pair in value.items() for part in pair) if value else True,
        "maps patterns to specs, such as {{'*.weight': '[@tp, .]'}}; it is {value}",
    ),
    (
        "mesh",
        lambda mesh: all(map(is_identifier, mesh or ())),
        "has an axis whose name is not made of letters, digits and _: {value}",
    ),
    (
        "mesh",
        lambda mesh: all(isinstance(size, int) and not isinstance(size, bool) for size in (mesh or {}).values()),
        "maps axis names to sizes, such as {{'dp': 2, 'tp': 4}}; it is {value}",
    ),
    *((name, lambda count: count is None or count >= 1, "must be at least 1, it is {value}") for name in _COUNTS),
    *(
        (name, lambda count: count is None or count <= MOST_COUNT, f"must be at most {MOST_COUNT}, it is {{value}}")
        for name in _COUNTS
    ),
    (
        "order",
        lambda order: order is None or 0 <= order <= MOST_COUNT,
        f"must lie in [0, {MOST_COUNT}], it is {{value}}",
    ),
    ("stage_boundaries", _are_paths, "is a list of module paths, such as ['layers.8']; it is {value!r}"),
    ("expert_imbalance", lambda share: share >= 1, "must be at least 1 (the mean), it is {value}"),
    ("on_overflow", *_one_of(lambda: ON_OVERFLOW)),
    ("coupled", *_one_of(lambda: COUPLED)),
    ("strategy", *_one_of(lambda: STRATEGIES)),
    ("recompute", *_one_of(lambda: ("auto", *RECOMPUTE_POLICIES))),
    ("offload", *_one_of(lambda: (*OFFLOAD_KINDS, "auto"))),
    ("branches", *_one_of(lambda: BRANCHES)),
    ("compiler", *_one_of(lambda: COMPILERS)),
    ("precision", *_one_of(lambda: (*PRECISIONS, None))),
    ("gradient_compression", *_one_of(lambda: (*CODECS, None))),
    ("memory_fraction", lambda share: 0 < share <= 1, "must lie in (0, 1], it is {value}"),
    ("mesh", lambda mesh: all(int(size) >= 1 for size in (mesh or {}).values()), "has an axis smaller than 1: {value}"),
)
"""Option, whether a value of it is right, and what is said of one that is not; in the order in which they are checked."""
