"""Format `fsdp2`: a Python file with `parallelize(model)` (DeviceMesh, parallelize_module, fully_shard) and `train_step`.

The decisions stand as constants at the top of the file, which is how such a file is read again. Products that tp cuts give
DTensors to each other, so that heads and features in between follow by themselves.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from autopar.errors import InputError
from autopar.exchange.keys import (
    Facts,
    Format,
    Key,
    Read,
    Written,
    carried_by,
    degree,
    is_whole,
    lost,
    read_keys,
    write_keys,
)
from autopar.exchange.layout import STYLES, Layout
from autopar.exchange.patterns import patterns_of

_TEMPLATE = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(
    Path(__file__).with_name("fsdp2.py.j2").read_text()
)


def _styles(value: Any) -> Mapping[str, Any] | None:
    known = isinstance(value, dict) and all(style in STYLES for style in value.values())
    return {"modules": value} if known else None


def _reshard(layout: Layout) -> bool:
    return layout.zero == 3 if layout.reshard_after_forward is None else layout.reshard_after_forward


KEYS = (
    Key(
        "DP_REPLICATE", ("dp", "replicas"), lambda y: y.dp_replicate, lambda n: {"replicas": n} if is_whole(n) else None
    ),
    Key("DP_SHARD", ("dp", "zero"), lambda y: y.dp_shard, lambda n: {"dp": n} if is_whole(n) else None),
    degree("TP", "tp"),
    Key("TP_PLAN", ("modules",), lambda y: patterns_of(y.modules) or None, _styles),
    Key(
        "RESHARD_AFTER_FORWARD",
        ("reshard_after_forward",),
        lambda y: _reshard(y) if y.zero else None,
        lambda on: {"reshard_after_forward": on},
    ),
    Key(
        "CHECKPOINT_BLOCKS",
        ("recompute",),
        lambda y: True if y.recompute == "full" else None,
        lambda on: {"recompute": "full" if on else "none"},
    ),
    Key(
        "OFFLOAD",
        ("offload",),
        lambda y: True if y.offload == "parameters" else None,
        lambda on: {"offload": "parameters" if on else "none"},
    ),
    Key(
        "PARAM_DTYPE",
        ("precision",),
        lambda y: {"bf16": "bfloat16", "fp16": "float16"}.get(y.precision),
        lambda name: {"precision": {"bfloat16": "bf16", "float16": "fp16"}[name]},
    ),
    Key("MICRO_BATCH", ("micro_batch",), lambda y: y.micro_batch, lambda n: {"micro_batch": n}),
    Key("GLOBAL_BATCH", ("global_batch",), lambda y: y.global_batch, lambda n: {"global_batch": n}),
)


def write(layout: Layout, facts: Facts) -> Written:
    """The file, and what it says."""
    carried = as_carried(layout, facts)
    values = {key.name: None for key in KEYS} | {"TP": 1} | write_keys(KEYS, carried)
    constants = "\n".join(f"{name} = {_literal(value)}" for name, value in values.items())
    blocks = f"BLOCKS = {_literal(list(facts.blocks))}"
    text = _TEMPLATE.render(model=facts.model, ranks=carried.ranks, constants=f"{constants}\n{blocks}")
    return Written({"parallelize.py": text}, carried, lost(layout, carried, "FSDP2"))


def as_carried(layout: Layout, facts: Facts) -> Layout:
    """The part of a layout that FSDP2 code says: ZeRO in its third form, gathered parameters kept where it was another."""
    carried = layout.only(carried_by(KEYS))
    carried = carried.on(facts.ranks) if facts.ranks else replace(carried, dp=layout.dp)
    if carried.zero in (1, 2):
        carried = replace(carried, zero=3, reshard_after_forward=False)
    if carried.dp is not None and carried.dp != layout.dp and layout.global_batch:
        carried = replace(carried, micro_batch=max(1, layout.global_batch // carried.dp))
    return replace(
        carried,
        recompute="full" if layout.recompute == "full" else "none",
        offload="parameters" if layout.offload in ("parameters", "all") else "none",
    )


def read(text: str) -> Read:
    """The layout that the constants of such a file say. Raises InputError."""
    values = constants(text)
    values.pop("BLOCKS", None)
    said = read_keys(KEYS, {name: value for name, value in values.items() if value is not None})
    layout, replicas, shard = said.layout, values.get("DP_REPLICATE"), values.get("DP_SHARD")
    if replicas is not None and shard is not None:
        zero = 3 if shard > 1 else 0
        layout = replace(layout, dp=replicas * shard, replicas=replicas if zero else 1, zero=zero)
    return Read(layout, said.unknown)


def constants(text: str) -> dict[str, Any]:
    """The literals that names in capitals are given at the top of a Python file. Raises InputError where it is none."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise InputError(f"this is no Python file ({error})") from error
    found: dict[str, Any] = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name.isupper() and not name.startswith("_"):
                try:
                    found[name] = ast.literal_eval(statement.value)
                except ValueError:
                    continue
    return found


def _literal(value: Any) -> str:
    return repr(value) if not isinstance(value, dict | list) else json.dumps(value, indent=4) if value else repr(value)


FORMAT = Format("fsdp2", "torch 2.13", write, read)
