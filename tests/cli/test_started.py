"""A command is ended with all that it started, whichever way it ends: none of its processes is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cli import started

NESTED = """import os, signal, subprocess, sys, time
open({pids!r}, "a").write(str(os.getpid()) + "\\n")
child = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
    "open({pids!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
while len(open({pids!r}).readlines()) < 2:
    time.sleep(0.01)
{then}
"""
THEN = {
    "that takes too long": "time.sleep(100)",
    "that does not end when it is asked to": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)",
    "that is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "that fails": "print('said'); sys.exit(3)",
}


def command(folder: Path, then: str) -> list[str]:
    return [sys.executable, "-c", NESTED.format(pids=str(folder / "pids"), then=then)]


def left(folder: Path) -> list[int]:
    """The processes that still run, of the command and of what it started in a session of its own."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    alive = [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]
    return [pid for pid in alive if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


@pytest.mark.parametrize("how", list(THEN))
def test_nothing_is_left_of_a_command(tmp_path, monkeypatch, how):
    monkeypatch.setattr(started, "ENDING_S", 0.5)
    done = started.run(command(tmp_path, THEN[how]), 2.0)
    assert left(tmp_path) == []
    if how == "that fails":
        assert done is not None
        assert (done.returncode, done.stdout) == (3, "said\n")
    elif how != "that is killed":
        assert done is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_whoever_runs_a_command_leaves_nothing_of_it(tmp_path, number):
    spec = importlib.util.find_spec("autopar.cli.started")
    assert spec is not None
    words = command(tmp_path, "time.sleep(100)")
    text = f"""import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
own = runpy.run_path({spec.origin!r})
with own['interruptible'](): own['run']({words}, 100)"""
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL)
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(30) in (-signal.SIGINT, 128 + number)
    assert left(tmp_path) == []
