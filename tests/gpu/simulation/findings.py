"""Findings: the faults that the simulation reports, and the lines of code that it blames."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = str(Path(torch.__file__).parents[1])
_HERE = Path(__file__).parent
_SIMULATION = (str(_HERE), *(str(_HERE.parent / name) for name in ("simulated.py", "fake_cuda.py")))
_STANDARD = str(Path(sys.modules["contextlib"].__file__ or "").parent)
_RUNTIME = "autopar/runtime/"


@dataclass(frozen=True)
class Place:
    """A line: the innermost of the code under test, and the innermost of an emitted stage, "" where none is running."""

    line: str
    emitted: str = ""

    def __str__(self) -> str:
        return f"{self.emitted} ({self.line})" if self.emitted not in ("", self.line) else self.line


@dataclass(frozen=True)
class Finding:
    """A fault. kind: one of KINDS; places: the lines that make it together, the earlier first."""

    kind: str
    rank: int
    what: str
    places: tuple[Place, ...] = ()

    def __str__(self) -> str:
        lines = "".join(f"\n    {place}" for place in self.places)
        return f"rank {self.rank}: {self.kind}: {self.what}{lines}"


KINDS = {
    "race": "two accesses to the same bytes, one of which writes, with no order between them",
    "early free": "memory is given back while another stream may still use it",
    "never waited for": "a message whose end nobody waits for",
    "dtype": "a dtype that NCCL has no name for",
    "layout": "a tensor that NCCL does not take: not contiguous, or not on the device",
    "precondition": "an op is given what its CUDA kernel refuses",
    "order": "members of a group start other collectives, or make groups in another order",
    "signature": "members of a group start the same collective over other sizes, dtypes, reductions or roots",
    "unmatched": "a message between two ranks of which only one end exists",
    "shape": "the two ends of a message, or of a part of an exchange, disagree in size or dtype",
    "deadlock": "messages that wait for each other for ever",
}


class Places:
    """Finds the place that is running; what a frame is, is asked once per function."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, str] = {}

    def here(self) -> Place:
        """The line that is running now."""
        frame: FrameType | None = sys._getframe(1)
        line = ""
        while frame is not None:
            kind = self._kinds.get(frame.f_code) or self._kind(frame.f_code)
            if kind == "emitted":
                emitted = _text(frame)
                return Place(line or emitted, emitted)
            if kind == "tested" and not line:
                line = _text(frame)
            frame = frame.f_back
        return Place(line)

    def _kind(self, code: CodeType) -> str:
        name = code.co_filename
        if name.startswith("<autopar_stage"):
            kind = "emitted"
        elif name.startswith((_LIBRARIES, *_SIMULATION, _STANDARD, "<")):
            kind = "passed over"
        else:
            kind = "tested"
        self._kinds[code] = kind
        return kind


def _text(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    place = name.partition(_RUNTIME)[2] or (name if name.startswith("<") else Path(name).name)
    return f"{place.strip('<>')}:{frame.f_lineno}"


def told(findings: Iterable[Finding]) -> str:
    """All of them, a line each and more for their places."""
    return "\n".join(map(str, findings))
