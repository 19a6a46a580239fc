"""Ranks of staged faults: real processes that meet over Gloo, forked from one that has imported torch, so a job takes a second.

As torchrun does, it keeps the store itself, ends the other ranks when one fails, and kills those that do not end.

    python -m tests.runtime.staged      a job per line of stdin: {"out", "argv", "ranks", "log"}
                                        a line of stdout per job: the exit status of every rank
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

GRACE_S = 5.0


class Nursery:
    """The process that forks ranks, from the test's side."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command, here = [sys.executable, "-m", "tests.runtime.staged"], Path(__file__).parents[2]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=here)

    def run(self, out: Path, argv: list[str], ranks: int, log: Path) -> tuple[list[int], str]:
        """Exit statuses of all ranks (minus the signal that ended one), and all that they said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log.mkdir()
        job = {"out": str(out), "argv": list(map(str, argv)), "ranks": ranks, "log": str(log)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        return codes, "".join(path.read_text() for path in sorted(log.iterdir()))

    def close(self) -> None:
        """No more jobs."""
        self._process.communicate()


def main() -> None:
    import torch.distributed as dist

    from autopar.runtime import checkpoint, launch, saver, staying, weights  # noqa: F401  # what ranks would import

    for line in sys.stdin:
        job = json.loads(line)
        read, write = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(store.port).encode())
            signal.pause()
        port = os.read(read, 16).decode()
        pids = [_fork(job, rank, port, launch.main) for rank in range(job["ranks"])]
        codes = _wait(pids)
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        os.close(read)
        os.close(write)
        print(json.dumps(codes), flush=True)


def _fork(job, rank, port, run) -> int:
    pid = os.fork()
    if pid:
        return pid
    with open(Path(job["log"]) / f"rank_{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    sys.path.insert(0, job["out"])
    status = 1
    try:
        status = run(job["out"], job["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    failed_at = 0.0
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and not failed_at:
                failed_at = time.monotonic()
                _end([one for one in pids if one not in codes], signal.SIGTERM)
        elif failed_at and time.monotonic() > failed_at + GRACE_S:
            _end([one for one in pids if one not in codes], signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def _end(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


if __name__ == "__main__":
    main()
