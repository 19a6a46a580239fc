"""`estimate_row`: a row of the published-measurements format as input; what a source leaves out is filled by defaults.

Defaults: a null network rate is the device family's usual one; a null microbatch is 1; unknown recompute is none;
unknown ZeRO level is 2 within one node (Alpa's own choice), else 1; attention is "materialised" when the row says so or
is an fp16 GPT run or a V100 (recipes and devices from before flash attention), else flash; kernels are "fused" when
compiled (torch.compile, XLA), of a GPT without PyTorch FSDP (Megatron-LM has its own for norms, softmax, biases with what follows
them), or on Hopper and later without PyTorch FSDP (Transformer Engine), else "eager"; attention is torch's with torch.compile,
and adds a bias where the row says so. Checkpoints of PyTorch FSDP and XLA make no product again that backward does not read,
Megatron's make the whole layer. Without sequence parallelism Megatron's backward sends sums behind the products of weights'
gradients, but for its fork in DeepSpeed, of 2021. Gradients take 4 bytes; 2 with DeepSpeed in fp16 and with
Alpa, 6 with DeepSpeed in bf16 (a second fp32 copy). They travel in 2, with FSDP's DEFAULT mixed precision in 4. Parameters travel
in 1 byte where products are in 8 bits (Megatron Bridge's `fp8_param_gather`, which its FP8 recipes and NeMo's set; torchtitan's
float8 all-gather), with FSDP's mixed precision in 2.
Sequence parallelism overlaps its communication from Hopper on, unless the row says otherwise. DeepSpeed
has 7 GB of buckets; Alpa (V100 rows) reduces after the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, device_preset
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import Estimate, estimate_workload
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import Software, StepConstants, default_constants
from autopar.errors import InputError

_PRECISION = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
    "mxfp8": "mxfp8",
    "nvfp4": "float4",
    "fp32": "float32",
}


def row_model(row: Mapping[str, Any]) -> TransformerShape:
    """The shape of a row's model."""
    m, gpu = row["model"], str(row["hardware"]["gpu"])
    said = str(m.get("attention") or "")
    old = (m.get("dtype") == "fp16" and m.get("family", "gpt") == "gpt") or gpu.startswith("V100")
    materialised = "materialised" in said or (not said and old)
    pad = m.get("vocab_pad_to") or 1
    mla = m.get("mla")
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    hidden = int(m["hidden"])
    return TransformerShape(
        layers=int(m["layers"]),
        hidden=hidden,
        heads=int(m["heads"]),
        kv_heads=int(m.get("kv_heads") or m["heads"]),
        head_dim=int(m.get("head_dim") or hidden // int(m["heads"])),
        ffn=int(m.get("ffn") or 4 * hidden),
        vocab=-(-int(m.get("vocab") or 51200) // pad) * pad,
        seq_len=int(m["seq_len"]),
        gated_mlp=bool(m.get("gated_mlp")),
        experts=int(m.get("experts") or 0),
        topk=int(m.get("topk") or (1 if m.get("experts") else 0)),
        moe_ffn=m.get("moe_ffn"),
        shared_experts=int(m.get("shared_experts") or 0),
        first_dense_layers=int(m.get("first_dense_layers") or 0),
        mtp_layers=int(m.get("mtp_layers") or 0),
        attention="materialised" if materialised else "flash",
        window=128 if "sliding-window" in said else 0,
        tied_embeddings=bool(m.get("tied_embeddings", m.get("family") == "gpt")),
        mla=tuple(int(mla[k]) for k in keys) if isinstance(mla, Mapping) else None,
        name=str(m.get("name", "")),
    )


@lru_cache(maxsize=1024)
def _cluster(
    device: DeviceSpec, gpus: int, per_node: int, domain: int, intra: float | None, inter: float | None
) -> ClusterSpec:
    per_node = min(per_node, gpus)
    nodes_per_rack = _nodes_per_rack(gpus // per_node, domain // per_node) if domain > per_node else None
    if gpus % per_node:
        per_node = gpus
    return ClusterSpec.homogeneous(
        devices=gpus,
        device=device,
        devices_per_node=per_node,
        intra_bandwidth_Bps=intra * 1e9 if intra else None,
        inter_bandwidth_Bps=inter * 1e9 if inter else None,
        nodes_per_rack=nodes_per_rack,
    )


def _nodes_per_rack(nodes: int, most: int) -> int:
    """How many nodes of a rack a job takes: as many of each, so that its groups do not lie across racks."""
    return max(n for n in range(1, most + 1) if nodes % n == 0)


def row_cluster(row: Mapping[str, Any], device: DeviceSpec | None = None) -> ClusterSpec:
    """The cluster of a row."""
    h = row["hardware"]
    spec = device or device_preset(str(h["gpu"]))
    domain = int(h.get("nvlink_domain") or (72 if spec.name in ("gb200", "gb300") else 0))
    gpus, per_node = int(h["gpus"]), int(h.get("gpus_per_node") or 8)
    return _cluster(spec, gpus, per_node, domain, h.get("intra_bw_GBps"), h.get("inter_bw_GBps"))


def is_jax(parallel: Mapping[str, Any]) -> bool:
    """XLA programs: named, or with MaxText's way of writing FSDP."""
    return " x DP " in str(parallel.get("fsdp") or "") or "JAX" in str(parallel.get("framework") or "")


def row_kernels(row: Mapping[str, Any]) -> str:
    """fused for compiled programs, for Hopper and later (Transformer Engine) and for Megatron's GPT; else, and for PyTorch FSDP,
    eager."""
    parallel, gpu = row["parallel"], str(row["hardware"]["gpu"])
    megatrons = row["model"].get("family") == "gpt" and not parallel.get("fsdp")
    if parallel.get("torch_compile") or is_jax(parallel) or gpu.startswith("V100") or megatrons:
        return "fused"
    return "eager" if parallel.get("fsdp") or gpu.startswith("A100") else "fused"


def row_attention(row: Mapping[str, Any]) -> str:
    """Whose attention kernels run: those that add ALiBi's bias where the row says so, torch's in what torch.compile compiles."""
    if "ALiBi" in str(row["model"].get("attention")):
        return "biased"
    return "torch" if row["parallel"].get("torch_compile") else ""


def row_overlap_tp(row: Mapping[str, Any]) -> bool:
    """Said by the row; else yes on Hopper and later (Transformer Engine's user buffers), no for PyTorch FSDP + TP."""
    parallel = row["parallel"]
    for key in ("async_tp", "overlap_tp_comm"):
        if parallel.get(key) is not None:
            return bool(parallel[key])
    return not parallel.get("fsdp") and not str(row["hardware"]["gpu"]).startswith(("A100", "V100"))


def row_dispatch(row: Mapping[str, Any]) -> str:
    """How tokens travel to their experts: as the row says, once with AutoModel, else by Megatron's default, all_to_alls."""
    said = (row.get("recompute_detail") or {}).get("moe_dispatcher") or "HybridEP" in str(row.get("notes"))
    return "once" if said or "AutoModel" in str(row["parallel"].get("framework")) else "each"


def row_graphs(row: Mapping[str, Any]) -> str:
    """The part of a step that the host launches as a graph, as the row says."""
    what, parts = (row.get("recompute_detail") or {}).get("cuda_graph") or (
        None,
        "CUDA graphs" in str(row.get("notes")),
    )
    if what in ("full_iteration", "local"):
        return "step"
    return "layers" if parts else ""


def row_recompute(row: Mapping[str, Any]) -> str:
    """JAX's selective policies drop the MLP; unknown is none."""
    said = str(row.get("recompute"))
    if said == "selective" and recomputed_share(row) < 1:
        return "full"
    return {"full": "full", "selective": "mlp" if is_jax(row["parallel"]) else "selective"}.get(said, "none")


def recomputed_share(row: Mapping[str, Any]) -> float:
    """The share of the layers that are made again, as the row says: so many of each stage, or every second one; else all."""
    of_stage = (row.get("recompute_detail") or {}).get("recompute_num_layers")
    if of_stage:
        return min(1.0, float(of_stage) * int(row["parallel"].get("pp") or 1) / float(row["model"]["layers"]))
    return 0.5 if "every 2nd layer" in str(row.get("notes")) else 1.0


def recompute_stops(row: Mapping[str, Any]) -> bool:
    """Whether the layers made again are left where backward has all that it reads: with torch's checkpoints (FSDP) and XLA."""
    parallel = row["parallel"]
    return bool(parallel.get("fsdp")) or is_jax(parallel)


def row_copy_bytes(row: Mapping[str, Any]) -> float:
    """Bytes in which a parameter is gathered: one in 8 bits, but for FSDP's mixed precision, which knows 16."""
    in_16 = row["parallel"].get("fsdp_mixed_precision") or str(row["model"].get("dtype")) not in ("fp8", "mxfp8")
    return 2.0 if in_16 else 1.0


def row_plan(row: Mapping[str, Any]) -> StepPlan:
    """The plan of a row."""
    p, h = row["parallel"], row["hardware"]
    zero = p.get("zero")
    if zero is None:
        zero = 2 if int(h["gpus"]) <= int(h.get("gpus_per_node") or 8) else 1
    parallel = ParallelConfig(
        **{axis: int(p.get(axis) or 1) for axis in ("dp", "tp", "pp", "cp", "ep")},
        vpp=p.get("vpp"),
        sequence_parallel=bool(p.get("sequence_parallel")),
        zero=int(zero),
        shard_group=p.get("zero1_group") or p.get("shard_group"),
    )
    micro, schedule = int(row["batch"].get("micro") or 1), str(row.get("schedule") or "none")
    return StepPlan(parallel, micro, row_recompute(row), schedule, recomputed=recomputed_share(row))


def row_software(row: Mapping[str, Any], constants: StepConstants) -> Software:
    """The software of a row."""
    dtype = str(row["model"].get("dtype") or "bf16")
    deepspeed = "deepspeed" in str(row.get("schedule") or "").lower()
    alpa = "V100" in str(row["hardware"]["gpu"])
    return Software(
        precision=_PRECISION.get(dtype, dtype),
        kernels=row_kernels(row),
        attention=row_attention(row),
        attention_8=bool((row.get("recompute_detail") or {}).get("fp8_attention")),
        overlap_tp=row_overlap_tp(row),
        dispatch=row_dispatch(row),
        overlap_ep=bool((row.get("recompute_detail") or {}).get("moe_a2a_overlap")),
        drops_tokens="token-drop" in str(row.get("notes")),
        graphs=row_graphs(row),
        grad_bytes=2.0 if alpa else (2.0 if dtype == "fp16" else 6.0) if deepspeed else 4.0,
        reduce_bytes=4.0 if row["parallel"].get("fsdp_mixed_precision") == "DEFAULT" else 2.0,
        copy_bytes=row_copy_bytes(row),
        recompute_stops=recompute_stops(row),
        regathers=not (recompute_stops(row) or deepspeed),
        late_reduction=alpa,
        buffer_bytes=7e9 if deepspeed else 0.0,
        constants=constants,
    )


def row_workload(
    row: Mapping[str, Any], device: DeviceSpec | None = None, constants: StepConstants | None = None
) -> Workload:
    """The workload of a row, which `estimate` takes. Raises InputError for a row without the needed keys."""
    try:
        plan, batch = row_plan(row), int(row["batch"]["global"])
        software = row_software(row, constants or default_constants())
        return Workload.of(row_model(row), row_cluster(row, device), plan, batch, software)
    except KeyError as err:
        raise InputError(f"row {row.get('id', '?')}: {err.args[0]} is missing") from err


def estimate_row(
    row: Mapping[str, Any], *, device: DeviceSpec | None = None, constants: StepConstants | None = None
) -> Estimate:
    """Predicts a row from its model, hardware, parallel, batch, recompute, schedule; never reads what was measured."""
    return estimate_workload(row_workload(row, device, constants), check=False)
