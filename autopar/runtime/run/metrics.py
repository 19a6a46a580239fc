"""Watching a run: one record per step, on rank 0, to wherever it is wanted.

A record is made of what the run knows anyway (no message, no wait for a device): its time, the loss that was told, the time that
the host waited for messages, the memory's peak. Sinks take records: lines of JSON in a file, TensorBoard, the last one over HTTP
for Prometheus, and a line on a terminal. What is not known is None: nothing is estimated, and a sink leaves it out.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..comm.backends import backend_of
from ..comm.process import TorchComm
from ..comm.text_exchange import one_line
from ..data.datafile import open_lines
from ..errors import RuntimeProgramError
from ..program.manifest import Manifest
from ..step.session import Session
from .train_loop import Done, Listener, Loop

if TYPE_CHECKING:
    from .prometheus import Prometheus

BAR = 24
"""The width of the progress bar in characters."""


@dataclass(frozen=True)
class StepMetrics:
    """A step as rank 0 saw it. Seconds and bytes.

    tokens_per_s: of the global batch (None: no input has integers by position); mfu: share of the devices' peak that the products
    of the step took (None: no peak is published or measured, or it runs on something else); grad_norm: where it is taken to clip
    gradients; waited_s: in which the host waited for messages: what computing did not hide of them (None on GPUs, where the
    stream waits: see --profile); peak_bytes: of rank 0, of the process on a CPU and of the device's allocator on a GPU;
    save_s: of the step, for which saving kept training; extras: numbers that the step gave beside its loss, by name.
    """

    step: int
    at: float
    loss: float | None
    seconds: float
    tokens_per_s: float | None
    mfu: float | None
    grad_norm: float | None
    peak_bytes: int
    waited_s: float | None
    save_s: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict)

    def known(self) -> dict[str, float]:
        """The metrics that are known, by name."""
        own = {name: value for name, value in asdict(self).items() if name != "extras" and value is not None}
        return own | {f"extras.{name}": value for name, value in self.extras.items()}


Sink = Callable[[StepMetrics], None]


class Metrics(Listener):
    """Records the steps of a run. On other ranks than 0 it does nothing."""

    def __init__(self, session: Session, manifest: Manifest, arguments: argparse.Namespace) -> None:
        """Raises RuntimeProgramError where a sink cannot be had."""
        self._comm = session.comm
        self._sinks = sinks(arguments) if session.comm.rank == 0 else []
        self._peak_s = peak_seconds(manifest, session.comm.device)
        self._entries = sum(torch.Size(row.shape).numel() for row in manifest.inputs)
        self._save_s = 0.0
        self._waited_s = self._waited()

    def begin(self, loop: Loop) -> None:
        """A step begins: what was waited for before it is not its own."""
        self._waited_s = self._waited()

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """Give the record of a step to the sinks."""
        if not self._sinks:
            return False
        with self._comm.excused(f"reporting step {done.step}"):
            seconds, waited_s, batch = done.seconds, self._waited(), loop.program.shapes(done.batch)
            counts = [tokens_of_shape(shape, str(dtype).removeprefix("torch.")) for shape, dtype in batch]
            full = self._entries == sum(
                shape.numel() for shape, _ in batch
            )  # of a smaller bucket the work is not known
            record = StepMetrics(
                done.step,
                time.time(),
                done.loss,
                seconds,
                max(counts) / seconds if any(counts) else None,
                self._peak_s / seconds if self._peak_s is not None and full else None,
                done.norm,
                backend_of(self._comm.device).peak_bytes(self._comm.device),
                waited_s - self._waited_s if waited_s is not None and self._waited_s is not None else None,
                loop.save_s - self._save_s,
                done.extras,
            )
            self._save_s = loop.save_s
            for sink in self._sinks:
                sink(record)
        return False

    def _waited(self) -> float | None:
        comm = self._comm
        return comm.flight.waited_s if isinstance(comm, TorchComm) and backend_of(comm.device).is_host else None


def tokens_of_shape(shape: Sequence[int], dtype: str) -> int:
    """Entries of an input that is integers by sample and position; 0 of any other."""
    return torch.Size(shape).numel() if dtype in ("int64", "int32") and len(shape) >= 2 else 0


def peak_seconds(manifest: Manifest, device: torch.device) -> float | None:
    """Seconds that a step's products take at the peak of the devices; None where these are not those it was compiled for."""
    machines = manifest.machines
    return machines.peak_s if machines is not None and machines.gpu != backend_of(device).is_host else None


# ---- sinks


def sinks(arguments: argparse.Namespace) -> list[Sink]:
    """The sinks that the arguments ask for. Raises RuntimeProgramError."""
    found: list[Sink] = []
    path = arguments.metrics or (Path(arguments.run) / "metrics.jsonl" if arguments.run else None)
    if path is not None:
        found.append(JsonLines(Path(path)))
    if arguments.tensorboard:
        found.append(tensorboard(arguments.tensorboard))
    if arguments.prometheus is not None:
        from .prometheus import Prometheus  # asyncio takes a while to import

        found.append(prometheus(Prometheus(*arguments.prometheus)))
    return found


class JsonLines:
    """A line of JSON for every step, behind those that are there; what is no number of JSON (NaN, infinities) is null, as what is
    not known. A file that goes away is said, and made anew where its folder still is."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeProgramError where it cannot be had."""
        self._path = path
        self._said = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(path)
        except OSError as error:
            raise RuntimeProgramError(f"--metrics {path}: {error.strerror or error}; give another file") from error

    def __call__(self, record: StepMetrics) -> None:
        """Take the metrics of a step that is done."""
        known: dict[str, Any] = {name: _finite(value) for name, value in asdict(record).items() if name != "extras"}
        if record.extras:
            known["extras"] = {name: _finite(value) for name, value in record.extras.items()}
        line = (json.dumps(known, allow_nan=False) + "\n").encode()
        try:
            if not self._is_there():
                self._say(record.step, "the file is gone; what comes is written anew")
                self._file.close()
                self._file = open_lines(self._path)
            written = self._file.write(line)
            if written < len(line):
                self._file.write(b"\n")  # the line is torn
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._said = False
        except (OSError, ValueError) as error:  # of a file that is closed: it could not be opened again
            self._say(record.step, f"{getattr(error, 'strerror', None) or error}; steps are left out")

    def _is_there(self) -> bool:
        """Whether the name still is that of the file."""
        try:
            return not self._file.closed and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _say(self, step: int, what: str) -> None:
        """Say a problem once, until a step is written again."""
        if not self._said:
            print(f"--metrics {self._path}: step {step}: {what}", file=sys.stderr, flush=True)
        self._said = True


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def tensorboard(folder: str) -> Sink:
    """Scalars for TensorBoard. Raises RuntimeProgramError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeProgramError(
            f"--tensorboard {folder}: {error}; pip install tensorboard, or use --metrics FILE"
        ) from error
    writer: Any = SummaryWriter(folder, flush_secs=10)
    atexit.register(writer.close)

    def note(record: StepMetrics) -> None:
        for name, value in record.known().items():
            if name not in ("step", "at"):
                writer.add_scalar(name, value, record.step, walltime=record.at)

    return note


def prometheus(served: Prometheus) -> Sink:
    """A step's numbers by name, as gauges."""

    def note(record: StepMetrics) -> None:
        rows = [
            (re.sub(r"\W", "_", f"autopar_{name}", flags=re.ASCII), value) for name, value in record.known().items()
        ]
        served.text = "".join(f"# TYPE {name} gauge\n{name} {value!r}\n" for name, value in rows).encode()

    return note


# ---- what a person sees


class StepLine(Listener):
    """The line of a step: one after the other, or, on a terminal, one that is written over, with how far it is."""

    def __init__(self, last: int, out: Any = None) -> None:
        self.out = out or sys.stdout
        self.last = last
        self._first: tuple[int, float] | None = None
        self._bar = bool(self.out.isatty())

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """Show a step that is done, on rank 0."""
        comm = loop.program.session.comm
        if comm.rank == 0:
            norm = "" if done.norm is None else f"  norm {done.norm:.6g}"
            beside = "".join(f"  {one_line(name)} {value:.6g}" for name, value in done.extras.items())
            said = "done" if done.loss is None else f"loss {done.loss:.6f}{beside}{norm}"
            with comm.excused(f"reporting step {done.step}"):
                self.show(done.step, said, done.seconds)
        return False

    def show(self, step: int, what: str, seconds: float) -> None:
        """Show a step that is done."""
        said = f"step {step}  {what}  {seconds * 1e3:.1f} ms"
        if not self._bar:
            print(said, file=self.out, flush=True)
            return
        now = time.monotonic()
        first, began = self._first = self._first or (step - 1, now - seconds)
        left_s = (now - began) / (step - first) * max(self.last - step, 0)
        done = BAR * step // max(self.last, step)
        bar = f"[{'#' * done}{'.' * (BAR - done)}] {said}  of {self.last}, {clock_text(left_s)} left"
        self.out.write(f"\r{bar}\x1b[K" + ("\n" if step >= self.last else ""))
        self.out.flush()


def clock_text(seconds: float) -> str:
    """`1:02:03`, or `2:03`."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
