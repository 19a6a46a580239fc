"""Format `megatron`: a torchrun command line with Megatron-LM's flags, stages written as `--pipeline-model-parallel-layout`.

Uneven stages are `Et*3|(tt|)*29,m|L`: E the embedding, t a layer, m a head that predicts a further token, L the loss; a bar ends
a stage, brackets repeat. Ranks are said by torchrun: dp is what the other degrees leave. Flags that Megatron takes only beside
others are written with these: its FSDP, which cuts gradients and parameters, has checkpoints of its own; an optimizer in host
memory is a distributed one; messages of tensor and context parallelism go through one queue of the device.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from autopar.errors import InputError
from autopar.exchange.keys import (
    Facts,
    Format,
    Key,
    Read,
    Written,
    carried_by,
    degree,
    flag,
    lost,
    read_keys,
    write_keys,
)
from autopar.exchange.layout import Layout, NotCarried, StageUnits

_STRATEGIES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_TORCHRUN = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
)
_MULTIPLIED = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
_MOST_UNITS = 100_000


def show_stages(stages: tuple[StageUnits, ...]) -> str:
    """Stages as Megatron writes them, equal ones after one another as one."""
    texts = ["E" * stage.embedding + _layers(stage.layers) + "L" * stage.loss for stage in stages]
    parts = []
    for text, run in groupby(texts):
        count = len(list(run))
        parts.append((text, count))
    shown = ""
    for text, count in parts:
        shown += f"({text}|)*{count}" if count > 1 else f"{text}|"
    return shown.removesuffix("|")


def _layers(count: int) -> str:
    return f"t*{count}" if count > 1 else "t" * count


def parse_stages(text: str) -> tuple[StageUnits, ...]:
    """Inverse of `show_stages`; commas and blanks mean nothing. Raises InputError for another text."""
    flat = re.sub(r"[,\s]", "", text)
    while (found := _MULTIPLIED.search(flat)) is not None:
        unit, count = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
        if len(flat) + len(unit) * int(count) > _MOST_UNITS:
            raise InputError(f"the layout {text!r} has too many units")
        flat = flat[: found.start()] + unit * int(count) + flat[found.end() :]
    if not re.fullmatch(r"[EtL|]*", flat) or "m" in flat:
        raise InputError(
            f"the layout {text!r} has other units than E, t and L, such as heads that predict further tokens"
        )
    stages = flat.split("|") if not flat.endswith("|") else flat[:-1].split("|")
    return tuple(StageUnits(one.count("t"), "E" in one, "L" in one) for one in stages)


def _recompute(layout: Layout) -> str | None:
    return None if layout.recompute == "none" else layout.recompute


def _zero(layout: Layout) -> str | None:
    return _STRATEGIES[layout.zero] if layout.zero > 1 else None


def _strategy(name: Any) -> Mapping[str, Any] | None:
    stages = {text: zero for zero, text in _STRATEGIES.items()}
    return {"zero": stages[name]} if name in stages else None


def _stages(layout: Layout) -> str | None:
    return show_stages(layout.stages) if uneven(layout) else None


def uneven(layout: Layout) -> bool:
    """Whether stages have different numbers of layers, or something else than the ends where Megatron would have it."""
    return len({stage.layers for stage in layout.stages}) > 1


def _virtual(layout: Layout) -> int | None:
    return layout.virtual_stages if layout.virtual_stages > 1 and not uneven(layout) else None


KEYS = (
    degree("tensor_model_parallel_size", "tp"),
    degree("pipeline_model_parallel_size", "pp"),
    degree("context_parallel_size", "cp"),
    degree("expert_model_parallel_size", "ep"),
    Key("expert_tensor_parallel_size", ("etp",), lambda y: y.etp, lambda n: {"etp": n}),
    Key(
        "num_virtual_stages_per_pipeline_rank",
        ("virtual_stages", "schedule"),
        _virtual,
        lambda n: {"virtual_stages": n},
    ),
    Key("pipeline_model_parallel_layout", ("stages",), _stages, lambda text: {"stages": parse_stages(text)}),
    flag("sequence_parallel", "sequence_parallel"),
    Key("use_distributed_optimizer", ("zero",), lambda y: y.zero > 0 or None, lambda on: {"zero": 1} if on else {}),
    Key("use_megatron_fsdp", ("zero",), lambda y: y.zero > 1 or None),
    Key("ckpt_format", ("zero",), lambda y: "fsdp_dtensor" if y.zero > 1 else None),
    Key("data_parallel_sharding_strategy", ("zero",), _zero, _strategy),
    Key(
        "num_distributed_optimizer_instances",
        ("replicas",),
        lambda y: y.replicas if y.replicas > 1 and y.zero else None,
        lambda n: {"replicas": n},
    ),
    flag("overlap_grad_reduce", "overlap_gradients"),
    flag("overlap_param_gather", "overlap_parameters"),
    Key(
        "recompute_granularity",
        ("recompute",),
        _recompute,
        lambda s: {"recompute": s} if s in ("full", "selective") else None,
    ),
    Key(
        "recompute_method",
        (),
        lambda y: ("block" if y.recompute_layers else "uniform") if y.recompute == "full" else None,
    ),
    Key(
        "recompute_num_layers",
        ("recompute_layers",),
        lambda y: (y.recompute_layers or 1) if y.recompute == "full" else None,
        lambda n: {"recompute_layers": n},
    ),
    Key(
        "optimizer_cpu_offload",
        ("offload",),
        lambda y: y.offload == "optimizer" or None,
        lambda on: {"offload": "optimizer"},
    ),
    Key("use_precision_aware_optimizer", ("offload",), lambda y: y.offload == "optimizer" or None),
    Key("micro_batch_size", ("micro_batch",), lambda y: y.micro_batch, lambda n: {"micro_batch": n}),
    Key("global_batch_size", ("global_batch",), lambda y: y.global_batch, lambda n: {"global_batch": n}),
    Key("bf16", ("precision",), lambda y: y.precision == "bf16" or None, lambda on: {"precision": "bf16"}),
    Key("fp16", ("precision",), lambda y: y.precision == "fp16" or None, lambda on: {"precision": "fp16"}),
)


def write(layout: Layout, facts: Facts) -> Written:
    """The command line, and what it says."""
    left = layout.only(carried_by(KEYS))
    carried = left.on(facts.ranks) if facts.ranks else replace(left, dp=layout.dp)
    schedule = "" if layout.pp == 1 else "interleaved" if layout.virtual_stages > 1 else "1f1b"
    offload = (
        layout.offload
        if layout.offload in ("none", "optimizer")
        else "optimizer"
        if layout.offload in ("all", "parameters")
        else "none"
    )
    carried = replace(
        carried,
        schedule=schedule,
        offload=offload,
        stages=layout.stages if uneven(layout) else (),
        zero=max(layout.zero, 1) if offload == "optimizer" else layout.zero,
        overlap_parameters=layout.overlap_parameters if layout.zero and layout.overlap_gradients else None,
    )
    apart = () if uneven(layout) else (replace(layout, stages=()),)
    ranks = carried.ranks or 1
    per_node = min(facts.per_node, ranks)
    one_queue = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if carried.tp * carried.cp > 1 and carried.zero < 2 else []
    lines = [*one_queue, f"torchrun --nnodes {max(1, ranks // per_node)} --nproc-per-node {per_node} pretrain_gpt.py"]
    for name, value in write_keys(KEYS, carried).items():
        lines.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}"))
    text = " \\\n    ".join(lines) + "\n"
    styles = (
        (NotCarried("styles of single modules", "Megatron's own modules: columns, then rows"),)
        if layout.modules
        else ()
    )
    return Written({"megatron.sh": text}, carried, (*lost(apart[0] if apart else layout, carried, "Megatron"), *styles))


def read(text: str) -> Read:
    """The layout that a command line, or flags alone, say. Raises InputError."""
    values = flags(text)
    torchrun = {name: values.pop(name) for name in _TORCHRUN if name in values}
    layers = values.get("num_layers")
    chunk = values.pop("num_layers_per_virtual_pipeline_stage", None)
    together = values.pop("recompute_num_layers", 1) if values.get("recompute_method") == "uniform" else 1
    said = read_keys(KEYS, values)
    unknown = {**said.unknown, **({"recompute_num_layers": str(together)} if together != 1 else {})}
    layout = said.layout
    if chunk is not None:
        if not isinstance(layers, int) or layers % (layout.pp * chunk):
            raise InputError("num-layers-per-virtual-pipeline-stage needs a num-layers that it and the pipeline divide")
        layout = replace(layout, virtual_stages=layers // (layout.pp * chunk))
    if layout.stages:
        layout = replace(layout, virtual_stages=max(1, len(layout.stages) // layout.pp))
    if layout.pp > 1:
        layout = replace(layout, schedule="interleaved" if layout.virtual_stages > 1 else "1f1b")
    if "nproc_per_node" in torchrun:
        layout = layout.on(int(torchrun["nproc_per_node"]) * int(torchrun.get("nnodes", 1)))
    return Read(layout, unknown)


def flags(text: str) -> dict[str, Any]:
    """Values by flag, with underscores; True where one has none. Raises InputError for a text that is no command line."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"this is no command line ({error})") from error
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = _value(value) if equals else True
        elif name and values[name] is True:
            values[name] = _value(word)
            name = ""
        else:
            name = ""
    return values


def _value(word: str) -> Any:
    return int(word) if re.fullmatch(r"[0-9]{1,15}", word) else word


FORMAT = Format("megatron", "megatron-core 0.19.2", write, read)
