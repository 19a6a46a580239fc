"""Which of a program's plans a run takes: that for the number of ranks it finds itself with.

`program.save(OUT, also=[2, 3])` writes the program for other numbers of ranks into `worlds/2`, `worlds/3`. Where machines come
and go, torchrun starts the workers again with another WORLD_SIZE, and each time the same choice is made, on every rank by itself.
A run that goes on (`--run-dir`) may have more ranks than a plan: it takes the largest plan that is no larger, and the ranks
beyond it are spares. Elsewhere that would be ranks that were started by mistake, and is refused. A plan that leaves ranks of its
cluster idle is run with or without these.
"""

from __future__ import annotations

from pathlib import Path

from ..comm.environment import started
from ..errors import RuntimeProgramError
from .manifest import Manifest


class WrongWorldSize(RuntimeProgramError):
    """The program was compiled for other numbers of ranks."""


def started_ranks() -> int:
    """How many ranks torchrun started; one where it did not. Raises LaunchError."""
    return started().ranks


def manifest_for(
    directory: str | Path, ranks: int, found: str = "WORLD_SIZE is", *, spares: bool = False, idle: bool = False
) -> Manifest:
    """The manifest of the directory's program for so many ranks, or, with spares, for fewer. found: who counted them; idle:
    whether ranks that a plan leaves idle may be among them.

    Raises RuntimeProgramError; WrongWorldSize where there is no such program: before any process group exists, so that all
    ranks say the same and none waits.
    """
    own = Manifest.read(directory)
    sizes = {own.world_size, own.started, *own.worlds}
    size = max((size for size in sizes if size <= ranks), default=0) if spares else ranks
    manifest = own.for_ranks(size) if size in own.worlds else own
    if size not in sizes or (manifest.world_size < ranks and not (spares or idle)):
        others = f", and for {', '.join(map(str, own.worlds))}" if own.worlds else ""
        raise WrongWorldSize(
            f"this program was compiled for {own.world_size} ranks ({own.show()}){others}, but {found} {ranks}; start it with: "
            f"torchrun --nproc-per-node {own.world_size} {Path(directory) / 'run.py'}"
            f"{', or write it for other numbers of ranks too: program.save(…, also=[…])' if spares else ''}"
        )
    return manifest
