"""Options: everything a user may force or bound; the defaults let the planner choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from autopar.errors import InputError
from autopar.ir.memory_levers import OFFLOAD_KINDS, PRECISIONS, RECOMPUTE_POLICIES

STRATEGIES = ("auto", "dp", "zero1", "zero3", "megatron")


@dataclass(frozen=True)
class Options:
    """Choices of one compilation.

    microbatches: pieces the global batch is cut into along its batch dim; gradients accumulate, synchronised once.
        None: what the search finds best.
    pp: groups of ranks that the program is cut over as a pipeline (1: none). None: searched.
    schedule: of the pipeline, a name of autopar.passes.schedule ("1f1b", "zb-h1", …) or "auto": the fastest that fits.
    chunks: stages per group of ranks (interleaved schedules). None: searched.
    stage_boundaries: module paths at which a stage starts, such as ["layers.8", "layers.16"].
    mesh: force axis names and sizes, for example {"dp": 2, "tp": 2}; their product must be the number of ranks.
    strategy: "auto" (solver), or a baseline: "dp" (parameters whole), "zero1" (optimizer state sharded), "zero3"
        (parameters sharded), "megatron" (parameters sharded over the last mesh axis only).
    recompute: what backward makes again instead of its being kept: "none", "full" (a block keeps its inputs alone),
        "selective" (attention and what is pointwise is made again), or "auto": what costs least, where memory is short.
    offload: what rests in the cluster's memory tiers (host memory, then NVMe) instead of on the device: "none",
        "optimizer" (its state), "activations" (what forward keeps for backward), "parameters" (stored shards with their
        gradients, and optimizer state), "all", or "auto": what costs
        least, where memory is short and the cluster describes tiers.
    precision: "bf16" or "fp16": products, attention, look-ups and what is pointwise compute in that dtype; norms, softmax,
        losses and other reductions in float32; parameters, gradient sums and optimizer state stay float32, parameters
        are cast before they are gathered. None: as the model is.
    constraints: name pattern (shell wildcards) -> spec, such as {"*.q.weight": "[@tp, .]"}. Patterns match parameter
        names (the spec is how the parameter is stored) and values as "template.value".
    memory_fraction: share of device memory that a plan may use.
    memory_bytes: limit per rank in bytes instead of the device's memory times memory_fraction.
    solver_time_limit_s: seconds the solver may spend on one mesh.
    explain_s: seconds that may be spent on the nearest changes that would do when nothing fits (0: none are looked for).
    seed: seed of every random number of the program (dropout).
    compensated_sums: add the gradients of microbatches with a compensation of what rounding loses (Kahan), for one more
        buffer per gradient while they are added.
    batch_dims: batch dim per input, by name or in order; None where an input has none. Default: dim 0.
    """

    microbatches: int | None = None
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
    explain_s: float = 30.0
    seed: int = 0
    compensated_sums: bool = False
    batch_dims: Any = None

    def __post_init__(self) -> None:
        for name in ("mesh", "constraints"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise InputError(f"Options.{name} must be a dict, it is a {type(value).__name__}")
        counts = ("microbatches", "pp", "chunks")
        reals = ("memory_fraction", "solver_time_limit_s", "explain_s")
        for name, kind in (*((n, int) for n in counts), *((n, Real) for n in reals), ("seed", int)):
            value = getattr(self, name)
            if name in counts and value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InputError(f"Options.{name} must be a number, it is {value!r}")
        if self.solver_time_limit_s <= 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise InputError("Options.solver_time_limit_s and Options.memory_bytes must be positive")
        if self.mesh is not None and not all(isinstance(n, int) for n in self.mesh.values()):
            raise InputError(
                f"Options.mesh maps axis names to sizes, such as {{'dp': 2, 'tp': 4}}; it is {dict(self.mesh)}"
            )
        for name in counts:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"Options.{name} must be at least 1, it is {getattr(self, name)}")
        if isinstance(self.stage_boundaries, str) or not all(isinstance(b, str) for b in self.stage_boundaries or ()):
            raise InputError(
                f"Options.stage_boundaries is a list of module paths, such as ['layers.8']; it is {self.stage_boundaries!r}"
            )
        if self.strategy not in STRATEGIES:
            raise InputError(f"Options.strategy {self.strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
        for name, choices in (("recompute", ("auto", *RECOMPUTE_POLICIES)), ("offload", (*OFFLOAD_KINDS, "auto"))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"Options.{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
                )
        if self.precision is not None and self.precision not in PRECISIONS:
            raise InputError(
                f"Options.precision {self.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}, or None"
            )
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"Options.memory_fraction must lie in (0, 1], it is {self.memory_fraction}")
        if self.mesh is not None and any(int(n) < 1 for n in self.mesh.values()):
            raise InputError(f"Options.mesh has an axis smaller than 1: {dict(self.mesh)}")
