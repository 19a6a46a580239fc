"""Independent questions of a search, answered on several cores, with the same answers as on one.

Processes are forked when questions stand together. They know all that this process knows, so nothing is sent to them: each
takes the next question that nobody has taken, and so does this process. Answers come back pickled; what this process has as
well (programs, tasks) is named in them, not copied. Who asks gets answers by their place, so which process was first does
not matter; questions that are not asked for in the end cost the time of a core that had nothing else to do.

Whatever goes wrong in another process (an error, an answer that cannot be pickled, its death) leaves its question to this
one, where it is asked again if its answer is wanted: errors are raised here, in the order of the questions.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Answer = TypeVar("Answer")

SMALL_S = 0.2
"""A search that takes less than so many seconds stays in one process: starting others takes some hundredths."""
_MOST_QUESTIONS = 4096
"""Questions that others may take, at most: their numbers fit in a pipe."""
_NUMBER = struct.Struct("<i")
_NOTICE = struct.Struct("<iiqq")
"""A question is answered: its number, by which process, and where in that one's file: start and size (-1: not answered)."""
_SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG


class Workers:
    """The processes of one search. count: how many at once, this one included (None: as many as cores it may use)."""

    def __init__(self, count: int | None) -> None:
        self.count = count or _cores()
        self._ready_s = time.monotonic() + SMALL_S
        self._team: _Team | None = None

    def answers(
        self, question: Callable[[Item], Answer], items: Iterable[Item], shared: Iterable[object] = ()
    ) -> Answers[Item, Answer]:
        """The answers to a question for every item; to be used in a `with`, after which nobody works on it any more.

        question: a function of the item alone, but for what it remembers. shared: what answers may hold that this process
        has too, beside the items themselves.
        """
        return Answers(self, question, tuple(items), tuple(shared))

    def team(self, answer: Callable[[int], bytes], questions: Sequence[int]) -> _Team | None:
        """Other processes that answer these questions; None where this one does better alone, or works with others already.

        Threads of this process would be missing in the others, and what they hold would never be let go.
        """
        busy = self._team is not None and self._team.is_alive
        if self.count < 2 or busy or len(questions) < 2 or threading.active_count() > 1:
            return None
        if time.monotonic() < self._ready_s or sys.platform != "linux":
            return None
        self._team = _Team(min(self.count, len(questions)) - 1, self._alone(answer), questions[:_MOST_QUESTIONS])
        return self._team

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody works any more."""
        if self._team is not None:
            self._team.end()

    def _alone(self, answer: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def answered(question: int) -> bytes:
            self.count = 1
            return answer(question)

        return answered


class Answers(Generic[Item, Answer]):
    """The answers by the place of their items, each made when it is asked for, or ahead by another process."""

    def __init__(
        self, workers: Workers, question: Callable[[Item], Answer], items: tuple[Item, ...], shared: tuple[object, ...]
    ) -> None:
        self._workers, self._question, self._items = workers, question, items
        self._shared = (*items, *shared)
        self._answers: dict[int, Answer] = {}
        self._not_answered: set[int] = set()
        self._left_out = mmap.mmap(-1, max(len(items), 1))  # the same memory in all processes
        self._team: _Team | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Answer]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Answers[Item, Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._team is not None:
            self._team.end()

    def leave_out(self, places: Iterable[int]) -> None:
        """Nobody needs to answer ahead what will not be asked for."""
        for i in places:
            self._left_out[i] = 1

    def __getitem__(self, i: int) -> Answer:
        """The answer for item i. Raises whatever the question raises."""
        if self._team is None and i not in self._answers:
            left = [j for j in range(i, len(self)) if j not in self._answers]
            self._team = self._workers.team(self._pickled, left)
        while self._team is not None and self._team.is_alive and i not in self._answers and i not in self._not_answered:
            self._go_on(self._team, i)
        if i not in self._answers:
            self._answers[i] = self._question(self._items[i])
        return self._answers[i]

    def _go_on(self, team: _Team, i: int) -> None:
        """Hear what others have answered, or answer the next question that nobody has taken, while i is waited for."""
        if self._hear(team.notice(wait=False)):
            return
        j = team.take() if team.is_alive else None
        if j is None:
            self._hear(team.notice(wait=True))
        elif not self._left_out[j]:
            try:
                self._answers[j] = self._question(self._items[j])
            except Exception:
                if j == i:
                    raise
                self._not_answered.add(j)  # nobody waits for it yet: asked again, and raised, where it is wanted

    def _hear(self, notice: tuple[int, bytes | None] | None) -> bool:
        """Note an answer of another process; False where there was none."""
        if notice is None:
            return False
        i, data = notice
        if data is None:
            self._not_answered.add(i)
        else:
            self._answers[i] = _Unpickler(io.BytesIO(data), self._shared).load()
        return True

    def _pickled(self, i: int) -> bytes:
        if self._left_out[i]:
            raise LookupError
        answer = self._question(self._items[i])
        buffer = io.BytesIO()
        _Pickler(buffer, self._shared).dump(answer)
        return buffer.getvalue()


class _Team:
    """Processes that take questions by their numbers and answer them in bytes.

    count: of processes. answer: asked in them; an error there is no answer. Questions are taken from a pipe that all read from,
    notices of answers come back through another, and the answers through a file for each process.
    """

    def __init__(self, count: int, answer: Callable[[int], bytes], questions: Iterable[int]) -> None:
        self._questions, to_ask = os.pipe()
        os.write(to_ask, b"".join(map(_NUMBER.pack, questions)))
        os.close(to_ask)
        self._notices, notify = os.pipe()
        self._files = [os.memfd_create("answers") for _ in range(count)]
        self._processes: list[int] = []
        self._is_ended = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # no process is forgotten on Ctrl-C
        try:
            with contextlib.suppress(OSError):  # where the system has no room for more processes
                for k in range(count):
                    self._processes.append(self._forked(k, answer, notify))
        finally:
            os.close(notify)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _forked(self, k: int, answer: Callable[[int], bytes], notify: int) -> int:
        """Start process k of the team."""
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads of libraries, which only wait
            process = os.fork()
        if process == 0:
            try:
                _begin(parent)
                self._work(k, answer, notify)
            finally:
                os._exit(0)
        return process

    @property
    def is_alive(self) -> bool:
        """Whether it was not ended yet."""
        return not self._is_ended

    def take(self) -> int | None:
        """The next question that nobody has taken."""
        number = os.read(self._questions, _NUMBER.size)
        return _NUMBER.unpack(number)[0] if number else None

    def notice(self, wait: bool) -> tuple[int, bytes | None] | None:
        """A question with its answer (None: it has none); None where nobody is left who could answer, or, without waiting,
        where there is no news."""
        if self._is_ended:
            return None
        if not wait:
            news = select.poll()
            news.register(self._notices, select.POLLIN)
            if not news.poll(0):
                return None
        notice = os.read(self._notices, _NOTICE.size)
        if not notice:
            self.end()
            return None
        question, k, start, size = _NOTICE.unpack(notice)
        return question, None if size < 0 else os.pread(self._files[k], size, start)

    def end(self) -> None:
        """End all processes, whatever they do."""
        if not self._is_ended:
            self._is_ended = True
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for process in self._processes:
                with contextlib.suppress(ChildProcessError):  # where the user lets the system forget processes that end
                    os.waitpid(process, 0)
            for file in (self._questions, self._notices, *self._files):
                os.close(file)

    def _work(self, k: int, answer: Callable[[int], bytes], notify: int) -> None:
        """Answer questions until none is left. k: the number of this process."""
        start = 0
        while (question := self.take()) is not None:
            try:
                data, size = answer(question), 0
                size = os.write(self._files[k], data)
            except Exception:
                size = -1  # the parent asks again, and has the error
            os.write(notify, _NOTICE.pack(question, k, start, size))
            start += max(size, 0)


class _Pickler(pickle.Pickler):
    """Names objects that the reader has too."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._places = {id(known): place for place, known in enumerate(shared)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _begin(parent: int) -> None:
    """Make ready a process that was just forked: it ends with its parent, leaves Ctrl-C to it, and has one thread, as pools
    of threads did not come along."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    gc.freeze()
