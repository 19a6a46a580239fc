"""What `torchrun run.py` does: join the process group, load this rank's stages and its shard of the weights, train.

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
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .arguments import parser
from .batches import leaves, module_of, random_batches, user_batches
from .errors import RuntimeProgramError
from .flight import FLIGHT, Flight, end_process
from .heap import keep_freed_memory
from .inductor import keep_beside
from .leaving import Leaving
from .left_out import leave_out
from .manifest import Manifest
from .meeting import joined
from .metrics import Metrics, StepLine
from .ownership import Ownership, own_together
from .preflight.main import main as preflight
from .process import TorchComm
from .program_files import compare, hashes
from .recorder import Recorder
from .session import Session
from .spares import START_AGAIN, stand_by
from .tables import world_mesh
from .worlds import manifest_for, started_ranks

USAGE_ERROR = 2
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
        return leaves(batch, [str(row.get("name", i)) for i, row in enumerate(self.manifest.inputs)])

    @property
    def step(self) -> int:
        """Steps done so far, those of the checkpoint that was resumed included."""
        return self.session.rt.step

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.session.load_state_dict(state)

    def save(self, directory: str | Path) -> None:
        from . import checkpoint  # its import takes most of a second

        checkpoint.save(directory, self.session)

    def resume(self, directory: str | Path) -> None:
        from . import checkpoint  # its import takes most of a second

        checkpoint.load(directory, self.session)


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

    directory: or one of its manifests, where that is chosen. Joins the default process group, or makes it (nccl when there
    is a GPU per local rank, else gloo). Weights come from `weights`, a checkpoint or a Hugging Face directory of
    safetensors, else from those emitted with the program; without either they are uninitialized until load_state_dict or
    resume. tier_directory: for the files of what rests in the memory tier "nvme" (default: that of temporary files).
    compiler: "none" or "inductor", instead of what the program was compiled with. An optimizer that is not of torch.optim
    comes from a module that run.py or the calling script imports (manifest.py). met: where this round's workers have met already
    (`meeting.joined`). Raises RuntimeProgramError, and
    WrongWorldSize before any process group is made.
    """
    from .weights import load_weights  # its import takes most of a second

    if isinstance(directory, Manifest):
        manifest = directory
    elif dist.is_initialized():
        manifest = manifest_for(directory, dist.get_world_size(), "the process group has")
    else:
        manifest = manifest_for(directory, started_ranks())
    rule = manifest.update_rule()
    store = None if dist.is_initialized() else _join(backend or _pick_backend(), timeout_s, manifest, met)
    notes = store or dist.PrefixStore(f"autopar/{next(_LOADED)}", dist.distributed_c10d._get_default_store())
    seed = manifest.seed if seed is None else seed
    if dist.get_world_size() > 1:
        compare(notes, dist.get_rank(), dist.get_world_size(), hashes(manifest, seed), timeout_s)
    pipeline = manifest.load_pipeline()
    compiler = compiler or manifest.compiler
    if compiler != "none":
        keep_beside(manifest.directory)
    comm = TorchComm(world_mesh(pipeline), timeout_s=timeout_s, store=notes, check=check)
    if comm.device.type == "cpu":
        keep_freed_memory()

    session = Session(
        *with_stages(manifest.directory, manifest.directory, pipeline),
        comm,
        rule,
        seed,
        tier_directory=tier_directory,
        buckets=[with_stages(manifest.directory, folder, bucket) for folder, bucket in manifest.load_buckets()],
        pad=manifest.pad_values,
        compiler=compiler,
        cuda_graphs=manifest.cuda_graphs,
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
    """Import a stage file. It says `from autopar_runtime import …`, which is the package this module belongs to, and
    `import user_ops`, which lies in the program's home when the model has ops of its own."""
    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            sys.modules.setdefault("autopar_runtime" + name[len(package) :], module)
    own = home / "user_ops.py"
    if own.exists():
        module_of(own, "user_ops")
    return module_of(path, f"autopar_{path.stem}")


def main(directory: str | Path, argv: Sequence[str] | None = None) -> int:
    """The command line of run.py; its exit status. 2: wrong use (before any process group), 1: a rank failed."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.preflight:
            return preflight(directory, arguments.backend or _pick_backend(), arguments)
        manifest = manifest_for(directory, started_ranks(), spares=bool(arguments.run))
        manifest.update_rule()
    except RuntimeProgramError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    program: LoadedProgram | None = None
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
        _watch(program, arguments)
        if arguments.run:
            from .staying import Run

            assert program.store is not None
            status = Run(program, arguments, program.store, owner).train()
        else:
            run(program, arguments)
    except BaseException as error:
        _die(error, program, arguments.run)
    if program is not None and isinstance(program.session.comm, TorchComm):
        program.session.comm.flight.stop()
    dist.destroy_process_group()
    if owner is not None:
        owner.release()
    return status


def _watch(program: LoadedProgram, arguments: argparse.Namespace) -> None:
    """Name a rank that keeps the others waiting, and end."""
    comm = program.session.comm
    if arguments.hang and started_ranks() > 1 and program.store is not None and isinstance(comm, TorchComm):
        folder = Path(arguments.run or ".") / FLIGHT
        comm.flight.watch(program.store, folder, arguments.hang, arguments.timeout, end_process(comm.rank))


def run(program: LoadedProgram, arguments: argparse.Namespace) -> None:
    """Train (or infer) for `--steps` steps, rank 0 reporting. Raises RuntimeProgramError."""
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
    rank, first = session.comm.rank, session.rt.step
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
        print(f"{manifest.show()}, {session.comm.device.type}, steps {first + 1} to {first + arguments.steps}")
    metrics, line = Metrics(session, manifest, arguments), StepLine(first + arguments.steps)
    for step in range(first + 1, first + arguments.steps + 1):
        metrics.begin()
        start = time.perf_counter()
        batch = next(batches)
        result = program(batch)
        if rank == 0:
            loss = result.item() if session.training else None
            elapsed = time.perf_counter() - start
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


def _pick_backend() -> str:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return "nccl" if dist.is_nccl_available() and 0 < local <= torch.cuda.device_count() else "gloo"


def _join(backend: str, timeout_s: float, manifest: Manifest, met: tuple[dist.Store, int] | None) -> dist.Store:
    """Make the default process group, of the program's ranks alone."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    own, rank = met or joined(timeout_s)
    rank = manifest.placement[rank] if manifest.placement else rank
    groups, timeout = dist.PrefixStore("groups", own), timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=manifest.world_size, timeout=timeout)
    return dist.PrefixStore("notes", own)


def _die(error: BaseException, program: LoadedProgram | None, run: str | None) -> None:
    """Say what happened and end this process at once: joining the process group's threads could wait for others."""
    rank = os.environ.get("RANK", "0")
    if dist.is_initialized() and str(dist.get_rank()) != rank:
        rank += f" (rank {dist.get_rank()} of the program)"
    comm = program.session.comm if program is not None else None
    if run and dist.is_initialized():
        flight = comm.flight if isinstance(comm, TorchComm) else Flight(dist.get_rank(), dist.get_world_size())
        flight.write(Path(run) / FLIGHT, flight.failed(error))
    if isinstance(comm, TorchComm):
        comm.leave_note(f"failed with {type(error).__name__}: {error}")
    trace = "" if isinstance(error, RuntimeProgramError) else traceback.format_exc()
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"{trace}error on rank {rank}: {type(error).__name__}: {error}{notes}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
