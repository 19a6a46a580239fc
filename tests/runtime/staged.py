"""Ranks of staged faults: real processes that meet over Gloo.

As torchrun does, the test keeps the store itself, ends the other ranks when one fails, and kills those that do not end.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.warm import python

GRACE_S = 5.0


def run(out: Path, argv: Sequence[object], ranks: int, log: Path, master: str = "127.0.0.1") -> tuple[list[int], str]:
    """run.py of a directory: exit statuses of all ranks (minus the signal that ended one), and all that they said."""
    log.mkdir()
    store = dist.TCPStore(master, 0, is_master=True, wait_for_workers=False)
    files = [log / f"rank_{rank}.txt" for rank in range(ranks)]
    processes = [_start(out, argv, rank, ranks, (master, store.port), file) for rank, file in enumerate(files)]
    _wait(processes)
    return [process.returncode for process in processes], "".join(file.read_text() for file in files)


def _start(
    out: Path, argv: Sequence[object], rank: int, ranks: int, place: tuple[str, int], log: Path
) -> subprocess.Popen[bytes]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": place[1],
    }
    environment = os.environ | {name: str(value) for name, value in numbers.items()}
    environment |= {"MASTER_ADDR": place[0], "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    command = [python(), str(out / "run.py"), *map(str, argv)]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    failed_at = 0.0
    while running := [process for process in processes if process.poll() is None]:
        if not failed_at and any(process.returncode for process in processes):
            failed_at = time.monotonic()
            for process in running:
                process.terminate()
        elif failed_at and time.monotonic() > failed_at + GRACE_S:
            for process in running:
                process.kill()
        time.sleep(0.02)
