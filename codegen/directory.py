"""The emitted directory: files out.

plan.json            the plan, replayable and hand-editable
pipeline.py          stages, what travels between them, and what every group of ranks does in a step
program.json         facts for `autopar-dump` (mesh, collectives, storage, predictions)
manifest.json        what run.py needs to know
stages/stage_0.py    the code; ranks that are alike share it
ranks/rank_0.py …    one short file per rank: its coordinates and its stages
autopar_runtime/     the small runtime, torch only
run.py               torchrun entry; launch.sh, slurm.sh and kubernetes.yaml start it on machines
weights/             the model's weights, where it has any (torch.distributed.checkpoint)
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar import runtime
from autopar.capture.trees import flatten
from autopar.codegen.stage import render
from autopar.codegen.user_ops import used_ops, user_ops_source
from autopar.errors import EmitError
from autopar.ir.lowered import LoweredProgram
from autopar.plan import Plan
from autopar.runtime.update_rule import UpdateRule

MOST_RANK_FILES = 1024
LAUNCHERS = ("run.py", "launch.sh", "slurm.sh", "kubernetes.yaml")


@dataclass(frozen=True, eq=False)
class Contents:
    """What is written. sources: of the stages; pipeline: the text of pipeline.py. update: None for inference. weights: by
    table name, on the meta device where there are none. inputs: a global batch. ranks_per_node: of the cluster. facts: of
    program.json."""

    plan: Plan
    lowered: LoweredProgram
    sources: tuple[str, ...]
    pipeline: str
    update: UpdateRule | None
    seed: int
    weights: Mapping[str, torch.Tensor]
    inputs: Any
    ranks_per_node: int
    facts: Mapping[str, Any]


def write_directory(contents: Contents, directory: Path) -> Path:
    """Write everything; returns the directory. Raises EmitError when a part cannot be written."""
    update = update_entry(contents.update) if contents.update is not None else None
    directory.mkdir(parents=True, exist_ok=True)
    _write_plan(contents, directory)
    _write_runtime(contents, directory)
    manifest = {
        "world_size": contents.plan.ranks,
        "pipeline": "pipeline.py",
        "training": contents.update is not None,
        "update": update,
        "seed": contents.seed,
        "weights": _write_weights(contents.weights, directory),
        "inputs": _inputs(contents.inputs),
        "placement": list(contents.plan.placement) or None,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (directory / "program.json").write_text(json.dumps(contents.facts, indent=1) + "\n")
    _write_launchers(contents.plan.ranks, contents.ranks_per_node, directory)
    return directory


def _write_plan(contents: Contents, directory: Path) -> None:
    """plan.json, pipeline.py, and the files of stages and ranks."""
    contents.plan.save(directory / "plan.json")
    (directory / "pipeline.py").write_text(contents.pipeline)
    for name in ("stages", "ranks", "weights"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("stages", "ranks"):
        (directory / name).mkdir()
    for i, source in enumerate(contents.sources):
        (directory / "stages" / f"stage_{i}.py").write_text(source)
    for rank, place in _places(contents.lowered):
        if rank < MOST_RANK_FILES:
            (directory / "ranks" / f"rank_{rank}.py").write_text(render("rank.py.j2", rank=rank, **place))


def _write_runtime(contents: Contents, directory: Path) -> None:
    """What the files import: the runtime, and the user's ops."""
    target = directory / "autopar_runtime"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(Path(inspect.getfile(runtime)).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "user_ops.py").unlink(missing_ok=True)
    names = used_ops(contents.lowered)
    if names:
        (directory / "user_ops.py").write_text(user_ops_source(names))


def _write_launchers(ranks: int, ranks_per_node: int, directory: Path) -> None:
    per_node = min(ranks_per_node, ranks)
    for name in LAUNCHERS:
        text = render(f"{name}.j2", ranks=ranks, nodes=max(ranks // per_node, 1), per_node=per_node)
        (directory / name).write_text(text)
    (directory / "launch.sh").chmod(0o755)


def _places(lowered: LoweredProgram) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every rank with its group, stages and mesh coordinates (per stage where there are several)."""
    for group, stages in enumerate(lowered.graph.groups):
        meshes = [lowered.stages[s].mesh for s in stages]
        for rank in range(meshes[0].offset, meshes[0].offset + meshes[0].size):
            coordinates = [{axis: mesh.coordinate(rank)[axis] for axis in mesh.names} for mesh in meshes]
            yield (
                rank,
                {
                    "group": group,
                    "stages": list(stages),
                    "coordinates": coordinates[0] if len(coordinates) == 1 else coordinates,
                },
            )


def update_entry(rule: UpdateRule) -> dict[str, Any] | None:
    """An update rule as plain data. Raises EmitError when a factory has no importable name."""
    if rule == UpdateRule():
        return None
    return {
        "optimizer": factory_entry(rule.optimizer, "optimizer", "torch.optim.AdamW, lr=…"),
        "scheduler": factory_entry(rule.scheduler, "scheduler", "torch.optim.lr_scheduler.StepLR, step_size=…"),
        "clip_norm": asdict(rule.clip_norm) if rule.clip_norm is not None else None,
        "clip_value": rule.clip_value,
        "loss_scaling": asdict(rule.loss_scaling) if rule.loss_scaling is not None else None,
        "compensated": rule.compensated,
    }


def factory_entry(factory: Any, what: str, example: str) -> dict[str, Any] | None:
    """Module, name and keyword arguments of a class or a function. Raises EmitError when it has no importable name."""
    if factory is None:
        return None
    kwargs: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            raise EmitError(f"the {what} factory has positional arguments; give them by keyword in functools.partial")
        kwargs = {**factory.keywords, **kwargs}
        factory = factory.func
    name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", None)
    if not name.isidentifier() or module in (None, "__main__"):
        raise EmitError(
            f"the {what} factory {name or factory} cannot be written to a program; use functools.partial({example}), or a "
            "class or function of a module that can be imported where the program runs"
        )
    try:
        json.dumps(kwargs)
    except TypeError as error:
        raise EmitError(
            f"an argument of the {what} cannot be written to a program ({error}); use plain numbers"
        ) from error
    return {"module": module, "name": name, "kwargs": kwargs}


def _write_weights(weights: Mapping[str, torch.Tensor], directory: Path) -> str | None:
    """The folder of the weights; None where the model has none."""
    if any(w.is_meta for w in weights.values()):
        return None
    from autopar.runtime.checkpoint import write_full  # takes as long to import as all of autopar

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_full(directory / "weights", {name: w.detach().cpu() for name, w in weights.items()})
    return "weights"


def _inputs(batch: Any) -> list[dict[str, Any]]:
    """Global-batch shape of every input, and for integers the largest safe random value."""
    leaves, names, _ = flatten(batch)
    rows = []
    for leaf, name in zip(leaves, names, strict=True):
        row: dict[str, Any] = {"name": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
        if not leaf.dtype.is_floating_point:
            has_values = leaf.device.type != "meta" and type(leaf) is torch.Tensor and leaf.numel()
            row["high"] = max(int(leaf.max()) + 1, 1) if has_values else 2
        rows.append(row)
    return rows
