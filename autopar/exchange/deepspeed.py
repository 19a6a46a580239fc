"""Format `deepspeed`: the JSON configuration of DeepSpeed. Ranks of dp follow from its three sizes of batches."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autopar.exchange.keys import (
    Facts,
    Format,
    Key,
    Read,
    Written,
    above,
    carried_by,
    flattened,
    is_whole,
    lost,
    nested,
    read_keys,
    write_keys,
)
from autopar.exchange.layout import Layout, NotCarried
from autopar.exchange.tp_plan import read_object

_ZERO = "zero_optimization."


def _when(name: str, field: str, value: Any) -> Key:
    """A section that is enabled for one value of a field."""
    return Key(
        f"{name}.enabled",
        (field,),
        lambda y: True if getattr(y, field) == value else None,
        lambda on: ({field: value} if on else {}) if isinstance(on, bool) else None,
    )


KEYS = (
    Key(
        "train_batch_size",
        ("global_batch",),
        lambda y: y.global_batch,
        lambda n: {"global_batch": n} if is_whole(n) else None,
    ),
    Key(
        "train_micro_batch_size_per_gpu",
        ("micro_batch",),
        lambda y: y.micro_batch,
        lambda n: {"micro_batch": n} if is_whole(n) else None,
    ),
    Key("gradient_accumulation_steps", ("dp",), lambda y: y.microbatches, lambda n: {} if is_whole(n) else None),
    Key(f"{_ZERO}stage", ("zero",), lambda y: y.zero, lambda n: {"zero": n} if n in (0, 1, 2, 3) else None),
    Key(
        f"{_ZERO}offload_optimizer.device",
        ("offload",),
        lambda y: "cpu" if y.offload in ("optimizer", "parameters") else None,
        lambda s: {"offload": "optimizer"} if s == "cpu" else {} if s in ("none", "nvme") else None,
    ),
    Key(
        f"{_ZERO}offload_param.device",
        ("offload",),
        lambda y: "cpu" if y.offload == "parameters" else None,
        lambda s: {"offload": "parameters"} if s == "cpu" else {} if s in ("none", "nvme") else None,
    ),
    Key(
        f"{_ZERO}mics_shard_size",
        ("replicas",),
        lambda y: y.dp_shard if y.zero == 3 and y.replicas > 1 else None,
        lambda n: {} if is_whole(n) else None,
    ),
    Key(
        f"{_ZERO}overlap_comm",
        ("overlap_gradients",),
        lambda y: y.overlap_gradients,
        lambda on: {"overlap_gradients": on} if isinstance(on, bool) else None,
    ),
    _when("bf16", "precision", "bf16"),
    _when("fp16", "precision", "fp16"),
    Key("tensor_parallel.autotp_size", ("tp",), lambda y: above(y.tp, 1), lambda n: {"tp": n} if is_whole(n) else None),
)


def write(layout: Layout, facts: Facts) -> Written:
    """The JSON, and what it says."""
    left = layout.only(carried_by(KEYS))
    carried = left.on(facts.ranks) if facts.ranks else replace(left, dp=layout.dp)
    carried = replace(
        carried,
        offload={"all": "parameters", "activations": "none"}.get(layout.offload, layout.offload),
        replicas=layout.replicas if layout.zero == 3 else 1,
    )
    dp, batch = carried.dp, layout.global_batch
    if dp != layout.dp and batch and dp and batch % (dp * (layout.micro_batch or 1)):
        carried = replace(carried, micro_batch=max(1, batch // dp))
    text = json.dumps(nested(write_keys(KEYS, carried)), indent=2) + "\n"
    styles = (NotCarried("styles of single modules", "those that AutoTP finds"),) if layout.modules else ()
    again = layout.recompute != "none"
    calls = (NotCarried(f"recompute {layout.recompute}", "the model's own calls of checkpoint"),) if again else ()
    return Written({"deepspeed.json": text}, carried, (*lost(layout, carried, "DeepSpeed"), *styles, *calls))


def read(text: str) -> Read:
    """The layout that the JSON says. Raises InputError."""
    flat = flattened(read_object(text, "a configuration of DeepSpeed"))
    said = read_keys(KEYS, {name: value for name, value in flat.items() if value != "auto"})
    layout, steps = said.layout, flat.get("gradient_accumulation_steps")
    if is_whole(steps) and steps > 0 and layout.global_batch and layout.micro_batch:
        layout = replace(layout, dp=max(1, layout.global_batch // (steps * layout.micro_batch)))
    shard = flat.get(f"{_ZERO}mics_shard_size")
    if is_whole(shard) and shard > 0 and layout.dp:
        layout = replace(layout, replicas=max(1, layout.dp // shard))
    return Read(layout, {**said.unknown, **{name: "auto" for name, value in flat.items() if value == "auto"}})


FORMAT = Format("deepspeed", "DeepSpeed 0.19.8", write, read)
