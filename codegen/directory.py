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
import textwrap
import types
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autopar import runtime
from autopar.codegen.facts import facts
from autopar.codegen.stage import registered_ops, render
from autopar.errors import EmitError
from autopar.ir.lowered import LoweredProgram
from autopar.ops.custom import USER_FUNCTIONS
from autopar.runtime.update_rule import UpdateRule


def write_directory(program: Any, directory: Path) -> Path:
    """Write everything; returns the directory. Raises EmitError when a part cannot be written."""
    update = update_entry(program.update) if program.training else None
    directory.mkdir(parents=True, exist_ok=True)
    program.plan.save(directory / "plan.json")
    for name in ("stages", "ranks", "weights"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "user_ops.py").unlink(missing_ok=True)
    for name in ("stages", "ranks"):
        (directory / name).mkdir()
    for i, source in enumerate(program.sources):
        (directory / "stages" / f"stage_{i}.py").write_text(source)
    (directory / "pipeline.py").write_text(program.pipeline)
    for rank in range(min(program.plan.ranks, 1024)):
        (directory / "ranks" / f"rank_{rank}.py").write_text(render("rank.py.j2", rank=rank, **_place(program, rank)))
    home = Path(inspect.getfile(runtime)).parent
    target = directory / "autopar_runtime"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home, target, ignore=shutil.ignore_patterns("__pycache__"))
    own = user_ops_source(program)
    if own is not None:
        (directory / "user_ops.py").write_text(own[0])
    weights = _weights(program, directory)
    manifest = {
        "world_size": program.plan.ranks,
        "pipeline": "pipeline.py",
        "training": program.training,
        "update": update,
        "seed": program.options.seed,
        "weights": weights,
        "inputs": _inputs(program),
        "placement": list(program.plan.placement) or None,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (directory / "program.json").write_text(json.dumps(facts(program), indent=1) + "\n")
    ranks = program.plan.ranks
    per_node = program.cluster.levels[0].group_size if program.cluster.levels else ranks
    per_node = min(per_node, ranks)
    for name in ("run.py", "launch.sh", "slurm.sh", "kubernetes.yaml"):
        text = render(f"{name}.j2", ranks=ranks, nodes=max(ranks // per_node, 1), per_node=per_node)
        (directory / name).write_text(text)
    (directory / "launch.sh").chmod(0o755)
    return directory


def _place(program: Any, rank: int) -> dict[str, Any]:
    """Group, stages and mesh coordinates (per stage where there are several) of a rank."""
    group = program.group_of(rank)
    stages = program.lowered.graph.groups[group]
    where = [program.plan.stages[s].mesh.coordinate(rank) for s in stages]
    named = [{a: w[a] for a in program.plan.stages[s].mesh.names} for s, w in zip(stages, where, strict=True)]
    return {"group": group, "stages": list(stages), "coordinates": named[0] if len(named) == 1 else named}


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


def _weights(program: Any, directory: Path) -> str | None:
    weights = program.weights()
    if any(w.is_meta for w in weights.values()):
        return None
    from autopar.runtime.checkpoint import write_full

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_full(directory / "weights", {name: w.detach().cpu() for name, w in weights.items()})
    return "weights"


def _inputs(program: Any) -> list[dict[str, Any]]:
    """Global-batch shape of every input, and for integers the largest safe random value."""
    from autopar.capture.trees import flatten

    leaves, names, _ = flatten(program.example_inputs)
    rows = []
    for leaf, name in zip(leaves, names, strict=True):
        row: dict[str, Any] = {"name": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
        if not leaf.dtype.is_floating_point:
            known = leaf.device.type != "meta" and type(leaf) is torch.Tensor and leaf.numel()
            row["high"] = max(int(leaf.max()) + 1, 1) if known else 2
        rows.append(row)
    return rows


def user_ops_source(program: Any, lowered: LoweredProgram | None = None) -> tuple[str, types.ModuleType] | None:
    """Source of the user's registered ops that a program uses, and the same as a module."""
    used = frozenset[str]().union(*map(registered_ops, (lowered or program.lowered).stages))
    if not used:
        return None
    module = types.ModuleType("user_ops")
    parts = ["import math", "", "import torch", "import torch.nn.functional as F", "from torch import Tensor", ""]
    for name in sorted(used):
        entry = USER_FUNCTIONS[name]
        setattr(module, name, entry.function)
        parts.append(entry.source if entry.source else _source(entry.function, name))
    return "\n".join(parts) + "\n", module


def _source(function: Any, name: str) -> str:
    try:
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    except (OSError, TypeError) as error:
        raise EmitError(f"the source of the registered op {name} is not available; define it in a file") from error
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    return "\n\n" + "\n".join(lines[start:])
