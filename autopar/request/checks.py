"""Options held against a cluster, a batch, an optimizer and a plan that is replayed."""

from __future__ import annotations

from math import prod
from typing import Any

from autopar.capture.examples.inputs import batch_dim, check_batch_dims
from autopar.capture.examples.trees import flatten
from autopar.cluster import ClusterSpec
from autopar.cluster.device import dtype_name
from autopar.errors import InputError, PlanError
from autopar.ir.memory_levers import PRECISIONS
from autopar.options import Options
from autopar.plan import Plan
from autopar.runtime.gradients.compression import CODECS
from autopar.runtime.update.update_rule import UpdateRule


def checked_options(options: Options | None) -> Options:
    """The options, or the default ones. Raises InputError for anything else."""
    if options is not None and not isinstance(options, Options):
        raise InputError(f"options must be autopar.Options(…), not {type(options).__name__}")
    return options or Options()


def as_computed(cluster: ClusterSpec, options: Options) -> ClusterSpec:
    """A cluster whose devices compute as the options say."""
    return cluster.with_tf32() if options.matmul_precision != "highest" else cluster


def check_axes(options: Options, ranks: int) -> None:
    """Raises InputError where the ranks of a cluster do not divide by the sizes of axes that are asked for."""
    if options.axes is None:
        return
    wanted, stages = prod(options.axes.values()), options.pp or 1
    all_named = options.pp is not None and {"dp", "tp"} <= options.axes.keys()
    if ranks % wanted or ranks < wanted * stages or (all_named and ranks > wanted * stages):
        sizes = dict(options.axes) | ({"pp": stages} if stages > 1 else {})
        words = ", ".join(f"{axis}={n}" for axis, n in sizes.items())
        number = (
            f"{wanted * stages} ranks" if all_named else f"a multiple of {wanted} ranks, at least {wanted * stages}"
        )
        raise InputError(f"{words} takes {number}, the cluster has {ranks}; choose other sizes")


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


def check_compression(options: Options, update: UpdateRule, in_shapes: bool) -> None:
    """Raises InputError where what compression keeps for the next step would not fit that step's gradients.

    in_shapes: the program is of several shapes of batches.
    """
    compression = options.gradient_compression
    if compression is None or not CODECS[compression].feedback:
        return
    what = f"Options.gradient_compression={compression!r} keeps what it has not sent for the next step"
    if update.loss_scaling is not None:
        raise InputError(f"{what}, in units of a loss scale that moves; use 'bf16', or train without loss_scaling")
    if in_shapes:
        raise InputError(f"{what}, and programs of several shapes may reduce gradients in other ways; use 'bf16'")


def planned_compression(plan: Plan, options: Options) -> str | None:
    """How gradients travel in a plan that is replayed. Raises PlanError where the options ask for something else."""
    if options.gradient_compression not in (None, plan.gradient_compression):
        raise PlanError(
            f"this plan has gradient_compression={plan.gradient_compression!r}, Options ask for "
            f"{options.gradient_compression!r}; change gradient_compression in the plan, or compile without plan="
        )
    return plan.gradient_compression or None


def planned_precision(plan: Plan, options: Options) -> str | None:
    """The precision of a plan that is replayed. Raises PlanError where the options ask for another."""
    if options.precision not in (None, plan.precision):
        said = f"precision={plan.precision!r}" if plan.precision else "the model's own dtypes"
        raise PlanError(
            f"this plan is for {said}, Options ask for precision={options.precision!r}; leave Options.precision out, or "
            "compile without plan="
        )
    return plan.precision or None


def check_batch(options: Options, inputs: Any, ranks: int) -> None:
    """Raises InputError where the batch (of the first input) does not divide by microbatches, or has no row for some of the
    data-parallel ranks."""
    leaves, names, _ = flatten(inputs)
    if not leaves:
        raise InputError("example_inputs hold no tensor")
    check_batch_dims(options.batch_dims, leaves, names)
    dim = batch_dim(options.batch_dims, 0, names[0])
    if leaves[0].ndim == 0 or dim is None:
        return
    size, microbatches = leaves[0].shape[dim], options.microbatches or 1
    parts = options.least_data_parallel(ranks)
    batch = f"batch of {size} (input {names[0] or 0})"
    if size % microbatches:
        raise InputError(f"{batch} is not divisible by microbatches={microbatches}; choose a divisor of {size}")
    if size // microbatches < parts:
        times = f" times microbatches={microbatches}" if microbatches > 1 else ""
        sharing = "dp" if (options.mesh or options.axes or {}).get("ep", 1) == 1 else "dp × ep"
        raise InputError(f"{batch} has fewer rows than {sharing}={parts}{times}; use a larger batch, or another mesh")
