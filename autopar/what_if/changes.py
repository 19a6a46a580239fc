"""Changes of a request, in words or by name: `tp=4,microbatches=8`, `nodes=16`, `memory_gb=24`, `pin:NAME=SPEC`.

A change is a field of `Options`, the size of an axis of meshes (`tp=4`; the rest is solved), or one of

    mesh       sizes of several axes, with `pp` for stages: {"tp": 4, "pp": 2}
    pin        how parameters rest: a name of parameters, or of modules with such parameters, with wildcards, to a spec
    nodes      the cluster with so many nodes like its first
    memory_gb  devices with so many GB (10^9 bytes) of memory
    cluster    another cluster
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autopar.cluster import ClusterSpec, resized
from autopar.cluster.given import as_cluster
from autopar.cluster.spec import with_memory
from autopar.errors import InputError
from autopar.options import MESH_AXES, Options
from autopar.request import Request
from autopar.runtime.data.schema import MOST_RANKS, did_you_mean, is_integer, is_number, shown

GB = 1e9
STAGES = "pp"
"""The axis of a mesh that is the number of groups of ranks in a pipeline."""
CALLED = {"fsdp": "zero3", "ddp": "dp"}
"""Other names of strategies."""
PIN = "pin:"
OF_RANKS = ("mesh", "pin", "nodes", "memory_gb", "cluster")
MOST_GB = 1e6
_FIELDS = tuple(field.name for field in fields(Options) if field.name not in ("mesh", "axes"))
_OF_FIRST = ("strategy", "pp", "chunks", "schedule", "stage_boundaries", "constraints")
"""Fields of `Options` that a program's own step alone has; entries follow its plan."""
_BETWEEN = re.compile(r",(?![^\[]*\])")


def changes_of(words: str) -> dict[str, Any]:
    """The changes that words say: `tp=4,microbatches=8,pin:layers.*.up.weight=[@tp, .]`. Raises InputError."""
    changes: dict[str, Any] = {}
    for word in _BETWEEN.split(words):
        name, separator, value = word.strip().partition("=")
        if not separator or not name or not value:
            raise InputError(
                f"{shown(word)} is no change; write one such as tp=4, strategy=fsdp, nodes=16 or pin:NAME=SPEC"
            )
        if name.startswith(PIN):
            changes["pin"] = {**changes.get("pin", {}), name.removeprefix(PIN): value}
        else:
            changes[name] = _value(value)
    return changes


def pins_of(words: list[str]) -> dict[str, str]:
    """The pins that words `NAME=SPEC` say. Raises InputError."""
    pins = {}
    for word in words:
        name, separator, spec = word.partition("=")
        if not (separator and name.strip() and spec.strip()):
            raise InputError(f"--pin takes NAME=SPEC, such as 'layers.*.q_proj.weight=[@tp, .]', not {shown(word)}")
        pins[name.strip()] = spec.strip()
    return pins


def axes_of(words: str) -> dict[str, int]:
    """The sizes of axes that words say, `tp=4,pp=2`. Raises InputError."""
    return {name: _size(name, value) for name, value in changes_of(words).items()}


def words_of(changes: Mapping[str, Any]) -> str:
    """Changes in the words that say them."""
    words = []
    for name, value in changes.items():
        if name == "pin":
            words += [f"{PIN}{one}={spec}" for one, spec in value.items()]
        elif name == "mesh":
            words += [f"{axis}={n}" for axis, n in value.items()]
        elif name == "cluster":
            words.append(f"cluster={value.name if isinstance(value, ClusterSpec) else value}")
        else:
            words.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return ",".join(words)


def changed_options(options: Options, changes: Mapping[str, Any]) -> Options:
    """The options with changes of them; those of clusters are left out. Raises InputError."""
    said: dict[str, Any] = {}
    axes = {name: _size(name, changes[name]) for name in MESH_AXES if name in changes}
    mesh = changes.get("mesh") or {}
    if not isinstance(mesh, Mapping):
        raise InputError(f"mesh takes sizes of axes, such as {{'tp': 4}}, not {shown(mesh)}")
    axes |= {name: _size(name, n) for name, n in mesh.items()}
    if STAGES in axes:
        said[STAGES] = axes.pop(STAGES)
    for name, value in changes.items():
        if name in _FIELDS:
            said[name] = CALLED.get(value, value) if name == "strategy" else value
        elif name not in (*MESH_AXES, *OF_RANKS):
            known = (*MESH_AXES, *OF_RANKS, *_FIELDS)
            raise InputError(
                f"there is no change named {shown(name)}; name an axis ({', '.join((*MESH_AXES, STAGES))}), "
                f"{', '.join(OF_RANKS)}, or a field of autopar.Options{did_you_mean(name, known)}"
            )
    if axes:
        said |= {"mesh": None, "axes": {**(options.axes or {}), **axes}}
    pins = changes.get("pin") or {}
    if not isinstance(pins, Mapping) or not all(isinstance(one, str) for one in (*pins, *pins.values())):
        raise InputError(f"pin takes specs by name, such as {{'layers.*.up.weight': '[@tp, .]'}}, not {shown(pins)}")
    if pins:
        said["constraints"] = {**options.constraints, **pins}
    if changes.get("memory_gb") is not None:
        said["memory_bytes"] = None
    return replace(options, **said)


def changed_cluster(cluster: ClusterSpec, changes: Mapping[str, Any]) -> ClusterSpec:
    """The cluster with changes of it. Raises InputError, ClusterError."""
    if changes.get("cluster") is not None:
        cluster = as_cluster(changes["cluster"])
    nodes, memory_gb = changes.get("nodes"), changes.get("memory_gb")
    if nodes is not None:
        if not is_integer(nodes, 1, MOST_RANKS):
            raise InputError(f"nodes is a whole number from 1 on, not {shown(nodes)}")
        per_node = cluster.levels[0].group_size if cluster.levels else cluster.size
        cluster = cluster if nodes * per_node == cluster.size else resized(cluster, nodes * per_node)
    if memory_gb is not None:
        if not is_number(memory_gb, 0, MOST_GB) or memory_gb <= 0:
            raise InputError(f"memory_gb is the memory of a device in GB, such as 24, not {shown(memory_gb)}")
        cluster = with_memory(cluster, GB * memory_gb)
    return cluster


def changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """The request with changes, its plan to be searched again. Raises InputError, ClusterError."""
    if not changes:
        raise InputError("what_if needs a change, such as tp=4, strategy='fsdp', nodes=16 or pin={name: spec}")
    options = changed_options(request.options, changes)
    differing = [name for name in _FIELDS if getattr(options, name) != getattr(request.options, name)]
    others = [name for name in differing if name not in _OF_FIRST]
    if request.entries and others:
        raise InputError(
            f"{', '.join(others)} would be of the entries {', '.join(request.entries)} too, which may have options of their own; "
            "compile again with these"
        )
    if "matmul_precision" in differing and options.matmul_precision == "highest":
        raise InputError(
            "a program whose products were priced as TF32 is not priced otherwise; compile again without it"
        )
    update = replace(request.update, compensated=options.compensated_sums)
    return replace(request, update=update).searched(options, cluster=changed_cluster(request.cluster, changes))


def _value(text: str) -> Any:
    """A number, a yes or no, or none, as text says it; else the text."""
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text


def _size(axis: str, size: Any) -> int:
    if axis not in (*MESH_AXES, STAGES):
        raise InputError(
            f"meshes have the axes {', '.join((*MESH_AXES, STAGES))}, and no {axis}{did_you_mean(axis, MESH_AXES)}"
        )
    if not is_integer(size, 1, MOST_RANKS):
        raise InputError(f"{axis} is a whole number of ranks from 1 on, not {shown(size)}")
    return int(size)
