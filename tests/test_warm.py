"""The warm Python does to a process what a fresh one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.warm import python

TOLD = """import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ),
                  "name": __name__, "said": sys.stdin.read()}))
"""


def run(executable: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("how", ["file", "-c", "-m"])
@pytest.mark.parametrize("pythonpath", [None, "/nowhere:/else"])
def test_a_process_sees_what_it_sees_under_python(how: str, pythonpath: str | None, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    started = {"file": ["told.py"], "-c": ["-c", TOLD], "-m": ["-m", "told"]}[how]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OWN": "1"}
    environment |= {"PYTHONPATH": pythonpath} if pythonpath else {}
    fresh, warm = (
        json.loads(run(one, *started, "a", "-b", cwd=tmp_path, env=environment, input="hello").stdout)
        for one in (sys.executable, python())
    )
    assert fresh["said"] == "hello"
    for told in (fresh, warm):
        told["path"][0] = os.path.abspath(tmp_path / told["path"][0])
        for name in ("_", "PWD", "OLDPWD", "SHLVL", "LC_CTYPE"):  # a shell's
            told["environment"].pop(name, None)
    assert warm == fresh


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('what is wrong')", 1),
        ("raise ValueError('what is wrong')", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os._exit(7)", 7),
    ],
)
def test_it_ends_as_the_process_ends(text: str, status: int) -> None:
    done = run(python(), "-c", text)
    assert done.returncode == status
    assert ("what is wrong" in done.stderr) == ("what is wrong" in text)


def test_nothing_of_autopar_is_imported_and_each_process_starts_anew() -> None:
    text = "import sys; print([n for n in sys.modules if n.startswith(('autopar', 'mine'))]); sys.modules['mine'] = sys"
    assert [run(python(), "-c", text).stdout for _ in range(2)] == ["[]\n"] * 2


def waiting() -> tuple[subprocess.Popen[str], int]:
    """A process that says what signal it got, and its own number."""
    text = """import os, signal, time
def say(number, _):
    print(number, flush=True)
    raise SystemExit(5)
signal.signal(signal.SIGTERM, say)
print(os.getpid(), flush=True)
time.sleep(600)
"""
    client = subprocess.Popen([python(), "-c", text], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    return client, int(client.stdout.readline())


def test_a_signal_reaches_it() -> None:
    client, _ = waiting()
    client.send_signal(signal.SIGTERM)
    said, _ = client.communicate(timeout=60)
    assert (said, client.returncode) == (f"{int(signal.SIGTERM)}\n", 5)


def test_it_does_not_outlive_the_process_that_was_started() -> None:
    client, fork = waiting()
    client.kill()
    client.communicate(timeout=60)
    gone(fork)


def test_a_signal_that_comes_after_its_end_does_not_change_its_status() -> None:
    client, fork = waiting()
    client.send_signal(signal.SIGSTOP)
    os.kill(fork, signal.SIGKILL)
    gone(fork)
    client.send_signal(signal.SIGTERM)
    client.send_signal(signal.SIGCONT)
    client.communicate(timeout=60)
    assert client.returncode == -signal.SIGKILL


def gone(process: int) -> None:
    """See that a process ends, and is waited for."""
    end = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{process}").exists()


def test_processes_that_were_given_a_folder_share_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []

    def serve(folder: Path, executable: Path) -> None:
        started.append(folder)
        executable.touch()

    monkeypatch.setattr(warm, "GIVEN", [tmp_path])
    monkeypatch.setattr(warm, "_serve", serve)
    assert {warm.python.__wrapped__() for _ in range(3)} == {str(tmp_path / "python")}
    assert started == [tmp_path]


def test_forks_know_which_module_is_in_which_file() -> None:
    text = """import inspect, sys
files = [module.__name__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
print(len(files) > 1000, len(set(files) - set(inspect.modulesbyfile.values())) < 100)
"""
    done = run(python(), "-c", text)
    assert done.stdout == "True True\n", done
