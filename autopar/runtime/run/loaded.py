"""An emitted program on this rank, as an object: what run.py trains, and what training loops of one's own call.

`load(directory)` joins the process group, imports the stages that `manifest.json` and `pipeline.py` give this rank, and reads its
shard of the weights.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..comm.backends import Backend, backend_named, backend_of, usual_backend
from ..comm.environment import LaunchError, machine_name, started
from ..comm.process import TorchComm
from ..compiled.inductor import keep_beside
from ..data.state_names import of_model, of_program
from ..errors import GuardError, RuntimeProgramError
from ..memory.heap import keep_freed_memory
from ..program.batches import BatchInput, Plain, leaves, module_of, own_leaves
from ..program.manifest import Manifest
from ..program.rows import DataShard, data_shards
from ..program.tables import Pipeline, world_mesh
from ..program.worlds import manifest_for, started_ranks
from ..step.entries import FIRST, EntryModules
from ..step.session import Session
from ..update.update_rule import UpdateRule
from .end_of_data import Leaving
from .meeting import default_store, joined
from .program_files import compare, hashes

_LOADED = itertools.count()
"""Programs that were loaded into a process group of the user's, which every rank does in the same order."""


class LoadedEntry:
    """A step of a program that was loaded: call it with a batch. own_rows: batches have this rank's rows alone, and not all of
    the global batch."""

    def __init__(
        self,
        session: Session,
        inputs: Sequence[BatchInput],
        name: str = FIRST,
        has_loss: bool = False,
        own_rows: bool = False,
        fixed: Mapping[str, Plain] | None = None,
    ) -> None:
        """inputs: of a batch; name: of the entry; has_loss: its outputs begin with its loss; fixed: what a batch has beside
        tensors, by name."""
        self.session = session
        self.own_rows = own_rows
        self._fixed = fixed or {}
        self._inputs, self._name, self._has_loss = inputs, name, has_loss

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One step on a batch: `step(x, y)`, `step((x, y))`, `step(input_ids=…)` or `step({…})`.

        Training: this step's loss, or (loss, extras), nested as loss_fn returned it, where there are any. Inference: the output,
        or the tuple of outputs. Another entry that does not train: the pair of its loss and of these (None where there is none).
        """
        return self.take(batch, named, self.own_rows)

    def local(self, *batch: Any, **named: Any) -> Any:
        """One step on a batch of which this rank has its own rows alone (`shard.indices`, in that order). What the rank does
        not take may be missing or None; all ranks call it for the same step."""
        return self.take(batch, named, True)

    def take(self, batch: tuple[Any, ...], named: Mapping[str, Any], own_rows: bool, update: bool = True) -> Any:
        """One step on a batch as a call's arguments. update: False adds its gradients to those of the next one instead."""
        tensors = self._leaves(_given(batch, named), own_rows)
        try:
            result = self.session.run_entry(self._name, tensors, own_rows=own_rows, update=update)
        except GuardError as error:
            if self._name != FIRST:
                error.add_note(
                    f"This is of the entry {self._name!r}, whose batches and buckets are its own: see autopar.Entry."
                )
            raise
        if isinstance(result, torch.Tensor):
            return result if self.session.extras is None else (result, self.session.extras)
        loss = result.pop(0) if self._has_loss else None
        outputs = (result[0] if len(result) == 1 else tuple(result)) if result else None
        return outputs if self._name == FIRST else (loss, outputs)

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch, in the order of the step's inputs; of own rows those that this rank takes. Raises
        RuntimeProgramError."""
        return self._leaves(batch, self.own_rows)

    def _leaves(self, batch: Any, own_rows: bool) -> list[torch.Tensor]:
        names = [str(i) if row.name is None else row.name for i, row in enumerate(self._inputs)]
        if not own_rows:
            return leaves(batch, names, self._fixed)
        taken = [names[i] for i in self.session.taking(True, self._name).taken]
        return own_leaves(batch, names, taken, self._fixed)

    @property
    def shard(self) -> DataShard:
        """The rows of every global batch that this rank computes with."""
        return self.local_rows(self.session.comm.rank)

    def local_rows(self, rank: int) -> DataShard:
        """The rows of every global batch that a rank of the program computes with. Raises RuntimeProgramError."""
        pipelines = [form.pipeline for form in self.session.entry(self._name).forms]
        return data_shards(pipelines[0], pipelines[1:])[rank]


class LoadedProgram(LoadedEntry):
    """An emitted program inside a torchrun process: call it with a batch for one step."""

    def __init__(
        self, manifest: Manifest, session: Session, store: dist.Store | None = None, own_rows: bool = False
    ) -> None:
        """store: of this round's workers, where this program made the process group."""
        super().__init__(session, manifest.inputs, own_rows=own_rows, fixed=manifest.fixed)
        self.manifest = manifest
        self.store = store

    def entry(self, name: str) -> LoadedEntry:
        """Another step over the same parameters, to be called between the program's own. Raises RuntimeProgramError where there
        is none so named."""
        self.session.entry(name)
        files = self.manifest.entries[name]
        return LoadedEntry(self.session, files.inputs, name, files.has_loss, fixed=files.fixed)

    def shapes(self, batch: Any) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the global batch that a batch is, or that it has rows of in the last step's form."""
        if self.own_rows:
            return [(torch.Size(like.shape), like.dtypes[0]) for like in self.session.last_inputs]
        return [(leaf.shape, leaf.dtype) for leaf in self.leaves(batch)]

    @property
    def step(self) -> int:
        """Steps done so far, those of the checkpoint that was resumed included."""
        return self.session.rt.step

    def state_dict(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Parameters and buffers of this rank's stages (DTensors, on several ranks) under every name that the model's own state
        dict has for them. optimizer: with step, optimizer state and buffers that are not persistent, which `load_state_dict`
        needs; False: with no other names than the model's."""
        state, names = self.session.state_dict(), self.manifest.state_names
        return of_model(state, names) | (state if optimizer else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict()`, for any plan. Raises CheckpointError where something is missing."""
        self.session.load_state_dict(of_program(state, self.manifest.state_names))

    def save(self, directory: str | Path) -> None:
        from ..checkpoint import checkpoint  # its import takes most of a second

        checkpoint.save(directory, self.session)

    def resume(self, directory: str | Path, *, checked: bool = False) -> None:
        """checked: the files were held against their record a moment ago, on all ranks."""
        from ..checkpoint import checkpoint  # its import takes most of a second

        checkpoint.load(directory, self.session, checked=checked)


def _given(batch: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The global batch that a call's arguments are. Raises RuntimeProgramError for arguments of both kinds."""
    if named and batch:
        raise RuntimeProgramError(
            f"a batch is given in order or by name, and this one has {len(batch)} in order and {', '.join(named)} by name; give "
            "all of it as the example inputs have it"
        )
    if named or (len(batch) == 1 and not isinstance(batch[0], torch.Tensor)):
        return named or batch[0]
    return batch


def load(
    directory: str | Path | Manifest,
    backend: str | None = None,
    *,
    weights: str | Path | None = None,
    seed: int | None = None,
    timeout_s: float = 600.0,
    check: bool = False,
    tier_directory: str | Path | None = None,
    compiler: str | None = None,
    rebalance: bool = False,
    rows: str = "global",
    met: tuple[dist.Store, int] | None = None,
    updates: Mapping[str, UpdateRule] | None = None,
) -> LoadedProgram:
    """The program of an emitted directory on this rank, its weights loaded: that for the number of ranks there are.

    directory: or one of its manifests, where that is chosen. Joins the default process group, or makes it (nccl where there
    are GPUs, else gloo). Weights come from `weights`, a checkpoint or a Hugging Face directory of
    safetensors, else from those emitted with the program; without either they are uninitialized until load_state_dict or
    resume. tier_directory: for the files of what rests in the memory tier "nvme" (default: that of temporary files).
    compiler: "auto", "none" or "inductor", instead of what the program was compiled with; rebalance: move rows to faster
    ranks, as Options(rebalance=True) says; rows: "global", where each rank is given all of every batch, or "local", where it
    is given its own rows alone (`LoadedProgram.shard`). An optimizer that is not of torch.optim
    comes from a module that run.py or the calling script imports (manifest.py). met: where this round's workers have met already
    (`meeting.joined`). updates: how parameters follow from gradients in each step ("": the program's own), instead of what the
    manifest names. Raises
    RuntimeProgramError, and WrongWorldSize before any process group is made.
    """
    if rows not in ("global", "local"):
        raise RuntimeProgramError(f"load: rows is 'global' or 'local', not {rows!r}")
    if isinstance(directory, Manifest):
        manifest = directory
    elif dist.is_initialized():
        manifest = manifest_for(directory, dist.get_world_size(), "the process group has")
    else:
        manifest = manifest_for(directory, started_ranks())
    rules = {name: manifest.update_rule(name) for name in (FIRST, *manifest.entries)} if updates is None else updates
    store, device = None, None
    if not dist.is_initialized():
        chosen = chosen_backend(backend)
        device = chosen.device(started().local_rank)
        store = _join(chosen, device, timeout_s, manifest, met)
    notes = store or dist.PrefixStore(f"autopar/{next(_LOADED)}", default_store())
    seed = manifest.seed if seed is None else seed
    if dist.get_world_size() > 1:
        compare(notes, dist.get_rank(), dist.get_world_size(), hashes(manifest, seed), timeout_s)
    pipeline = manifest.load_pipeline()
    options = replace(manifest.options, compiler=compiler) if compiler else manifest.options
    options = replace(options, rebalance=True) if rebalance else options
    comm = TorchComm(world_mesh(pipeline), device, timeout_s=timeout_s, store=notes, check=check)
    if backend_of(comm.device).is_host:
        keep_freed_memory()

    def of_entry(name: str) -> list[tuple[ModuleType, Callable[[int], ModuleType]]]:
        return [with_stages(manifest.directory, folder, form) for folder, form in manifest.load_forms(name)]

    session = Session(
        *with_stages(manifest.directory, manifest.directory, pipeline),
        comm,
        rules[FIRST],
        seed,
        tier_directory=tier_directory,
        buckets=of_entry(FIRST),
        pad=manifest.pad_values,
        entries={
            name: EntryModules(of_entry(name), files.pad_values, rules[name], files.averaging)
            for name, files in manifest.entries.items()
        },
        options=options,
        compare=True,
    )
    if session.pipeline.compiler != "none":
        keep_beside(manifest.directory)
    if session.same_data is not None:
        session.same_data.waiting = Leaving(dist.PrefixStore("leaving", notes), comm, session.same_data).waiting
    source = weights or manifest.weights_folder
    if source is not None:
        from ..checkpoint.weights import load_weights  # its import takes most of a second

        load_weights(source, session, manifest)
    return LoadedProgram(manifest, session, store, rows == "local")


def local_rows(directory: str | Path, ranks: int | None = None) -> tuple[DataShard, ...]:
    """The rows of every rank of an emitted program, without running it: of the one for so many ranks (default: those that it was
    compiled for). Raises RuntimeProgramError."""
    manifest = Manifest.read(directory) if ranks is None else manifest_for(directory, ranks)
    own = with_stages(manifest.directory, manifest.directory, manifest.load_pipeline())
    buckets = [with_stages(manifest.directory, folder, bucket) for folder, bucket in manifest.load_forms()]
    return data_shards(Pipeline(*own), [Pipeline(*bucket) for bucket in buckets])


def with_stages(home: Path, folder: Path, pipeline: ModuleType) -> tuple[ModuleType, Callable[[int], ModuleType]]:
    """A pipeline with what imports its stages, whose files lie in its folder. home: of the whole program."""
    return pipeline, lambda index: load_stage(folder / pipeline.STAGES[index]["file"], home)


def load_stage(path: Path, home: Path) -> ModuleType:
    """Import a stage file. It says `from autopar_runtime.kernels import …`, which is in the package this module belongs to, and
    `import user_ops`, which lies in the program's home when the model has ops of its own."""
    package = __name__.rsplit(".", 2)[0]
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            sys.modules.setdefault("autopar_runtime" + name[len(package) :], module)
    own = home / "user_ops.py"
    if own.exists():
        module_of(own, "user_ops")
    return module_of(path, f"autopar_{path.stem}")


def chosen_backend(name: str | None) -> Backend:
    """The kind of device to compute on: of the backend with this name, or the usual one. Raises LaunchError."""
    return usual_backend(started().local_ranks) if name is None else backend_named(name)


def _join(
    backend: Backend, device: torch.device, timeout_s: float, manifest: Manifest, met: tuple[dist.Store, int] | None
) -> dist.Store:
    """Make the default process group, of the program's ranks alone. Raises LaunchError."""
    backend.module.set_device(device)
    own, rank = met or joined(timeout_s)
    bus = backend.bus(device)
    if bus and own.add(f"device/{machine_name()}/{bus}", 1) > 1:
        raise LaunchError(
            f"rank {rank}: another rank of this machine has the same device, at {bus}; give every rank one of its own "
            "(torchrun: all the same CUDA_VISIBLE_DEVICES), and start at most a rank per device"
        )
    rank = manifest.placement[rank] if manifest.placement else rank
    transport = backend.transport
    groups, timeout = dist.PrefixStore("groups", own), timedelta(seconds=timeout_s + transport.patience_s)
    try:
        dist.init_process_group(
            transport.name, store=groups, rank=rank, world_size=manifest.world_size, timeout=timeout
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank}: the ranks met, but {transport.name} cannot join them: {str(error).splitlines()[0][:300]}; set "
            f"{transport.interface_variable} to the interface that joins the machines, and see run.py --preflight"
        ) from error
    return dist.PrefixStore("notes", own)
