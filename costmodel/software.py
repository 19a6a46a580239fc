"""Software that a plan runs on and no planner chooses: the framework, its kernels, and the constants fitted to published runs.

`Software` says how a bill (`costmodel/bill.py`) is read. What emitted programs are depends on the machine: on GPUs whose
family was fitted they are read with the fitted constants and without the overlap that they do not have (`emitted_on`);
elsewhere (CPUs, devices that a user measured or described) everything counts in full (`NEUTRAL`), where collectives were measured
one by one with the time to meet counted once for the gathers of a call, which are under way together, one call ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, curve_named, dtype_name, load_data

LOW_PRECISIONS = ("float8", "mxfp8", "float4")
"""Precisions below 16 bits, in which a layer's products of weights are; mxfp8 has float8's arithmetic."""
BEHIND_PRODUCTS = "behind products"
"""The cover of a message of tensor parallelism also where a software overlaps no others: of the two products that the backward
of one with weights is, the other (Megatron-LM's `async_tensor_model_parallel_allreduce`, and Korthikanti et al. for what is
gathered again)."""
CAST_BYTES = 4
"""Bytes of a pass that casts an element to 8 or 4 bits."""
LOGIT_BYTES = 12
"""Bytes of a framework's passes over a logit, in 32 bits, each way."""
LAYER_LAUNCHES = 67
"""Kernels of forward and backward of a Llama layer whose ops are launched one by one (26 and 41)."""
LAUNCH_HOST = 1.58
ONCE_LAUNCHES = 266
"""Host seconds of a kernel's line in an emitted program, with its views, in those of launching a kernel; and of what comes once a
step, in those of lines. Both are fitted to 12 steps of small programs on an H100, each beside the launches of its moment: the
median error is 14 %, and steps with dropout take up to 1.7 times as long (docs/measurements.md, On one H100)."""
PERMUTED_AS_SENT = 2 / 6
"""Routed tokens are passed over six times (written in the order of ranks, there read and written in that of experts, and as often
on the way back), twice where they are permuted as they are sent."""
TORCH_RING_BYTES = (38.0, 30.0)
"""Bytes of passes, forward and backward, by which torch's ring of attention adds up every further block of keys, per element of
queries: results in 32 bits (cast 6, difference 12, product 8, difference 12), gradients of queries, keys and values (10 each)."""


@dataclass(frozen=True)
class StepConstants:
    """The fitted constants that no device and no model owns.

    fused_passes: memory passes of a layer with fused kernels (Transformer Engine, compiled) relative to the least possible.
    eager_share: passes of a framework's own kernels relative to those of op by op.
    fp8_cast, mx_cast: passes to quantise inputs (per tensor; per
    block of 32). grouped_share: share of a plain product's efficiency that grouped expert products reach.
    permute_passes: passes over routed tokens. biased_attention: share of torch's attention that kernels reach which add a
    bias. *_host_s: seconds the host needs to launch one layer, forward and backward; expert_host_s adds to it per local expert.
    once_host_s: seconds of the host for what comes once a step, of which the update is the most; a device that is busy longer
    hides them. *_exposed: share of communication that overlap does not hide. jitter: relative loss per doubling of nodes.
    step_overhead_s: per step, whatever the plan.
    """

    fused_passes: float = 1.0
    eager_share: float = 0.8
    fp8_cast: float = 1.0
    mx_cast: float = 1.5
    grouped_share: float = 0.8
    permute_passes: float = 4.0
    biased_attention: float = 1.0
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
    once_host_s: float = 0.0


@cache
def default_constants() -> StepConstants:
    """The fitted values (data/step.json)."""
    fitted = load_data("step.json", "autopar.costmodel.estimator")["constants"]
    names = {constant.name for constant in fields(StepConstants)}
    return StepConstants(**{name: value for name, value in fitted.items() if name in names})


@dataclass(frozen=True)
class Software:
    """The software stack that a plan runs on; no planner chooses it.

    precision of the products: float16, bfloat16, float8, mxfp8 (block-scaled), float4, float32. kernels: "fused"
    (Transformer Engine, compiled), "eager" (a framework's own), or "apart": every op reads and writes memory by itself.
    attention, by whose kernels: "own" (written for the device's generation), "torch" (for the one before, over cp in torch's
    ring), "biased" (that add a bias to scores, as ALiBi's); "": the device's own where kernels are fused, else torch's.
    attention_8: whether attention's products are in 8 bits where a layer's others are in 8 or 4.
    overlap_tp: whether the all-gathers and reduce-scatters of sequence parallelism overlap with their products.
    dispatch, how tokens travel to their experts: "once" to every place that has any of them, permuted as they are sent (DeepEP,
    HybridEP), or "each" time that they chose one, by collectives before and after passes that permute rows, behind nothing.
    overlap_ep: whether these messages of one microbatch travel while another one computes.
    drops_tokens: whether experts take as many rows each, whoever chose them (token drop with a capacity): the host then knows
    how many there are, and waits for no count of the device's.
    graphs: what the host launches at once, as a graph: "layers" (attention and routers; kernels of experts one by one), "step"
    (all of it), "" (nothing).
    grad_bytes, reduce_bytes: of one gradient in memory and on the wire. moment_bytes: of one of Adam's two moments.
    copy_bytes: of one element of the copies of parameters that products read; they are made once a step, and sent when parameters
    are updated. The lines of a program say their own gradients in memory; None: they also say what is on the wire, and cast
    parameters for every microbatch.
    late_reduction: gradients are reduced after the whole backward, so all of them are held at the peak whatever ZeRO
    shards. late_gather: updated parameters are gathered before the step ends, not behind the next forward.
    buffer_bytes: communication buckets of the framework. bucket_bytes: of one message of gradients or updated parameters.
    joins_gathers: whether parameters that are gathered for a call (ZeRO-3) travel in such messages too.
    keeps_rows: whether a mixture of experts keeps the rows that came to its experts for backward, and sends a token once to
    every node that has any of its experts, from one of the ranks that have it. Emitted programs send every row, from every rank,
    and once more in backward.
    gradient_passes: whether gradients are added up over microbatches, and copied into their messages, by passes over memory; in
    frameworks products add them to where they are sent from.
    recompute_stops: whether a layer that is made again is left where all that backward reads is there, so that its last product
    is not made (torch's checkpoints from 2.1 on, XLA, emitted programs), or made whole (Megatron's).
    regathers: whether backward sends behind the products of weights' gradients, for which rows of a sequence are gathered again
    (Megatron-LM's since 2022), or keeps what was gathered and waits for what it sends.
    """

    precision: str = "bfloat16"
    kernels: str = "fused"
    attention: str = ""
    attention_8: bool = False
    overlap_tp: bool = True
    dispatch: str = "once"
    overlap_ep: bool = False
    drops_tokens: bool = False
    graphs: str = ""
    grad_bytes: float = 4.0
    reduce_bytes: float | None = 2.0
    moment_bytes: float = 4.0
    copy_bytes: float | None = 2.0
    late_reduction: bool = False
    late_gather: bool = False
    buffer_bytes: float = 0.0
    bucket_bytes: float = 1e9
    joins_gathers: bool = True
    keeps_rows: bool = True
    gradient_passes: bool = False
    recompute_stops: bool = False
    regathers: bool = True
    constants: StepConstants = field(default_factory=default_constants)

    def canonical(self) -> Software:
        """The same with the full name of its precision ("bf16" is "bfloat16"). Raises ClusterError for an unknown one."""
        return self if self.precision == "mxfp8" else replace(self, precision=dtype_name(self.precision))

    @property
    def is_emitted(self) -> bool:
        """Whether programs are emitted ones: parameters rest as they are updated, and are cast from there."""
        return self.copy_bytes is None

    @property
    def eager_attention(self) -> bool:
        """Whether attention is by kernels of the generation before the device's own."""
        return self.attention != "own" if self.attention else self.kernels != "fused"

    @property
    def low_dtype(self) -> str:
        """The dtype of a layer's products of weights where it has less than 16 bits; else empty."""
        return {"mxfp8": "float8"}.get(self.precision, self.precision) if self.precision in LOW_PRECISIONS else ""

    @property
    def cast_passes(self) -> float:
        """Passes, of `CAST_BYTES` an element, over what such a product reads: rows forward, their gradients backward."""
        c = self.constants
        return 0.0 if not self.low_dtype else c.fp8_cast if self.precision == "float8" else c.mx_cast

    @property
    def attention_dtype(self) -> str:
        """The dtype of attention's products where it has less than 16 bits; else empty."""
        return "float8" if self.attention_8 and self.low_dtype else ""

    @property
    def repeats_keys(self) -> bool:
        """Whether context parallelism is torch's: keys and values are repeated for all heads of queries before they travel, their
        gradients in 32 bits, nothing hides these messages, and passes add up what blocks of keys give."""
        return self.attention == "torch"

    @property
    def attention_share(self) -> float:
        """Share of the rate of attention's kernels that is left by what they do beside it."""
        return self.constants.biased_attention if self.attention == "biased" else 1.0

    @property
    def launch_host_s(self) -> float:
        """Seconds of the host per kernel of a program, as many as a dense layer has in `LAYER_LAUNCHES`."""
        return self.layer_host_s / LAYER_LAUNCHES

    @property
    def layer_host_s(self) -> float:
        """Seconds of the host for a dense layer, forward and backward."""
        return 0.0 if self.graphs else self.constants.dense_host_s

    def mixture_host_s(self, experts: float) -> float:
        """Seconds of the host for a mixture of so many experts on a rank, forward and backward, beyond a dense layer's."""
        c = self.constants
        waits_s = 0.0 if self.drops_tokens else c.moe_host_s - c.dense_host_s
        return 0.0 if self.graphs == "step" else waits_s + c.expert_host_s * experts

    @property
    def routed_passes(self) -> float:
        """Passes over routed tokens beside those of their products."""
        return self.constants.permute_passes * (1.0 if self.dispatch == "each" else PERMUTED_AS_SENT)

    @property
    def reduce_share(self) -> float:
        """Share of gradients' reductions that is exposed at least."""
        return 1.0 if self.late_reduction else self.constants.dp_exposed

    @property
    def gather_share(self) -> float:
        """Share of the gathers of updated values that is exposed at least."""
        return 1.0 if self.late_reduction or self.late_gather else self.constants.dp_exposed

    @property
    def shards_share(self) -> float:
        """Share of the gathers of every microbatch that is exposed at least."""
        return 1.0 if self.late_reduction else self.constants.zero3_exposed

    def exposed_share(self, overlap: str) -> float:
        """Share of a message that is not hidden. overlap: the constant that says it; "": nothing hides the message."""
        if overlap == BEHIND_PRODUCTS:
            return self.constants.tp_exposed
        if not overlap or (overlap == "tp_exposed" and not self.overlap_tp):
            return 1.0
        if overlap == "ep_exposed" and (self.overlap_ep or self.dispatch == "each"):
            return 0.0 if self.overlap_ep else 1.0
        return float(getattr(self.constants, overlap))


NEUTRAL = Software(
    kernels="apart",
    attention="own",
    reduce_bytes=None,
    copy_bytes=None,
    overlap_tp=False,
    bucket_bytes=25 << 20,
    joins_gathers=False,
    keeps_rows=False,
    gradient_passes=True,
    recompute_stops=True,
    regathers=False,
    constants=StepConstants(
        grouped_share=1.0,
        dense_host_s=0.0,
        moe_host_s=0.0,
        expert_host_s=0.0,
        tp_exposed=1.0,
        cp_exposed=1.0,
        ep_exposed=1.0,
        dp_exposed=1.0,
        zero3_exposed=1.0,
        jitter=0.0,
        step_overhead_s=0.0,
    ),
)
"""Every message is exposed, and a step takes nothing but what its bill lists."""


@cache
def emitted_on(cluster: ClusterSpec) -> Software:
    """The software of the programs that are emitted for a cluster. On GPUs the products of all experts are one kernel."""
    if not all(_fitted(device) for _, device in cluster.devices):
        launch_s = max(device.launch_overhead_s if device.kind == "gpu" else 0.0 for _, device in cluster.devices)
        constants = launched_in(NEUTRAL.constants, LAUNCH_HOST * launch_s)
        measured = [level.exposed for level in cluster.levels if level.measured]
        if not measured:
            return replace(NEUTRAL, constants=constants)
        return replace(
            NEUTRAL, joins_gathers=True, late_gather=True, constants=replace(constants, zero3_exposed=max(measured))
        )
    fitted = default_constants()
    constants = launched_in(fitted, fitted.dense_host_s / LAYER_LAUNCHES)
    constants = replace(constants, ep_exposed=1.0, cp_exposed=1.0, expert_host_s=0.0, step_overhead_s=0.0)
    if all(device.curve.grouped_half for _, device in cluster.devices):
        constants = replace(constants, grouped_share=1.0)
    return replace(NEUTRAL, late_gather=True, constants=constants)


def launched_in(constants: StepConstants, line_s: float) -> StepConstants:
    """The constants of emitted programs whose host takes so many seconds for a kernel's line."""
    dense_s = LAYER_LAUNCHES * line_s
    moe_s = constants.moe_host_s - constants.dense_host_s + dense_s
    return replace(constants, dense_host_s=dense_s, moe_host_s=moe_s, once_host_s=ONCE_LAUNCHES * line_s)


def _fitted(device: DeviceSpec) -> bool:
    """Whether a device's efficiency is that of a family of GPUs."""
    families = load_data("efficiency.json")["curves"]
    return device.kind == "gpu" and any(curve_named(name) == device.curve for name in families if name != "cpu")
