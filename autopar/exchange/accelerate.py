"""Format `accelerate`: the YAML of `accelerate launch --config_file`: ParallelismConfig, and FSDP version 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from autopar.errors import InputError
from autopar.exchange import fsdp2
from autopar.exchange.keys import (
    Facts,
    Format,
    Key,
    Read,
    Written,
    degree,
    flattened,
    is_whole,
    lost,
    nested,
    read_keys,
    write_keys,
)
from autopar.exchange.layout import Layout

_PARALLELISM = "parallelism_config.parallelism_config_"
_FSDP = "fsdp_config.fsdp_"
_PRECISION = {"": "no", "bf16": "bf16", "fp16": "fp16"}
_FSDP_FIXED = {
    f"{_FSDP}version": 2,
    f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{_FSDP}state_dict_type": "SHARDED_STATE_DICT",
    f"{_FSDP}cpu_ram_efficient_loading": False,
}
_FIXED = {"compute_environment": "LOCAL_MACHINE", "use_parallelism_config": "true", **_FSDP_FIXED}
"""Keys that say that the others hold, and one that older versions have."""
_WRAPPED = f"{_FSDP}transformer_layer_cls_to_wrap"


def _yes(name: str, field: str, value: Any, off: Any) -> Key:
    """A switch of a field with several values."""
    return Key(
        name,
        (field,),
        lambda y: True if getattr(y, field) == value else None,
        lambda on: {field: value if on else off} if isinstance(on, bool) else None,
    )


def _precision(name: Any) -> Mapping[str, Any] | None:
    own = {text: value for value, text in _PRECISION.items()}
    return {"precision": own[name]} if name in own else None


KEYS = (
    Key("mixed_precision", ("precision",), lambda y: _PRECISION[y.precision], _precision),
    Key(f"{_PARALLELISM}dp_replicate_size", ("dp", "replicas"), lambda y: y.dp_replicate),
    Key(f"{_PARALLELISM}dp_shard_size", ("zero",), lambda y: y.dp_shard),
    degree(f"{_PARALLELISM}tp_size", "tp"),
    degree(f"{_PARALLELISM}cp_size", "cp"),
    Key(
        f"{_FSDP}reshard_after_forward",
        ("reshard_after_forward",),
        lambda y: (y.reshard_after_forward is not False) if y.zero else None,
        lambda on: {"reshard_after_forward": on} if isinstance(on, bool) else None,
    ),
    _yes(f"{_FSDP}offload_params", "offload", "parameters", "none"),
    _yes(f"{_FSDP}activation_checkpointing", "recompute", "full", "none"),
)


def write(layout: Layout, facts: Facts) -> Written:
    """The YAML, and what it says. FSDP needs ranks to cut the state over; without them nothing is said of it."""
    carried = fsdp2.as_carried(layout, facts)
    carried = replace(carried, cp=layout.cp, dp=None)
    carried = carried.on(facts.ranks) if facts.ranks else replace(carried, dp=layout.dp)
    if carried.zero == 0 and carried.tp * carried.cp > 1 and (carried.dp or 1) > 1:
        carried = replace(
            carried, zero=3, reshard_after_forward=False
        )  # it has no copies of parameters beside tp or cp
    carried = replace(carried, modules=layout.modules)
    shards = carried.zero > 0 or carried.cp > 1
    if not shards:
        carried = replace(carried, recompute="none", offload="none")
    ranks = carried.ranks or 1
    said = write_keys(KEYS, carried)
    if not shards:
        kept = _PARALLELISM if carried.tp > 1 else "mixed_precision"
        said = {name: value for name, value in said.items() if name.startswith((kept, "mixed_precision"))}
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if shards else "MULTI_GPU",
        "num_machines": max(1, ranks // max(1, min(facts.per_node, ranks))),
        "num_processes": ranks,
        **(_FSDP_FIXED if shards else {}),
        **({_WRAPPED: ",".join(facts.block_classes)} if shards and facts.block_classes else {}),
        **said,
    }
    text = yaml.safe_dump(nested(values), sort_keys=False)
    return Written({"accelerate.yaml": text}, carried, lost(layout, carried, "accelerate"))


def read(text: str) -> Read:
    """The layout that the YAML says. Raises InputError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"this is no YAML ({error})") from error
    if not isinstance(values, dict):
        raise InputError("a configuration of accelerate is a mapping of keys")
    flat = {name: value for name, value in flattened(values).items() if _FIXED.get(name) != value}
    ranks = flat.pop("num_processes", None)
    for name in ("num_machines", _WRAPPED):
        flat.pop(name, None)
    kind = flat.pop("distributed_type", "FSDP")
    if kind not in ("FSDP", "MULTI_GPU"):
        flat["distributed_type"] = kind
    said = read_keys(KEYS, flat)
    replicate, shard = (flat.get(f"{_PARALLELISM}dp_{name}_size") for name in ("replicate", "shard"))
    layout = said.layout
    if is_whole(shard) and shard > 1:
        layout = replace(layout, zero=3, replicas=replicate or 1, dp=shard * (replicate or 1))
    elif is_whole(replicate):
        layout = replace(layout, dp=replicate)
    return Read(layout if layout.dp or not is_whole(ranks) else layout.on(ranks), said.unknown)


FORMAT = Format("accelerate", "accelerate 1.15", write, read)
