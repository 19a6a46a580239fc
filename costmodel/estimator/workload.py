"""What an estimate is asked: a transformer on a cluster, under a plan, with a software stack, for a batch.

`StepPlan` is what a planner may choose, `Software` what is given with the framework and its kernels, and `Workload` all of
it together: every formula of this folder takes a `Workload`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, dtype_bytes, dtype_name, load_data
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.errors import ConstraintError

FULL_PRECISIONS = ("float32", "tfloat32", "float64")
LOW_PRECISIONS = ("float8", "mxfp8", "float4")
RECOMPUTES = ("none", "selective", "mlp", "full")
OFFLOADS = ("none", "activations", "optimizer")


@dataclass(frozen=True)
class StepConstants:
    """The fitted constants that no device and no model owns.

    fused_passes, eager_passes: memory passes of a layer relative to the least possible, for fused kernels (Transformer
    Engine, compiled) and for kernel-by-kernel execution. fp8_cast, mx_cast: passes to quantise inputs (per tensor; per
    block of 32). grouped_share: share of a plain product's efficiency that grouped expert products reach.
    permute_passes: passes over routed tokens. *_host_s: seconds the host needs to launch one layer, forward and
    backward; expert_host_s adds to it per local expert. *_exposed: share of communication that overlap does not hide.
    jitter: relative loss per doubling of nodes. step_overhead_s: per step, whatever the plan.
    """

    fused_passes: float = 1.0
    eager_passes: float = 1.6
    fp8_cast: float = 1.0
    mx_cast: float = 1.5
    grouped_share: float = 0.8
    permute_passes: float = 4.0
    dense_host_s: float = 6e-4
    moe_host_s: float = 3e-3
    expert_host_s: float = 3e-4
    tp_exposed: float = 0.5
    cp_exposed: float = 0.3
    ep_exposed: float = 0.8
    dp_exposed: float = 0.1
    zero3_exposed: float = 0.1
    jitter: float = 0.004
    step_overhead_s: float = 0.01


@cache
def default_constants() -> StepConstants:
    """The fitted values (data/step.json)."""
    fitted = load_data("step.json", "autopar.costmodel.estimator")["constants"]
    names = {constant.name for constant in fields(StepConstants)}
    return StepConstants(**{name: value for name, value in fitted.items() if name in names})


@dataclass(frozen=True)
class StepPlan:
    """How a training step is run.

    micro_batch: sequences that a data-parallel rank takes at a time. recompute: none, selective (attention core, cheap
    operations), mlp, or full. schedule: of the pipeline. offload: to host memory, none, activations (hidden behind
    compute as far as the host link allows), or optimizer.
    """

    parallel: ParallelConfig
    micro_batch: int
    recompute: str = "none"
    schedule: str = "1f1b"
    offload: str = "none"

    def check(self) -> None:
        """Raises ConstraintError for a recompute or an offload that does not exist."""
        if self.recompute not in RECOMPUTES:
            raise ConstraintError(f"recompute is none, selective, mlp or full, got {self.recompute!r}")
        if self.offload not in OFFLOADS:
            raise ConstraintError(f"offload is none, activations or optimizer, got {self.offload!r}")


@dataclass(frozen=True)
class Software:
    """What a plan runs on; no planner chooses it.

    precision of the products: float16, bfloat16, float8, mxfp8 (block-scaled), float4, float32. kernels: "fused"
    (Transformer Engine, compiled) or "eager". overlap_tp: whether the all-gathers and reduce-scatters of sequence
    parallelism overlap with their products. grad_bytes, reduce_bytes: of one gradient in memory and on the wire.
    late_reduction: gradients are reduced after the whole backward, so all of them are held at the peak whatever ZeRO
    shards. buffer_bytes: communication buckets of the framework.
    """

    precision: str = "bfloat16"
    kernels: str = "fused"
    overlap_tp: bool = True
    grad_bytes: float = 4.0
    reduce_bytes: float = 2.0
    late_reduction: bool = False
    buffer_bytes: float = 0.0
    constants: StepConstants = field(default_factory=default_constants)

    def canonical(self) -> Software:
        """The same with the full name of its precision ("bf16" is "bfloat16"). Raises ClusterError for an unknown one."""
        return self if self.precision == "mxfp8" else replace(self, precision=dtype_name(self.precision))


@dataclass(frozen=True)
class Workload:
    """Everything a step's time and memory depend on. batch: sequences of a step. device: the cluster's slowest."""

    model: TransformerShape
    cluster: ClusterSpec
    device: DeviceSpec
    plan: StepPlan
    software: Software
    batch: int

    @staticmethod
    def of(
        model: TransformerShape, cluster: ClusterSpec, plan: StepPlan, batch: int, software: Software | None = None
    ) -> Workload:
        """With the cluster's slowest device. software: by default fused kernels in bfloat16."""
        software = (software or Software()).canonical()
        return Workload(model, cluster, cluster.slowest(software.precision), plan, software, batch)

    def at(self, plan: StepPlan) -> Workload:
        """The same under another plan."""
        return replace(self, plan=plan)

    @property
    def parallel(self) -> ParallelConfig:
        """How many ways each kind of parallelism cuts."""
        return self.plan.parallel

    @property
    def precision(self) -> str:
        """Dtype of the products."""
        return self.software.precision

    @property
    def eager(self) -> bool:
        """Whether every operation is a kernel of its own."""
        return self.software.kernels == "eager"

    @property
    def full_precision(self) -> bool:
        """Whether weights and activations take four bytes and more."""
        return self.precision in FULL_PRECISIONS

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        return max(1, self.batch // (self.parallel.dp * self.plan.micro_batch))

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank (before sequence parallelism)."""
        return self.plan.micro_batch * self.model.seq_len / self.parallel.cp

    @property
    def wide(self) -> str:
        """Dtype of what low precision does not touch: attention and logits. 16 bits, or all of fp32 training."""
        if self.full_precision:
            return self.precision
        return "bfloat16" if self.device.supports("bfloat16") else "float16"

    @property
    def width(self) -> float:
        """Bytes of one activation."""
        return dtype_bytes(self.wide)

    @property
    def sequence_split(self) -> int:
        """How many ways norms and residuals are split over tp."""
        return self.parallel.tp if self.parallel.sequence_parallel else 1

    @property
    def memory_Bps(self) -> float:
        """Bytes per second that kernels reach from the device's memory."""
        return self.device.memory_bandwidth_Bps * self.device.curve.memory

    def peak_flops(self) -> float:
        """The device's peak for the products, FLOP/s. Raises ClusterError when the device lacks the precision."""
        return self.device.peak("float8" if self.precision == "mxfp8" else self.precision)
