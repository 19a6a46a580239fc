"""What the arguments of `compile` must be, beyond their types: losses and their targets, batch dims, plans."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.cluster.device import dtype_name
from autopar.errors import InputError, PlanError
from autopar.ir.memory_levers import PRECISIONS
from autopar.ir.program import Program
from autopar.options import Options
from autopar.plan import Plan


def check_options(options: Any, plan: Any) -> None:
    """Raises InputError unless options are Options and the plan is a Plan or a path."""
    if not isinstance(options, Options):
        raise InputError(f"options must be autopar.Options(…), not {type(options).__name__}")
    if plan is not None and not isinstance(plan, (Plan, str, Path)):
        raise InputError(f"plan must be an autopar.Plan or the path of a plan.json, not {type(plan).__name__}")


def check_precision(precision: str | None, cluster: ClusterSpec) -> None:
    """Raises InputError where a device of the cluster has no arithmetic in the dtype that is asked for."""
    if precision is None:
        return
    devices = {device.name: device for _, device in cluster.devices}
    lacking = [name for name, device in devices.items() if not device.supports(precision)]
    if lacking:
        shared = [d for d in next(iter(devices.values())).peak_flops if all(x.supports(d) for x in devices.values())]
        usable = [p for p in PRECISIONS if dtype_name(p) in shared]
        instead = f"use Options(precision={usable[0]!r})" if usable else "leave Options.precision out"
        raise InputError(
            f"Options.precision={precision!r}: {', '.join(lacking)} has no {dtype_name(precision)} arithmetic; every device of "
            f"this cluster has {', '.join(shared) or 'no dtype in common'}; {instead}, or leave {', '.join(lacking)} out"
        )


def planned_precision(plan: Plan, options: Options) -> str | None:
    """The precision of a plan that is replayed. Raises PlanError where the options ask for another."""
    if options.precision not in (None, plan.precision):
        said = f"precision={plan.precision!r}" if plan.precision else "the model's own dtypes"
        raise PlanError(
            f"this plan is for {said}, Options ask for precision={options.precision!r}; leave Options.precision out, or "
            "compile without plan="
        )
    return plan.precision or None


def most_targets(loss_fn: Any) -> int:
    """Targets the loss may take: optional arguments of torch's own losses (weight, reduction, …) are no targets."""
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return 1
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 30
    own = str(getattr(target, "__module__", "")).split(".")[0] != "torch"
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return max(sum(own or p.default is p.empty for p in places) - 1, 0)


def check_batch_dims(given: Any, leaves: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises InputError where `Options.batch_dims` names an input, or a dim, that does not exist."""
    if isinstance(given, dict) and (unknown := given.keys() - set(names)):
        raise InputError(
            f"Options.batch_dims names {', '.join(map(repr, sorted(unknown)))}; inputs are {', '.join(names)}"
        )
    if isinstance(given, (list, tuple)) and len(given) > len(leaves):
        raise InputError(f"Options.batch_dims has {len(given)} entries for {len(leaves)} inputs")
    rows = enumerate(zip(leaves, names, strict=True))
    for leaf, name, dim in (
        (x, n, given.get(n) if isinstance(given, dict) else given[i] if i < len(given or ()) else None)
        for i, (x, n) in rows
    ):
        if dim is not None and not 0 <= dim < leaf.ndim:
            raise InputError(f"Options.batch_dims says dim {dim} of input {name}, whose shape is {tuple(leaf.shape)}")


def check_plan(plan: Plan, program: Program) -> None:
    """Raises PlanError where stages, calls and parameters of a plan for `program` do not add up."""
    ranks = sum(size for _, size in {(s.mesh.offset, s.mesh.size) for s in plan.stages})
    if ranks != plan.ranks:
        raise PlanError(f"the plan is corrupt: its meshes have {ranks} ranks in all, it says {plan.ranks}")
    if [c for s in plan.stages for c in range(*s.calls)] != list(range(len(program.calls))):
        held = ", ".join(f"{first} to {last}" for first, last in (s.calls for s in plan.stages))
        raise PlanError(
            f"the plan is corrupt: its stages hold calls {held}; in order they must hold each of the program's "
            f"{len(program.calls)} once"
        )
    for stage in plan.stages:
        for name, p in stage.parameters.items():
            coarser = [
                fine[: len(whole)] != whole for fine, whole in zip(p.optimizer.dims, p.storage.dims, strict=False)
            ]
            if any(coarser) or len(p.optimizer.dims) != len(p.storage.dims):
                raise PlanError(
                    f"parameter {name}: the optimizer state {p.optimizer.show()} must be sharded at least like the stored "
                    f"parameter {p.storage.show()}, over the same axes first"
                )
