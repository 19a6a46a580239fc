"""Standard output and error of a run whose disk is full: lines are lost, and the run goes on.

A log is a file as a checkpoint is, and as often on the disk that is full or over its quota; yet Python's own streams keep what
they could not write, raise at every print from then on, and once more as the interpreter ends. These streams write whole
lines, past Python's buffers. Lines that find no room are dropped and counted, and the next line that fits begins with that
count. Every other error is raised as before: where nobody reads any more there is nobody to tell.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import TextIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PatientStream(io.TextIOBase):
    """A text stream over a file descriptor. Threads may share it; a line of one is never in a line of another."""

    def __init__(self, descriptor: int, encoding: str = "utf-8", errors: str = "backslashreplace") -> None:
        self._descriptor = descriptor
        self._encoding, self._errors = encoding, errors
        self._pending: dict[int, str] = {}
        self._lock = threading.Lock()
        self._lost, self._torn = 0, False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return self._errors

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Keep the text until its line ends. Raises OSError where the stream is gone."""
        thread = threading.get_ident()
        pending = self._pending.pop(thread, "") + text
        lines, newline, rest = pending.rpartition("\n")
        if rest:
            self._pending[thread] = rest
        if newline:
            self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Write what this thread has begun. Raises OSError where the stream is gone."""
        if pending := self._pending.pop(threading.get_ident(), ""):
            self._put(pending)

    def _put(self, text: str) -> None:
        with self._lock:
            before = "\n" if self._torn else ""
            if self._lost:
                before += f"[{self._lost} line{'s are' if self._lost > 1 else ' is'} lost here: there was no room]\n"
            content = (before + text).encode(self._encoding, self._errors)
            written = 0
            try:
                while written < len(content):
                    written += os.write(self._descriptor, content[written:])
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._lost += max(1, text.count("\n"))
                self._torn = (written > 0 and content[written - 1 : written] != b"\n") or (self._torn and not written)
                return
            self._lost, self._torn = 0, False


def make_patient() -> None:
    """Replace `sys.stdout` and `sys.stderr` where they are files, pipes or terminals of this process."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or isinstance(stream, PatientStream):
            continue
        try:
            descriptor = stream.fileno()
            stream.flush()
        except (OSError, ValueError):
            continue
        if descriptor == (1 if name == "stdout" else 2):
            setattr(sys, name, PatientStream(descriptor, stream.encoding or "utf-8"))
