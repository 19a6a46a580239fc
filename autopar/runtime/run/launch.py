"""The run of `torchrun run.py`: join the process group, load this rank's stages and its shard of the weights, train.

    torchrun --nproc-per-node 4 out/run.py --steps 100 --data my_data.py:batches --save checkpoints

`manifest.json` in the emitted directory says how many ranks there are and where the pipeline is, `pipeline.py` which
stage files each of them runs. `load(directory)` gives the same program as an object for training loops of one's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from ..comm.recorder import Recorder
from ..compiled.inductor import keep_beside
from ..data.state_names import of_model, of_program
from ..errors import RuntimeProgramError
from ..health.flight import FLIGHT, Flight, end_process, say
from ..health.launcher import launcher
from ..health.watch import Watch
from ..memory.heap import keep_freed_memory
from ..preflight.main import main as preflight
from ..program.arguments import parser
from ..program.batches import leaves, module_of, random_batches, user_batches
from ..program.manifest import Manifest
from ..program.tables import world_mesh
from ..program.worlds import manifest_for, started_ranks
from ..step.session import Session
from .end_of_data import Leaving
from .excluded_nodes import leave_out
from .meeting import joined
from .metrics import Metrics, StepLine
from .ownership import Ownership, own_together
from .patient_streams import make_patient
from .program_files import compare, hashes
from .spares import START_AGAIN, stand_by

USAGE_ERROR = 2
NO_DATA = "no --data: every batch is random numbers, which is good for trying the program out and for nothing else"
_LOADED = itertools.count()
"""Programs that were loaded into a process group of the user's, which every rank does in the same order."""


class LoadedProgram:
    """An emitted program inside a torchrun process: call it with a global batch for one step."""

    def __init__(self, manifest: Manifest, session: Session, store: dist.Store | None = None) -> None:
        """store: of this round's workers, where this program made the process group."""
        self.manifest = manifest
        self.session = session
        self.store = store

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One step on a global batch: `program(x, y)`, `program((x, y))`, `program(input_ids=…)` or `program({…})`.

        Training: this step's loss. Inference: the output, or the tuple of outputs.
        """
        global_batch: Any = batch
        if named or (len(batch) == 1 and not isinstance(batch[0], torch.Tensor)):
            global_batch = named or batch[0]
        tensors = self.leaves(global_batch)
        if self.session.training:
            return self.session.train_step(tensors)
        outputs = self.session.forward(tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a global batch, in the order of the program's inputs. Raises RuntimeProgramError."""
        return leaves(batch, [str(i) if row.name is None else row.name for i, row in enumerate(self.manifest.inputs)])

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
    met: tuple[dist.Store, int] | None = None,
) -> LoadedProgram:
    """The program of an emitted directory on this rank, its weights loaded: that for the number of ranks there are.

    directory: or one of its manifests, where that is chosen. Joins the default process group, or makes it (nccl where there
    are GPUs, else gloo). Weights come from `weights`, a checkpoint or a Hugging Face directory of
    safetensors, else from those emitted with the program; without either they are uninitialized until load_state_dict or
    resume. tier_directory: for the files of what rests in the memory tier "nvme" (default: that of temporary files).
    compiler: "none" or "inductor", instead of what the program was compiled with. An optimizer that is not of torch.optim
    comes from a module that run.py or the calling script imports (manifest.py). met: where this round's workers have met already
    (`meeting.joined`). Raises RuntimeProgramError, and
    WrongWorldSize before any process group is made.
    """
    from ..checkpoint.weights import load_weights  # its import takes most of a second

    if isinstance(directory, Manifest):
        manifest = directory
    elif dist.is_initialized():
        manifest = manifest_for(directory, dist.get_world_size(), "the process group has")
    else:
        manifest = manifest_for(directory, started_ranks())
    rule = manifest.update_rule()
    store, device = None, None
    if not dist.is_initialized():
        chosen = _backend(backend)
        device = chosen.device(started().local_rank)
        store = _join(chosen, device, timeout_s, manifest, met)
    notes = store or dist.PrefixStore(f"autopar/{next(_LOADED)}", dist.distributed_c10d._get_default_store())
    seed = manifest.seed if seed is None else seed
    if dist.get_world_size() > 1:
        compare(notes, dist.get_rank(), dist.get_world_size(), hashes(manifest, seed), timeout_s)
    pipeline = manifest.load_pipeline()
    options = replace(manifest.options, compiler=compiler) if compiler else manifest.options
    if options.compiler != "none":
        keep_beside(manifest.directory)
    comm = TorchComm(world_mesh(pipeline), device, timeout_s=timeout_s, store=notes, check=check)
    if backend_of(comm.device).is_host:
        keep_freed_memory()

    session = Session(
        *with_stages(manifest.directory, manifest.directory, pipeline),
        comm,
        rule,
        seed,
        tier_directory=tier_directory,
        buckets=[with_stages(manifest.directory, folder, bucket) for folder, bucket in manifest.load_buckets()],
        pad=manifest.pad_values,
        options=options,
        compare=True,
    )
    if session.same_data is not None:
        session.same_data.waiting = Leaving(dist.PrefixStore("leaving", notes), comm, session.same_data).waiting
    source = weights or manifest.weights_folder
    if source is not None:
        load_weights(source, session, manifest)
    return LoadedProgram(manifest, session, store)


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


def main(directory: str | Path, argv: Sequence[str] | None = None) -> int:
    """The command line of run.py; its exit status. 2: wrong use (before any process group), 1: a rank failed."""
    make_patient()
    arguments = parser().parse_args(argv)
    if (torchrun := launcher()) is not None:
        torchrun.watch()
    try:
        if arguments.preflight:
            return preflight(directory, _backend(arguments.backend).transport.name, arguments)
        manifest = manifest_for(directory, started_ranks(), spares=bool(arguments.run))
        manifest.update_rule()
    except RuntimeProgramError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    program: LoadedProgram | None = None
    watch: Watch | None = None
    owner: Ownership | None = None
    status = 0
    try:
        met = joined(arguments.timeout) if arguments.run else None
        if met is not None:
            store, rank = met
            owns = rank == (manifest.placement.index(0) if manifest.placement else 0)
            owner = own_together(Path(arguments.run), store, owns, end_process(rank), arguments.timeout)
            if leave_out(store, rank, arguments, min((manifest.world_size, *manifest.worlds))):
                return START_AGAIN
            if rank >= manifest.world_size:
                return stand_by(dist.PrefixStore("notes", store), manifest, rank, arguments.hang, arguments.timeout)
        program = load(
            manifest,
            arguments.backend,
            weights=arguments.weights,
            seed=arguments.seed,
            timeout_s=arguments.timeout,
            check=arguments.check,
            tier_directory=arguments.tier_directory,
            compiler=arguments.compiler,
            met=met,
        )
        watch = _watch(program, arguments)
        if not arguments.data and program.session.comm.rank == 0:
            print(NO_DATA, flush=True)
        if arguments.run:
            from .train_loop import Run

            assert program.store is not None
            status = Run(program, arguments, program.store, owner).train()
        else:
            run(program, arguments)
    except BaseException as error:
        _die(error, program, arguments.run)
    if watch is not None:
        watch.stop()
    dist.destroy_process_group()
    if owner is not None:
        owner.release()
    return status


def _watch(program: LoadedProgram, arguments: argparse.Namespace) -> Watch | None:
    """Name a rank that keeps the others waiting, and end."""
    comm = program.session.comm
    if not arguments.hang or started_ranks() == 1 or program.store is None or not isinstance(comm, TorchComm):
        return None
    folder = Path(arguments.run or ".") / FLIGHT
    watch = Watch(comm.flight, folder, arguments.hang, arguments.timeout, end_process(comm.rank))
    watch.start(program.store)
    return watch


def run(program: LoadedProgram, arguments: argparse.Namespace) -> None:
    """Train to step `--steps` (or infer so many batches), rank 0 reporting. Raises RuntimeProgramError."""
    if arguments.save and Path(arguments.save).exists() and not Path(arguments.save).is_dir():
        raise RuntimeProgramError(f"--save {arguments.save}: this is a file; give the name of a directory")
    session, manifest = program.session, program.manifest
    if not (arguments.resume or arguments.weights or manifest.weights):
        raise RuntimeProgramError(
            "this program has no weights (its model was on the meta device when it was compiled); give --weights "
            "DIRECTORY, of torch.distributed.checkpoint (full or sharded tensors) or of safetensors, or --resume CHECKPOINT"
        )
    if arguments.resume:
        program.resume(arguments.resume)
    rank, first, last = session.comm.rank, session.rt.step, arguments.steps
    if last < first:
        raise RuntimeProgramError(
            f"--resume {arguments.resume} is of step {first}, and --steps {last} are those of the whole run; give more than "
            f"{first}"
        )
    if arguments.data:
        batches: Iterator[Any] = user_batches(arguments.data, first)
    else:
        seed = manifest.seed if arguments.seed is None else arguments.seed
        batches = random_batches(manifest.inputs, seed, first)
    folder = Path(arguments.profile) if arguments.profile else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        session.recorder = Recorder(session.comm.device)
    if rank == 0:
        print(f"{manifest.show()}, {session.comm.device.type}, steps {first + 1} to {last}")
    metrics, line = Metrics(session, manifest, arguments), StepLine(last)
    for step in range(first + 1, last + 1):
        metrics.begin()
        start = time.perf_counter()
        batch = next(batches)
        result = program(batch)
        if rank == 0:
            loss = result.item() if session.training else None
            elapsed = time.perf_counter() - start
            with session.comm.excused(f"reporting step {step}"):
                line.show(step, "done" if loss is None else f"loss {loss:.6f}", elapsed)
                metrics.step(step, loss, elapsed, program.leaves(batch))
        if arguments.save and arguments.save_every and step % arguments.save_every == 0:
            start = time.perf_counter()
            program.save(arguments.save)
            metrics.saved(time.perf_counter() - start)
    session.settle("ending the run")
    if arguments.save:
        program.save(arguments.save)
        if rank == 0:
            print(f"saved {arguments.save}", flush=True)
    if folder is not None and session.recorder is not None:
        (folder / f"rank_{rank}.json").write_text(json.dumps(session.recorder.as_data(rank)), encoding="utf-8")
        if rank == 0:
            print(f"recorded {folder}; autopar-dump {manifest.directory} --profile {folder}", flush=True)


def _backend(name: str | None) -> Backend:
    """The kind of device to compute on. Raises LaunchError."""
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
    groups, timeout = dist.PrefixStore("groups", own), timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            backend.transport.name, store=groups, rank=rank, world_size=manifest.world_size, timeout=timeout
        )
    except RuntimeError as error:
        transport = backend.transport
        raise LaunchError(
            f"rank {rank}: the ranks met, but {transport.name} cannot join them: {str(error).splitlines()[0][:300]}; set "
            f"{transport.interface_variable} to the interface that joins the machines, and see run.py --preflight"
        ) from error
    return dist.PrefixStore("notes", own)


def _die(error: BaseException, program: LoadedProgram | None, run: str | None) -> None:
    """Say what happened and end this process at once: joining the process group's threads could wait for others."""
    of_store, torchrun = isinstance(error, dist.DistNetworkError), launcher()
    known = of_store or isinstance(error, RuntimeProgramError)
    if known and torchrun is not None and not torchrun.saves_s:
        if torchrun.is_going() if of_store else torchrun.gone:
            torchrun.say_gone()  # and not what follows from it
            os._exit(1)
    rank = os.environ.get("RANK", "0")
    if dist.is_initialized() and str(dist.get_rank()) != rank:
        rank += f" (rank {dist.get_rank()} of the program)"
    comm = program.session.comm if program is not None else None
    if run and dist.is_initialized():
        flight = comm.flight if isinstance(comm, TorchComm) else Flight(dist.get_rank(), dist.get_world_size())
        flight.write(Path(run) / FLIGHT, flight.failed(error))
    if isinstance(comm, TorchComm):
        comm.leave_note(f"failed with {type(error).__name__}: {error}")
    trace = "" if known else traceback.format_exc()
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    said = f"{type(error).__name__}: {error}"
    if of_store:
        first = str(error).splitlines()[0]
        said = f"the job's store, of torchrun or rank 0, is gone, or the link to it is ({first})"
    say(f"{trace}error on rank {rank}: {said}{notes}")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
