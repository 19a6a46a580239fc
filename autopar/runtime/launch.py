"""What `torchrun run.py` does: join the process group, load this rank's stages and its shard of the weights, train.

    torchrun --nproc-per-node 4 out/run.py --steps 100 --data my_data.py:batches --save checkpoints

`manifest.json` in the emitted directory says how many ranks there are and where the pipeline is, `pipeline.py` which
stage files each of them runs. `load(directory)` gives the same program as an object for training loops of one's own.
"""

from __future__ import annotations

import argparse
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
from .flight import FLIGHT, end_process, set_aside
from .heap import keep_freed_memory
from .inductor import keep_beside
from .manifest import Manifest, WrongWorldSize
from .meeting import meet
from .process import TorchComm
from .recorder import Recorder
from .session import Session
from .tables import world_mesh

USAGE_ERROR = 2


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
        tensors = leaves(global_batch, [str(row.get("name", i)) for i, row in enumerate(self.manifest.inputs)])
        if self.session.training:
            return self.session.train_step(tensors)
        outputs = self.session.forward(tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

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
    directory: str | Path,
    backend: str | None = None,
    *,
    weights: str | Path | None = None,
    seed: int | None = None,
    timeout_s: float = 600.0,
    check: bool = False,
    tier_directory: str | Path | None = None,
    compiler: str | None = None,
) -> LoadedProgram:
    """The program of an emitted directory on this rank, its weights loaded.

    Joins the default process group, or makes it (nccl when there is a GPU per local rank, else gloo). Weights come
    from `weights`, a checkpoint or a Hugging Face directory of safetensors, else from those emitted with the program;
    without either they are uninitialized until load_state_dict or resume. tier_directory: for the files of what rests in
    the memory tier "nvme" (default: that of temporary files). compiler: "none" or "inductor", instead of what the program was
    compiled with. An optimizer that is not of torch.optim comes from a module
    that run.py or the calling script imports (manifest.py). Raises RuntimeProgramError, and WrongWorldSize before any
    process group is made.
    """
    from .weights import load_weights  # its import takes most of a second

    manifest = Manifest.read(directory)
    rule = manifest.update_rule()
    if dist.is_initialized():
        store = None
        if dist.get_world_size() != manifest.world_size:
            raise WrongWorldSize(
                f"this program was compiled for {manifest.world_size} ranks ({manifest.show()}), "
                f"the process group has {dist.get_world_size()}"
            )
    else:
        manifest.check_world_size()
        store = _join(backend or _pick_backend(), timeout_s, manifest.placement)
    pipeline = manifest.load_pipeline()
    compiler = compiler or manifest.compiler
    if compiler != "none":
        keep_beside(manifest.directory)
    comm = TorchComm(world_mesh(pipeline), timeout_s=timeout_s, store=store, check=check)
    if comm.device.type == "cpu":
        keep_freed_memory()

    session = Session(
        *with_stages(manifest.directory, manifest.directory, pipeline),
        comm,
        rule,
        manifest.seed if seed is None else seed,
        tier_directory=tier_directory,
        buckets=[with_stages(manifest.directory, folder, bucket) for folder, bucket in manifest.load_buckets()],
        pad=manifest.pad_values,
        compiler=compiler,
    )
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
        manifest = Manifest.read(directory)
        manifest.check_world_size()
        manifest.update_rule()
    except RuntimeProgramError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    program: LoadedProgram | None = None
    try:
        program = load(
            directory,
            arguments.backend,
            weights=arguments.weights,
            seed=arguments.seed,
            timeout_s=arguments.timeout,
            check=arguments.check,
            tier_directory=arguments.tier_directory,
            compiler=arguments.compiler,
        )
        _watch(program, arguments)
        if arguments.run:
            from .staying import Run

            assert program.store is not None
            Run(program, arguments, program.store).train()
        else:
            run(program, arguments)
    except BaseException as error:
        _die(error, program, arguments.run)
    if program is not None and isinstance(program.session.comm, TorchComm):
        program.session.comm.flight.stop()
    dist.destroy_process_group()
    return 0


def _watch(program: LoadedProgram, arguments: argparse.Namespace) -> None:
    """Name a rank that keeps the others waiting, and end."""
    comm = program.session.comm
    if arguments.run and comm.rank == 0:
        set_aside(Path(arguments.run) / FLIGHT)
    if arguments.hang and comm.world_size > 1 and program.store is not None and isinstance(comm, TorchComm):
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
    for step in range(first + 1, first + arguments.steps + 1):
        start = time.perf_counter()
        result = program(next(batches))
        if rank == 0:
            elapsed = time.perf_counter() - start
            shown = f"loss {result.item():.6f}" if session.training else "done"
            print(f"step {step}  {shown}  {elapsed * 1e3:.1f} ms", flush=True)
        if arguments.save and arguments.save_every and step % arguments.save_every == 0:
            program.save(arguments.save)
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


def _join(backend: str, timeout_s: float, placement: Sequence[int]) -> dist.Store:
    """Make the default process group. placement: which logical rank every physical one is."""
    timeout = timedelta(seconds=timeout_s)
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank = placement[rank] if placement else rank
    own = dist.PrefixStore(meet(store, rank, world_size, timeout_s), store)
    prefixed = dist.PrefixStore("groups", own)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    return dist.PrefixStore("notes", own)


def _die(error: BaseException, program: LoadedProgram | None, run: str | None) -> None:
    """Say what happened and end this process at once: joining the process group's threads could wait for others."""
    rank = os.environ.get("RANK", "0")
    if dist.is_initialized() and str(dist.get_rank()) != rank:
        rank += f" (rank {dist.get_rank()} of the program)"
    if program is not None and isinstance(program.session.comm, TorchComm):
        flight = program.session.comm.flight
        if run:
            flight.write(Path(run) / FLIGHT, flight.failed(error))
        program.session.comm.leave_note(f"failed with {type(error).__name__}: {error}")
    trace = "" if isinstance(error, RuntimeProgramError) else traceback.format_exc()
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"{trace}error on rank {rank}: {type(error).__name__}: {error}{notes}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
