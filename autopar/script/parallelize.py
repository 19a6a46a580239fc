"""`autopar.parallelize`: the door for training scripts.

    step = autopar.parallelize(model, "here", batch, loss_fn=…, optimizer=…)      every rank of torchrun, or plain Python
    loss = step(batch)

The first start compiles the program and keeps it (cache.py) under a fingerprint of all that it follows from (fingerprint.py);
one rank does so while the others wait (together.py). Every rank loads it as `autopar.load` does, with the script's own model as
its first weights and the script's own functions as its optimizer, and gets a `Step`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import request_of
from autopar.capture.before.unsupported_state import check_model
from autopar.capture.examples.buckets import Sizes
from autopar.capture.examples.default_device import with_cpu_as_default
from autopar.capture.examples.held import Held
from autopar.capture.examples.inputs import LossFunction
from autopar.cluster import ClusterSpec
from autopar.cluster.given import as_cluster
from autopar.cluster.here import HERE
from autopar.errors import InputError
from autopar.options import Entry, Options, checked_entries, with_suggestions
from autopar.plan import Plan
from autopar.request import checked_options
from autopar.runtime.data.schema import integer, listed
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.loaded import LoadedProgram, load
from autopar.runtime.step.entries import FIRST
from autopar.runtime.step.same_data import checksum, odd_ranks
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, OptimizerFactory, SchedulerFactory, UpdateRule
from autopar.script.fingerprint import fingerprint
from autopar.script.optimizers import factory_of, taking_over
from autopar.script.step import Step
from autopar.script.together import Ranks, leave_group_at_end, program_directory


@with_suggestions
@with_cpu_as_default
def parallelize(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | UpdateRule | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | None = None,
    clip_grad_norm: float | ClipNorm | None = None,
    clip_grad_value: float | None = None,
    loss_scaling: bool | LossScaling = False,
    options: Options | None = None,
    plan: Plan | str | Path | None = None,
    buckets: Sizes | None = None,
    pad_values: Mapping[str, float] | None = None,
    entries: Mapping[str, Entry] | None = None,
    weights: str | Path | None = None,
    backend: str | None = None,
    rows: str = "global",
    timeout_s: float = 600.0,
    compile_timeout_s: float = 3600.0,
) -> Step:
    """The training step of a model on the ranks that run this script, all of which call this with the same arguments.

    Arguments are those of `autopar.compile`; factories may be lambdas. optimizer: or one over the model's parameters, which
    has this rank's shards of them in its groups afterwards. cluster: "here", or a description of as many devices as
    there are ranks. The model's weights are the first ones: those of rank 0, where ranks made others. weights: a checkpoint or a
    directory of safetensors instead, which a model on the meta device needs. backend: "nccl" or "gloo", where the usual one is
    not meant. rows: "local", where each rank is given its own rows of every batch alone (`step.shard`). timeout_s: that ranks
    wait for each other, compile_timeout_s: for the one that compiles.

    Raises what `compile` raises, on every rank; InputError where ranks and cluster do not go together; RankError where ranks ask
    for different programs; LaunchError, CollectiveTimeout.
    """
    ranks = Ranks.meet(backend, timeout_s)
    described = ranks.cluster if cluster == HERE else as_cluster(cluster)
    if described.size != ranks.size:
        raise InputError(
            f"cluster {described.name} has {described.size} devices, and this script runs on {ranks.size} rank"
            f"{'s' if ranks.size > 1 else ''}; start it with torchrun --nproc-per-node {described.size} on one machine (see "
            'torchrun for several), or give cluster="here"'
        )
    entries = checked_entries(entries)
    held = Held(model, {name: entry.module for name, entry in entries.items() if entry.module is not None})
    of_steps = {FIRST: optimizer, **{name: entry.optimizer for name, entry in entries.items()}}
    made = {name: one for name, one in of_steps.items() if isinstance(one, torch.optim.Optimizer)}
    factories = {name: factory_of(one, held) for name, one in made.items()}
    request = request_of(
        model,
        described,
        example_inputs,
        loss_fn=loss_fn,
        optimizer=factories[FIRST] if isinstance(optimizer, torch.optim.Optimizer) else optimizer,
        scheduler=scheduler,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        loss_scaling=loss_scaling,
        options=replace(checked_options(options), idle_ranks=False),
        plan=plan,
        buckets=buckets,
        pad_values=pad_values,
        entries={name: _with_factory(entry, factories.get(name)) for name, entry in entries.items()},
    )
    on_meta = [name for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if on_meta and weights is None:
        raise InputError(
            f"the model is on the meta device ({on_meta[0]}), which holds no weights; give weights=, a checkpoint or a directory "
            "of safetensors"
        )
    for one in (request, *request.entries.values()):
        check_model(one.model, one.loss_fn)  # what wraps a model is named, before ranks compare what it holds
    with _same_random_numbers():
        directory = program_directory(request, fingerprint(request), ranks, compile_timeout_s)
    manifest = Manifest.read(directory)
    if manifest.idle:
        raise InputError(
            f"the plan leaves {manifest.idle} of {ranks.size} ranks without work, and every rank of a script takes part in its "
            "step; give a plan for all of them, or start fewer ranks"
        )
    if manifest.training and all(one is None for one in of_steps.values()):
        warnings.warn("there is no optimizer, so that no step trains anything; give optimizer=", stacklevel=4)
    if ranks.met is not None:
        leave_group_at_end()
    updates = {FIRST: request.update, **{name: entry.update for name, entry in request.entries.items()}}
    updates |= {name: replace(updates[name], optimizer=taking_over(one, held)) for name, one in made.items()}
    program = load(manifest, backend, weights=weights, rows=rows, timeout_s=timeout_s, met=ranks.met, updates=updates)
    if weights is None:
        _take_weights(program, request.tensors)
    return Step(program, model, directory)


def _with_factory(entry: Entry, factory: OptimizerFactory | None) -> Entry:
    """An entry with a factory in the place of an optimizer, whose parameters are what it trains where it does not say so."""
    if factory is None:
        return entry
    assert isinstance(entry.optimizer, torch.optim.Optimizer)
    own = [parameter for group in entry.optimizer.param_groups for parameter in group["params"]]
    return replace(entry, optimizer=factory, trains=own if entry.trains is None else entry.trains)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A context that leaves the script's random numbers alone: they are to be the same on ranks that compile and on others."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(before)


def _take_weights(program: LoadedProgram, held: Mapping[str, Tensor]) -> None:
    """Fill a program from tensors of modules in memory; what their forward captured beside these comes with the program."""
    tensors = {name: tensor.detach() for name, tensor in held.items()}
    manifest, session = program.manifest, program.session
    own = {name: tensors[name] for name in manifest.state_names if name in tensors}
    _agree(program, own)
    captured = [name for name in manifest.state_names if name not in own]
    if captured:
        from autopar.runtime.checkpoint.checkpoint import read_full  # its import takes most of a second

        if manifest.constants_folder is None:
            raise RuntimeProgramError(
                f"{', '.join(captured[:5])}: the program holds tensors that are no parameters or buffers of the model, and were "
                "on the meta device when it was compiled; make them buffers"
            )
        own |= read_full(manifest.constants_folder, captured, session.comm)
    session.load_weights(own)


@torch.no_grad()
def _agree(program: LoadedProgram, tensors: Mapping[str, Tensor]) -> None:
    """Give every rank the first one's tensors where they are not the same: ranks that make a model of random numbers without a
    seed each make another."""
    comm = program.session.comm
    if comm.world_size == 1:
        return
    sums = [checksum([tensor]) for tensor in tensors.values()]
    everyone = comm.share(sums, listed(integer(0, (1 << 32) - 1)))
    differing = [name for place, name in enumerate(tensors) if odd_ranks([one[place] for one in everyone])]
    for name in differing:
        first = comm.broadcast(tensors[name].to(comm.device), tuple(comm.mesh), site=f"{name} of rank 0")
        if comm.rank != 0:
            tensors[name].copy_(first)
