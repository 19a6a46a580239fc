"""A Python that has imported torch already, so that a process of a test starts in milliseconds instead of seconds.

`python()` is the path of an executable that takes what Python takes (`-u`, `-c TEXT`, `-m MODULE`, FILE, arguments). To
a test of ours a process of it differs in nothing from a fresh one: argv, environment, working directory, streams,
signals, namespaces, `sys.path` and exit status are the caller's, and nothing of autopar is imported. What it compiles to
bytecode is kept for the others in `build`, by what the source says, wherever it lies. Behind it stands one server,
which imports torch once and forks; the executable is a client, which hands over its streams, passes signals on and ends
as the fork ends. In the fork it is `sys.executable`, so torchrun starts ranks by it too. Test processes that share tests
among them share a server: the first that needs it starts it, in the folder that they were given, and it ends with the
process that gave it.

What must be a start from nothing (packaging, a program beside which nothing but torch is installed), or is looked at as a
family of processes, uses the sys.executable of the test.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


GIVEN: list[Path] = []
"""The folder that this process was given, if any."""


@functools.cache
def own_folder() -> Path:
    """A folder for a server, which ends when this process does."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    os.mkfifo(folder / "ends")
    os.open(folder / "ends", os.O_RDWR)  # closed as the process ends, however it does
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def python() -> str:
    """The executable. Where the system has no descriptors of processes it is a plain Python."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = GIVEN[0] if GIVEN else own_folder()
    executable = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not executable.exists():
            _serve(folder, executable)
    return str(executable)


def _serve(folder: Path, executable: Path) -> None:
    """Start the server of a folder."""
    address = str(folder / "socket")
    client = shlex.join([sys.executable, "-IS", str(HERE / "client.py"), address])
    executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, str(HERE / "server.py"), str(listener.fileno()), str(executable)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        with (folder / "ends").open("rb") as ends:
            subprocess.Popen(command, stdin=ends, pass_fds=[listener.fileno()], env=environment, start_new_session=True)


def torchrun(
    ranks: int, *command: str | Path | int, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a script of these arguments on so many ranks, by torchrun itself, and wait for its end (seconds at most)."""
    return subprocess.run(
        [python(), *TORCHRUN, f"--nproc-per-node={ranks}", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=cwd,
        check=False,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1")
