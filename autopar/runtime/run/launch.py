"""The run of `torchrun run.py`: join the process group, load this rank's stages and its shard of the weights, train.

    torchrun --nproc-per-node 4 out/run.py --steps 100 --data my_data.py:batches --save checkpoints

`manifest.json` in the emitted directory says how many ranks there are and where the pipeline is, `pipeline.py` which
stage files each of them runs. What is loaded is a `LoadedProgram` (loaded.py), what trains it the loop of train_loop.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..comm.process import TorchComm
from ..errors import RuntimeProgramError
from ..health.flight import FLIGHT, Flight, end_process, say
from ..health.launcher import launcher
from ..health.watch import Watch
from ..preflight.facts import try_directory
from ..preflight.main import main as preflight
from ..program.arguments import parser, without_a_directory
from ..program.batches import check_source
from ..program.manifest import Manifest
from ..program.worlds import manifest_for, started_ranks
from .evaluation import EVAL_DATA
from .excluded_nodes import leave_out
from .loaded import LoadedProgram, chosen_backend, load
from .meeting import joined
from .other_plans import plan_of_run
from .ownership import Ownership, own_together
from .patient_streams import make_patient
from .plain_run import train
from .spares import DONE, START_AGAIN, stand_by, tell_spares

USAGE_ERROR = 2
NO_DATA = "no --data: every batch is random numbers, which is good for trying the program out and for nothing else"


def main(directory: str | Path, argv: Sequence[str] | None = None) -> int:
    """The command line of run.py; its exit status. 2: wrong use (before any process group), 1: a rank failed."""
    began_s = time.perf_counter()
    make_patient()
    arguments = parser().parse_args(argv)
    if (torchrun := launcher()) is not None:
        torchrun.watch()
    try:
        if arguments.preflight:
            return preflight(directory, chosen_backend(arguments.backend).transport.name, arguments)
        manifest = manifest_for(directory, started_ranks(), spares=bool(arguments.run), idle=True)
        for name in ("", *manifest.entries):
            manifest.update_rule(name)
        _check_arguments(arguments, manifest)
    except RuntimeProgramError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    _end_on_interrupt(arguments)
    program: LoadedProgram | None = None
    watch: Watch | None = None
    owner: Ownership | None = None
    status = 0
    try:
        met = joined(arguments.timeout) if arguments.run or manifest.idle else None
        if met is not None:
            store, rank = met
            if arguments.run:
                manifest = plan_of_run(manifest, store, rank, Path(arguments.run))
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
            rebalance=arguments.rebalance,
            met=met,
        )
        watch = _watch(program, arguments)
        if not arguments.data and program.session.comm.rank == 0:
            print(NO_DATA, flush=True)
        if arguments.run:
            from .directory_run import Run

            assert program.store is not None
            status = Run(program, arguments, program.store, owner, began_s).train()
        else:
            train(program, arguments)
            if program.store is not None and program.session.comm.rank == 0:
                tell_spares(program.store, started_ranks() - manifest.world_size, DONE)
    except BaseException as error:
        _die(error, program, arguments.run)
    if watch is not None:
        watch.stop()
    dist.destroy_process_group()
    if owner is not None:
        owner.release()
    return status


def _check_arguments(arguments: argparse.Namespace, manifest: Manifest) -> None:
    """Raises RuntimeProgramError, before ranks meet, where data or an entry are not there or a directory cannot be written."""
    if idle := without_a_directory(arguments):
        raise RuntimeProgramError(
            f"{idle} does nothing in a run without a directory; give --run-dir DIR too, or leave it out"
        )
    if arguments.data:
        check_source(arguments.data)
    if arguments.eval_data:
        check_source(arguments.eval_data, EVAL_DATA)
    elif arguments.eval_every:
        raise RuntimeProgramError("--eval-every evaluates on --eval-data; give that, or leave it out")
    if arguments.eval_data and arguments.eval_entry not in manifest.entries:
        known = ", ".join(manifest.entries) or "none"
        raise RuntimeProgramError(
            f"--eval-data is for the entry {arguments.eval_entry!r}, and the program has {known}; name one of "
            "compile(…, entries=) with --eval-entry"
        )
    for name in ("save", "profile"):
        path = getattr(arguments, name)
        problem = try_directory(_there(Path(path)))[0] if path else ""
        if problem:
            raise RuntimeProgramError(f"--{name} {path}: {problem}; give a directory that every rank can write to")


def _there(path: Path) -> Path:
    """The directory, or the innermost one that it is to be made in: a run that fails leaves none behind."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    return there if there.is_dir() else path


def _end_on_interrupt(arguments: argparse.Namespace) -> None:
    """Have Ctrl-C end every rank at once, and rank 0 say so in a line, until a run's directory has all save first (stop.py)."""
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):  # another's handler, or nobody is to be interrupted
        return
    saves = "before its first step" if arguments.run else "and nothing more is saved (with --run-dir it saves first)"

    def end(*_: object) -> None:
        os.write(2, f"interrupted: the run ends here, {saves}\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, end if os.environ.get("RANK", "0") == "0" else signal.SIG_DFL)


def _watch(program: LoadedProgram, arguments: argparse.Namespace) -> Watch | None:
    """Name a rank that keeps the others waiting, and end."""
    comm = program.session.comm
    if not arguments.hang or started_ranks() == 1 or program.store is None or not isinstance(comm, TorchComm):
        return None
    folder = Path(arguments.run or ".") / FLIGHT
    watch = Watch(comm.flight, folder, arguments.hang, arguments.timeout, end_process(comm.rank))
    watch.start(program.store)
    return watch


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
