"""The emitted directory: files out.

    plan.json            the plan, replayable and hand-editable
    program.json         facts for `autopar-dump` (mesh, collectives, storage, predictions)
    manifest.json        what run.py needs to know
    stages/stage_0.py    the code; ranks that are alike share it
    ranks/rank_0.py …    one short file per rank: its coordinates and its stage
    autopar_runtime/     the small runtime, torch only
    run.py               torchrun entry; launch.sh, slurm.sh and kubernetes.yaml start it on machines
    weights/             the model's weights, where it has any (torch.distributed.checkpoint)
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from autopar import runtime
from autopar.codegen.stage import render
from autopar.errors import EmitError
from autopar.ops.custom import USER_FUNCTIONS


def write_directory(program: Any, directory: Path) -> Path:
    """Write everything; returns the directory. Raises EmitError when a part cannot be written."""
    optimizer = optimizer_entry(program.optimizer) if program.training else None
    directory.mkdir(parents=True, exist_ok=True)
    program.plan.save(directory / "plan.json")
    for name in ("stages", "ranks", "weights"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "user_ops.py").unlink(missing_ok=True)
    for name in ("stages", "ranks"):
        (directory / name).mkdir()
    for i, source in enumerate(program.sources):
        (directory / "stages" / f"stage_{i}.py").write_text(source)
    for rank in range(min(program.plan.ranks, 1024)):
        mesh = program.plan.stages[program.stage_of(rank)].mesh
        where = mesh.coordinate(rank)
        (directory / "ranks" / f"rank_{rank}.py").write_text(
            render("rank.py.j2", rank=rank, stage=program.stage_of(rank), coordinates={a: where[a] for a in mesh.names})
        )
    home = Path(inspect.getfile(runtime)).parent
    target = directory / "autopar_runtime"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home, target, ignore=shutil.ignore_patterns("__pycache__"))
    own = user_ops_source(program)
    if own is not None:
        (directory / "user_ops.py").write_text(own[0])
    weights = _weights(program, directory)
    stages = [f"stages/stage_{i}.py" for i in range(len(program.sources))]
    manifest = {
        "world_size": program.plan.ranks, "mesh": program.mesh, "stages": stages,
        "stage_of_rank": [program.stage_of(r) for r in range(program.plan.ranks)], "training": program.training,
        "optimizer": optimizer, "seed": program.options.seed, "weights": weights,
        "microbatches": program.plan.microbatches, "inputs": _inputs(program),
    }  # fmt: skip
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


def optimizer_entry(factory: Any) -> dict[str, Any] | None:
    """Module, name and keyword arguments of an optimizer factory. Raises EmitError when it has no importable name."""
    if factory is None:
        return None
    kwargs: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            raise EmitError("the optimizer factory has positional arguments; give them by keyword in functools.partial")
        kwargs = {**factory.keywords, **kwargs}
        factory = factory.func
    if not inspect.isclass(factory) or factory.__module__ == "__main__":
        raise EmitError(
            f"the optimizer factory {getattr(factory, '__qualname__', factory)} cannot be written to a program; use "
            "functools.partial(torch.optim.AdamW, lr=…) or another importable optimizer class"
        )
    try:
        json.dumps(kwargs)
    except TypeError as error:
        raise EmitError(f"an argument of the optimizer cannot be written to a program ({error}); use plain numbers") from error
    return {"module": factory.__module__, "name": factory.__qualname__, "kwargs": kwargs}


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


def user_ops_source(program: Any) -> tuple[str, types.ModuleType] | None:
    """Source of the user's registered ops that a program uses, and the same as a module."""
    used = {
        line.op.split(".")[1]
        for stage in program.stages
        for template in stage.templates.values()
        for function in (template.forward, template.backward)
        if function is not None
        for line in function.lines
        if line.op.startswith("autopar_ops.")
    }
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


def facts(program: Any) -> dict[str, Any]:
    """What `autopar-dump` shows, as plain data."""
    stage = program.stages[0]
    return {
        "autopar_program": 1, "torch": torch.__version__, "python": sys.version.split()[0], "training": program.training,
        "mesh": program.mesh, "ranks": program.plan.ranks, "origin": program.plan.origin, "solver": program.solver,
        "predicted": program.plan.predicted, "timings": program.timings,
        "memory": program.account.resting_bytes, "peak_bytes": program.account.peak_bytes,
        "alternatives": [{"name": a.name, "step_time_s": a.predicted.step_time_s, "peak_bytes": a.predicted.peak_bytes}
                         for a in program.alternatives],
        "microbatches": program.plan.microbatches, "model": type(program.model).__name__, "cluster": program.cluster.name,
        "inputs": {n: s.show(t) for n, t, s in stage.inputs}, "outputs": {n: s.show(t) for n, t, s in stage.outputs},
        "calls": [{"template": c.template, "path": c.path} for c in program.ir.calls],
        "templates": {
            name: {
                "arguments": {n: s.show(y) for n, (y, s) in t.forward.arg_types.items()},
                "results": [n for n in t.forward.returns if n], "saved": list(t.saved),
                "forward": [_line(line) for line in t.forward.lines],
                "backward_arguments": {n: s.show(y) for n, (y, s) in _arguments(t.backward)},
                "backward_results": [n for n in t.backward.returns if n] if t.backward is not None else [],
                "backward": [_line(line) for line in t.backward.lines] if t.backward is not None else [],
            }
            for name, t in stage.templates.items()
        },
        "step": [_line(line) for line in stage.step.lines],
        "collectives": [vars(c) for c in program.account.collectives],
        "parameters": {
            p.name: {"stored": p.storage.show(p.type), "gradient_and_optimizer": p.optimizer.show(p.type),
                     "trained": p.contributions > 0, "local_bytes": p.storage.local_bytes(p.type, stage.mesh),
                     "reduction": [list(step) for step in p.reduce]}
            for p in stage.parameters.values()
        },
    }  # fmt: skip


def _arguments(function: Any) -> list[tuple[str, Any]]:
    return [(n, function.arg_types[n]) for n in function.args] if function is not None else []


def _line(line: Any) -> dict[str, Any]:
    shown = [s.show(t) if t is not None and s is not None else "" for t, s in zip(line.types, line.specs, strict=False)]
    return {"out": list(line.outs), "op": line.op, "reads": list(line.reads()), "specs": shown, "phase": line.phase,
            "source": line.source, "axis": line.args[1] if line.op.startswith("comm.") else None}  # fmt: skip
