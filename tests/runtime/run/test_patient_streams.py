"""Streams of a run over a file that has no room for a while."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

from autopar.runtime.run.patient_streams import PatientStream

SCRIPT = """
import resource, sys
from autopar.runtime.run.patient_streams import make_patient
make_patient()
print("one")
resource.setrlimit(resource.RLIMIT_FSIZE, (6, -1))
print("two")
print("three")
print("four", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
print("five")
resource.setrlimit(resource.RLIMIT_FSIZE, (6, -1))
print("six")
"""


def test_lines_without_room_are_counted_and_the_process_ends_well(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=file, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"four\n")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["one", "tw", "[2 lines are lost here: there was no room]", "five"]


def test_a_reader_that_is_gone_is_an_error_as_before():
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        PatientStream(writing).write("a line\n")
    os.close(writing)


def test_lines_of_threads_are_whole(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        stream = PatientStream(file.fileno())

        def body(word: str) -> None:
            for _ in range(200):
                print(word, word, file=stream)

        threads = [threading.Thread(target=body, args=(word * 50,)) for word in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{word * 50} {word * 50}" for word in "abcd" for _ in range(200))


def test_what_was_begun_is_written_when_it_is_flushed(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        stream = PatientStream(file.fileno())
        stream.write("step 3")
        assert (tmp_path / "log").read_bytes() == b""
        stream.flush()
        assert (tmp_path / "log").read_bytes() == b"step 3"


def test_a_disk_that_is_full_is_no_error(monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    assert PatientStream(1).write("a line\n") == 7
