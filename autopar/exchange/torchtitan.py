"""Format `torchtitan`: a Python function that gives a `Trainer.Config` another layout, and the schedule's actions as CSV.

A schedule that torchtitan has no class for is carried as `pipeline_parallel_schedule_csv`: a row per rank, a column per action,
`0F1` the forward of microbatch 1 in stage 0, I and W the two halves of a backward, B both.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    is_whole,
    lost,
    read_keys,
    write_keys,
)
from autopar.exchange.layout import Layout, NotCarried
from autopar.ir.actions import StageGraph, parse_row
from autopar.ir.schedules import schedule_row
from autopar.runtime.program.actions import Action

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Schedules with a class in torch; others are tables."""
CSV = "schedule.csv"
_PARALLELISM, _TRAINING = "parallelism.", "training."


def _recompute(name: Any) -> Mapping[str, Any] | None:
    names = {"FullAC": "full", "SelectiveAC": "selective"}
    return {"recompute": names[name]} if name in names else None


def _reshard(layout: Layout) -> str | None:
    said = layout.reshard_after_forward
    return None if said is None or layout.zero == 0 else "always" if said else "never"


def _shard(layout: Layout) -> int | None:
    return layout.dp_shard if layout.dp is not None else -1 if layout.zero else 1


def _local_batch(layout: Layout) -> int | None:
    if layout.pp == 1 or layout.microbatches is None:
        return layout.micro_batch
    assert layout.micro_batch is not None
    return layout.micro_batch * layout.microbatches


def _schedule(layout: Layout) -> str | None:
    if layout.pp == 1:
        return None
    return SCHEDULES.get(layout.schedule, "PipelineScheduleMulti") if not layout.table else "PipelineScheduleMulti"


def _named(name: Any) -> Mapping[str, Any] | None:
    own = {text: schedule for schedule, text in SCHEDULES.items()}
    if name == "PipelineScheduleMulti":
        return {}
    return {"schedule": own[name]} if name in own else None


KEYS = (
    Key(
        f"{_PARALLELISM}data_parallel_replicate_degree",
        ("replicas", "dp"),
        lambda y: y.dp_replicate if (y.dp_replicate or 1) > 1 else None,
        lambda n: {"replicas": n} if is_whole(n) else None,
    ),
    Key(f"{_PARALLELISM}data_parallel_shard_degree", ("zero",), _shard, lambda n: {} if is_whole(n) else None),
    Key(
        f"{_PARALLELISM}fsdp_reshard_after_forward",
        ("reshard_after_forward",),
        _reshard,
        lambda s: (
            {"reshard_after_forward": {"always": True, "never": False}.get(s)}
            if s in ("always", "never", "default")
            else None
        ),
    ),
    degree(f"{_PARALLELISM}tensor_parallel_degree", "tp"),
    Key(
        f"{_PARALLELISM}enable_sequence_parallel",
        ("sequence_parallel",),
        lambda y: False if y.tp > 1 and not y.sequence_parallel else None,
        lambda on: {"sequence_parallel": on} if isinstance(on, bool) else None,
    ),
    degree(f"{_PARALLELISM}pipeline_parallel_degree", "pp"),
    Key(f"{_PARALLELISM}pipeline_parallel_schedule", ("schedule", "virtual_stages"), _schedule, _named),
    Key(
        f"{_PARALLELISM}pipeline_parallel_schedule_csv",
        ("table",),
        lambda y: CSV if _schedule(y) == "PipelineScheduleMulti" else None,
    ),
    Key(
        f"{_PARALLELISM}pipeline_parallel_layers_per_stage",
        ("stages", "virtual_stages"),
        lambda y: y.stages[0].layers if y.pp > 1 and y.stages and len({s.layers for s in y.stages}) == 1 else None,
    ),
    Key(
        f"{_PARALLELISM}pipeline_parallel_microbatch_size",
        ("micro_batch",),
        lambda y: y.micro_batch if y.pp > 1 else None,
        lambda n: {"micro_batch": n} if is_whole(n) else None,
    ),
    degree(f"{_PARALLELISM}context_parallel_degree", "cp"),
    degree(f"{_PARALLELISM}expert_parallel_degree", "ep"),
    Key(
        f"{_TRAINING}local_batch_size",
        ("micro_batch",),
        _local_batch,
        lambda n: {"micro_batch": n} if is_whole(n) else None,
    ),
    Key(
        f"{_TRAINING}global_batch_size",
        ("global_batch",),
        lambda y: y.global_batch,
        lambda n: {"global_batch": n} if is_whole(n) else None,
    ),
    Key(
        f"{_TRAINING}mixed_precision_param",
        ("precision",),
        lambda y: None if y.precision == "bf16" else "float32",
        lambda s: {"precision": {"bfloat16": "bf16", "float32": ""}[s]} if s in ("bfloat16", "float32") else None,
    ),
    Key(
        f"{_TRAINING}enable_cpu_offload",
        ("offload",),
        lambda y: y.offload == "parameters" or None,
        lambda on: {"offload": "parameters" if on else "none"} if isinstance(on, bool) else None,
    ),
    Key(
        "activation_checkpoint",
        ("recompute",),
        lambda y: {"full": "FullAC", "selective": "SelectiveAC"}.get(y.recompute),
        _recompute,
    ),
)
SECTIONS = {"parallelism": "ParallelismConfig", "training": "TrainingConfig"}


def write(layout: Layout, facts: Facts) -> Written:
    """The function and, where there is a schedule of its own, the CSV; and what they say."""
    left = layout.only(carried_by(KEYS))
    left = left.on(facts.ranks) if facts.ranks else replace(left, dp=layout.dp)
    uneven = len({stage.layers for stage in layout.stages}) > 1
    carried = replace(
        left,
        zero=3 if layout.zero else 0,
        reshard_after_forward=False if layout.zero in (1, 2) else layout.reshard_after_forward,
        offload="parameters" if layout.offload in ("parameters", "all") else "none",
        precision="" if layout.precision == "fp16" else layout.precision,
        stages=() if uneven else layout.stages,
        recompute_layers=None,
    )
    values = write_keys(KEYS, carried)
    files = {"recipe.py": _recipe(values, facts)}
    if values.get(f"{_PARALLELISM}pipeline_parallel_schedule_csv"):
        files[CSV] = schedule_csv(carried)
    gone = (NotCarried("styles of single modules", "torchtitan's own of the model"),) if layout.modules else ()
    return Written(files, carried, (*lost(layout, carried, "torchtitan"), *gone))


def schedule_csv(layout: Layout) -> str:
    """The actions of every rank. Raises InputError where the number of microbatches is not known."""
    shape = "v" if layout.schedule and schedule_row(layout.schedule).shape == "v" else "loop"
    graph = StageGraph.chain(layout.pp, layout.virtual_stages, shape)
    rows: list[Sequence[Action]] = [parse_row(row) for row in layout.table]
    if not rows:
        if layout.microbatches is None:
            raise InputError("a schedule's table needs micro_batch and global_batch")
        rows = list(schedule_row(layout.schedule).table(graph, layout.microbatches))
    apart = any(action.kind == "W" for row in rows for action in row)
    letters = {"F": "F", "B": "I" if apart else "B", "W": "W"}
    return "\n".join(",".join(f"{a.stage}{letters[a.kind]}{a.microbatch}" for a in row) for row in rows) + "\n"


def _recipe(values: Mapping[str, Any], facts: Facts) -> str:
    """The Python text."""
    lines = [
        f'"""A layout for torchtitan 0.3: `configured` gives the configuration of {facts.model} this one."""',
        "",
        "from torchtitan.config import ParallelismConfig, TrainingConfig",
    ]
    ac = values.get("activation_checkpoint")
    lines += [f"from torchtitan.distributed.activation_checkpoint import {ac}"] if ac else []
    lines += [
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def configured(config: Trainer.Config) -> Trainer.Config:",
    ]
    lines += ['    """The configuration with this layout."""']
    for section, name in SECTIONS.items():
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        if section == "training" and facts.sequence:
            own["seq_len"] = facts.sequence
        lines += [
            f"    config.{section} = {name}(",
            *(f"        {key}={value!r}," for key, value in own.items()),
            "    )",
        ]
    lines += [f"    config.activation_checkpoint = {ac}.Config()"] if ac else []
    return "\n".join([*lines, "    return config", ""])


def read(text: str) -> Read:
    """The layout that calls of ParallelismConfig and TrainingConfig in a Python text say. Raises InputError."""
    values = sections(text)
    values.pop(f"{_TRAINING}seq_len", None)
    actions = values.pop(f"{_PARALLELISM}pipeline_parallel_schedule_csv", None)
    said = read_keys(KEYS, values)
    layout = said.layout
    shard = values.get(f"{_PARALLELISM}data_parallel_shard_degree", -1)
    replicas = layout.replicas
    if shard == 1:
        layout = replace(layout, dp=replicas, replicas=1, zero=0)
    else:
        layout = replace(layout, zero=3, dp=None if shard == -1 else shard * replicas)
    if f"{_TRAINING}mixed_precision_param" not in values:
        layout = replace(layout, precision="bf16")
    if layout.tp > 1 and f"{_PARALLELISM}enable_sequence_parallel" not in values:
        layout = replace(layout, sequence_parallel=True)
    if layout.pp > 1:
        layout = replace(
            layout,
            schedule=layout.schedule or "1f1b",
            micro_batch=values.get(f"{_PARALLELISM}pipeline_parallel_microbatch_size", 1),
        )
    if layout.pp > 1 and not schedule_row(layout.schedule).serves(1):
        layout = replace(layout, virtual_stages=2)
    return Read(layout, {**said.unknown, **({"pipeline_parallel_schedule_csv": str(actions)} if actions else {})})


def sections(text: str) -> dict[str, Any]:
    """Arguments of the calls that make the sections, by dotted key. Raises InputError."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"this is no Python file ({error})") from error
    names = {called: section for section, called in SECTIONS.items()}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            section = names.get(called.rpartition(".")[2])
            for keyword in node.keywords:
                if section is not None and keyword.arg is not None:
                    found[f"{section}.{keyword.arg}"] = _literal(keyword.value)
            for policy in ("FullAC", "SelectiveAC"):
                if called == f"{policy}.Config":
                    found["activation_checkpoint"] = policy
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


FORMAT = Format("torchtitan", "torchtitan 0.3.0", write, read)
