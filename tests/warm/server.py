"""Imports torch, then forks a process for every client: `server.py LISTENER EXECUTABLE`, ends with its stdin.

The server waits for four things: a client that connects, a client that is gone (its fork is killed), a fork that has ended (its
client is told the status), and the end of the tests. It stays single-threaded, as a process that forks must.
"""

from __future__ import annotations

import _imp
import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.machinery
import inspect
import json
import marshal
import multiprocessing.spawn
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

IMPORTED = (
    *("hypothesis", "jinja2", "networkx", "numpy", "pytest", "rich.console", "rich.table", "yaml"),
    *("ortools.graph.python.max_flow", "ortools.math_opt.python.mathopt", "ortools.sat.python.cp_model"),
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.run"),
    *("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.tensor", "torch.export"),
)
"""The modules that are imported by ranks, by torchrun, by what compiles: all but autopar itself."""
NAMESPACES = {"user": 0x10000000, "mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}
"""Flags of setns(2)."""


@dataclass(frozen=True)
class Job:
    """A fork, and its client."""

    client: socket.socket
    pid: int
    descriptor: int


class Server:
    """Clients and their forks, until stdin ends."""

    def __init__(self, listener: socket.socket, executable: str) -> None:
        self._listener, self._executable = listener, executable
        self._path = sys.path[1:]  # without this folder
        self._jobs: dict[int, Job] = {}
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(listener, selectors.EVENT_READ, self._begin)
        self._waiting.register(0, selectors.EVENT_READ, self._stop)

    def run(self) -> None:
        while True:
            for key, _ in self._waiting.select():
                if key.fileobj in self._waiting.get_map():
                    key.data()

    def _begin(self) -> None:
        client, _ = self._listener.accept()
        message, streams, *_ = socket.recv_fds(client, 1 << 20, 3)
        if not message:
            client.close()
            return
        pid = os.fork()
        if pid == 0:
            self._waiting.close()
            self._listener.close()
            for job in self._jobs.values():
                job.client.close()
                os.close(job.descriptor)
            _enter(_process_at(client))
            client.close()
            _become(json.loads(message), streams, self._path, self._executable)
        for stream in streams:
            os.close(stream)
        job = self._jobs[pid] = Job(client, pid, os.pidfd_open(pid))
        _tell(client, pid)
        self._waiting.register(client, selectors.EVENT_READ, lambda: self._lost(job))
        self._waiting.register(job.descriptor, selectors.EVENT_READ, lambda: self._ended(job))

    def _lost(self, job: Job) -> None:
        self._waiting.unregister(job.client)
        os.kill(job.pid, signal.SIGKILL)

    def _ended(self, job: Job) -> None:
        _, status = os.waitpid(job.pid, 0)
        _tell(job.client, os.waitstatus_to_exitcode(status))
        self._waiting.unregister(job.descriptor)
        if job.client in self._waiting.get_map():
            self._waiting.unregister(job.client)
        os.close(job.descriptor)
        job.client.close()
        del self._jobs[job.pid]

    def _stop(self) -> NoReturn:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        sys.exit()


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it is gone; the end of its fork is waited for
        client.send(str(number).encode())


def _process_at(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _enter(process: int) -> None:
    """The namespaces of a process, where they are not this one's."""
    flags = sum(
        flag
        for name, flag in NAMESPACES.items()
        if os.readlink(f"/proc/{process}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    )
    if flags and ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(process), flags):
        raise OSError(ctypes.get_errno(), "setns")


def _become(request: dict[str, Any], streams: list[int], path: list[str], executable: str) -> NoReturn:
    """The process that the client asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.executable = executable
    status = 1
    try:
        status = _run(list(request["arguments"]), path)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str], path: list[str]) -> int:
    """Run Python's arguments as Python would; modules are looked for where it would look."""
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    while (option := arguments.pop(0)) == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if option in ("-m", "-c"):
        what = arguments.pop(0)
        sys.argv, sys.path = [option, *arguments], [os.getcwd(), *own, *path]
        if option == "-m":
            sys.modules.pop(what, None)  # it would be executed a second time, which runpy warns of
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path = [option, *arguments], [os.path.dirname(os.path.abspath(option)), *own, *path]
        runpy.run_path(option, run_name="__main__")
    return 0


def keep_bytecode(folder: Path) -> None:
    """Modules are known by what their source says, not by where it lies: every program has a copy of the runtime. What is kept
    serves later tests too."""

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType:
        path = loader.get_filename(name)
        data = loader.get_data(path)
        kept = folder / hashlib.sha256(data).hexdigest()
        try:
            code = marshal.loads(kept.read_bytes())
        except (OSError, EOFError, ValueError):
            code = loader.source_to_code(data, path)
            with contextlib.suppress(OSError):
                own = folder / f"{os.getpid()}-{threading.get_ident()}"
                own.write_bytes(marshal.dumps(code))
                own.rename(kept)
        _imp._fix_co_filename(code, path)
        return code

    folder.mkdir(parents=True, exist_ok=True)
    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def stack(context: int = 1) -> list[inspect.FrameInfo]:
    """As `inspect.stack`, without the source, for which it looks through all modules: torchrun asks at every turn of its
    rendezvous, for the names of functions."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def prepare() -> None:
    """Import, and leave it to no collection of garbage to touch the memory that forks share. Which module is in which file is
    looked up once for all forks: torch asks where it registers an op, and the first answer takes every module's real path."""
    for name in IMPORTED:
        importlib.import_module(name)
    inspect.getmodule(compile("", "of no module", "exec"))
    inspect.stack = stack
    torch.set_num_threads(1)
    multiprocessing.spawn.set_executable(sys.executable)  # which hands more than three streams over
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    prepare()
    keep_bytecode(Path(__file__).parents[2] / "build" / f"bytecode-{sys.implementation.cache_tag}")
    Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).run()
