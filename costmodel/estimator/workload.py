"""The question of an estimate: a transformer on a cluster, under a plan, with a software stack, for a batch.

`StepPlan` is what a planner may choose, `Software` (`costmodel/software.py`) what is given with the framework and its kernels,
and `Workload` all of it together: every formula of this folder takes a `Workload`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, dtype_bytes
from autopar.costmodel.estimator.shape import ParallelConfig, Parts, TransformerShape
from autopar.costmodel.software import Software
from autopar.errors import ConstraintError

FULL_PRECISIONS = ("float32", "tfloat32", "float64")
EMITTED_PRECISIONS = ("bfloat16", "float16", "float32")
RECOMPUTES = ("none", "selective", "mlp", "full")
OFFLOADS = ("none", "activations", "optimizer")


@dataclass(frozen=True)
class StepPlan:
    """How a training step is run.

    micro_batch: sequences that a data-parallel rank takes at a time. recompute: none, selective (attention core, cheap
    operations), mlp, or full. schedule: of the pipeline. offload: to host memory, none, activations (hidden behind
    compute as far as the host link allows), or optimizer. recomputed: share of the layers that "full" holds for, the others
    keep all.
    """

    parallel: ParallelConfig
    micro_batch: int
    recompute: str = "none"
    schedule: str = "1f1b"
    offload: str = "none"
    recomputed: float = 1.0

    def check(self) -> None:
        """Raises ConstraintError for a recompute or an offload that does not exist, and for a share that is none."""
        if self.recompute not in RECOMPUTES:
            raise ConstraintError(f"recompute is none, selective, mlp or full, got {self.recompute!r}")
        if self.offload not in OFFLOADS:
            raise ConstraintError(f"offload is none, activations or optimizer, got {self.offload!r}")
        if not 0 < self.recomputed <= 1:
            raise ConstraintError(
                f"recomputed is a share of the layers, above 0 and at most 1, got {self.recomputed!r}"
            )


@dataclass(frozen=True)
class Workload:
    """Everything a step's time and memory depend on. batch: sequences of a step. device: the cluster's pace."""

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
        """The workload at the pace of the cluster's slowest devices. software: by default fused kernels in the 16-bit dtype that
        all devices have."""
        software = (software or Software(cluster.half_dtype)).canonical()
        return Workload(model, cluster, cluster.pace(0, cluster.size), plan, software, batch)

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
        return self.software.kernels != "fused"

    @property
    def full_precision(self) -> bool:
        """Whether weights and activations take four bytes and more."""
        return self.precision in FULL_PRECISIONS

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        return self.parallel.microbatches(self.batch, self.plan.micro_batch, self.software.is_emitted)

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch on the data-parallel rank that has most."""
        emitted = self.software.is_emitted
        return -(-self.batch // (self.microbatches * self.parallel.dp)) if emitted else self.plan.micro_batch

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank (before sequence parallelism)."""
        return self.sequences * self.model.seq_len / self.parallel.cp

    @cached_property
    def parts(self) -> Parts:
        """Into how many parts tp cuts the model."""
        return self.parallel.parts(self.model, self.software.is_emitted)

    @property
    def local_experts(self) -> float:
        """Experts on the rank that has most of them."""
        experts, ep = self.model.experts, self.parallel.ep
        return -(-experts // ep) if self.software.is_emitted else experts / ep

    def mlp_parts(self, moe: bool) -> float:
        """Into how many parts tp cuts what follows attention in a layer. moe: experts."""
        return self.parts.expert if moe and self.parallel.expert_tp > 1 else self.parts.mlp

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
    def sequence_split(self) -> float:
        """How many ways norms and residuals are split over tp."""
        return self.parts.positions

    @property
    def memory_Bps(self) -> float:
        """Bytes per second that kernels reach from the device's memory."""
        return self.device.memory_bandwidth_Bps * self.device.curve.memory

    def peak_flops(self) -> float:
        """The device's peak for the products, FLOP/s. Raises ClusterError when the device lacks the precision."""
        return self.device.peak("float8" if self.precision == "mxfp8" else self.precision)


def not_emitted(w: Workload) -> str:
    """Why no program is emitted for a plan in this precision; empty where one may be."""
    p = w.parallel
    reasons = {
        f"{w.precision}: Options.precision is bf16 or fp16": w.software.is_emitted
        and w.precision not in EMITTED_PRECISIONS,
        f"experts apart over ep={p.ep} of dp={p.dp}: rows travel along one axis, which is a part of dp": p.dp % p.ep
        > 0,
        "ZeRO over a part of the ranks that take the batch": p.shard_group not in (None, p.dp),
        f"recompute {w.plan.recompute!r}: Options.recompute is none, selective or full": w.plan.recompute == "mlp",
        "recompute 'full' of some layers: Options.recompute holds for all": w.plan.recomputed < 1,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)
