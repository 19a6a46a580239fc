"""A part in a process of its own: it ends within its limit, whatever it does, and what it gave stays.

The process is this module (`python -m benchmarks.gpu_report.separate NAME FOLDER [--rehearse]`). It writes FOLDER/NAME.json
again after every name that the part gives; what it says goes to FOLDER/NAME.log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 45.0
"""Seconds for what a part has started to end; torchrun gives ranks that do not hear it half a minute."""
LAST_LINES = 40


@dataclass(frozen=True)
class Outcome:
    """The end of a part. state: "done", "failed", "late" or "left out"; why: in words, where it is not done; found: its record;
    log: the end of what its processes said."""

    state: str
    seconds: float
    why: str
    found: dict[str, Any]
    log: str = ""


def run_part(name: str, limit_s: float, folder: Path, rehearsal: bool, progress: Callable[[str], None]) -> Outcome:
    """Run a part and wait for its end. progress: told every name that it gives."""
    command = [sys.executable, "-m", __spec__.name, name, str(folder), *(["--rehearse"] if rehearsal else [])]
    return run_command(command, name, limit_s, folder, progress)


def run_command(
    command: Sequence[str], name: str, limit_s: float, folder: Path, progress: Callable[[str], None]
) -> Outcome:
    """Run the process of a part."""
    log, path = folder / f"{name}.log", folder / f"{name}.json"
    path.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    start, told = time.monotonic(), 0
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < start + limit_s:
                time.sleep(0.05)
                names = list(found_so_far(path))
                for one in names[told:]:
                    progress(one)
                told = len(names)
            late = process.poll() is None
        finally:
            end_session(process)
    seconds = round(time.monotonic() - start, 1)
    found = found_so_far(path)
    for one in list(found)[told:]:
        progress(one)
    text = last_lines(log)
    if late:
        return Outcome("late", seconds, f"not done within {limit_s:.0f} s; it said last:\n{text}", found, text)
    if process.returncode:
        return Outcome("failed", seconds, f"status {process.returncode}; it said last:\n{text}", found, text)
    return Outcome("done", seconds, "", found, text)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it started there: asked first, so that torchrun ends its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            process.poll()  # a process that has ended is in the session until somebody asks
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def found_so_far(path: Path) -> dict[str, Any]:
    """The record of a part that may still be running."""
    return json.loads(path.read_text()) if path.exists() else {}


def last_lines(log: Path) -> str:
    """The end of what a process said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def main(name: str, folder: Path, rehearsal: bool) -> None:
    """The process of a part."""
    import torch.distributed as dist

    from benchmarks.gpu_report.machine import Machine
    from benchmarks.gpu_report.parts import BY_NAME

    found: dict[str, Any] = {}
    path, written = folder / f"{name}.json", folder / f"{name}.json.part"
    for key, value in BY_NAME[name].module.measure(Machine(folder, rehearsal)):
        found[key] = value
        written.write_text(json.dumps(found))
        written.replace(path)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--rehearse" in sys.argv)
