"""Forward and backward of a step as one CUDA graph: the host starts one thing instead of thousands of kernels.

What is captured is all from the batch to the gradients. The update is not: a learning rate, a scheduler, clipping and a
skipped step stay Python, and its kernels are few. The batch of every step is copied to where the captured one lay, and
so are the keys of its random numbers; parameters and buffers are written in place as ever.

    1       as it is written, on a side stream: kernels are chosen, libraries take their workspaces
    2       the same, recorded (step_record.py)
    3       captured while it is recorded again; where the records are equal, played, else left alone for good
    4 …     played

What cannot be captured is named in a CudaGraphWarning, and runs as it is written. A step that is recorded for a profile
does too. What captured kernels take stays taken while the optimizer steps: up to the promised peak, the optimizer's
scratch and this rank's part of the batch together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import RuntimeProgramError
from ..guards import Report
from ..kernels.random import StepKeys
from .stage import Inputs, Stage
from .step_record import Asked, StepRecord, difference

T = TypeVar("T")


class CudaGraphWarning(UserWarning):
    """Steps run as they are written, and not as a CUDA graph."""


class Capture(Protocol):
    """A recorder of the kernels of some work, which plays them again."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """Do the work, in the stream in which it will be captured."""

    def capture(self, work: Callable[[], T]) -> T:
        """Record its kernels without running them; results lie where every `play` leaves them."""

    def play(self) -> None:
        """Run the kernels."""


class CudaCapture:
    """A graph of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._graph = device, torch.cuda.Stream(device), torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], T]) -> T:
        # Other threads of this process (saving, beats) may ask the device for something meanwhile.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return work()

    def play(self) -> None:
        self._graph.replay()


class StepGraph(Generic[T]):
    """Forward and backward of a rank's steps. compute: of one step, from its inputs; what it gives is the same object whenever
    the step is played, and the next one overwrites it. stages: of this rank; microbatches: of every stage's inputs;
    make_capture: makes what captures them once. given_up: why they are not captured, "" where they are or will be."""

    def __init__(
        self,
        compute: Callable[[Inputs], T],
        stages: Mapping[int, Stage],
        microbatches: int,
        make_capture: Callable[[], Capture],
    ) -> None:
        self._compute, self._stages, self._make_capture = compute, stages, make_capture
        self._guards = next(iter(stages.values())).rt.guards
        self._found: list[Report] = []
        self._microbatches = range(microbatches)
        self.given_up = ""
        self._capture: Capture | None = None
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._keys = {index: StepKeys(stage.rt.device) for index, stage in stages.items()}
        self._asked: list[Asked] = []
        self._result: T | None = None
        self._places: list[int] = []

    def __call__(self, inputs: Inputs) -> T:
        """A step on parts of a batch."""
        if self.given_up:
            return self._compute(inputs)
        self._copy_in(inputs)
        for index, stage in self._stages.items():
            self._keys[index].write(stage.rt.seed, stage.rt.step)
        if self._result is not None and self._places != self._where():
            self._capture = self._result = None  # parameters lie elsewhere now
        if self._capture is None:
            self._capture, self._asked = self._make_capture(), []
            return self._looked_at(self._capture.warm_up(self._work))
        if self._result is not None:
            self._capture.play()
            return self._looked_at(self._result)
        record = StepRecord(self._at_rest(), [vars(stage.module) for stage in self._stages.values()])
        if not self._asked:
            result = self._capture.warm_up(lambda: self._recorded(record))
            self._asked = record.calls
            self._give_up(record.refused)
            return self._looked_at(result)
        return self._captured(self._capture, record)

    def _captured(self, capture: Capture, record: StepRecord) -> T:
        try:
            result = capture.capture(lambda: self._recorded(record))
        except Exception as error:
            raise RuntimeProgramError(
                f"capturing the step as a CUDA graph failed: {error}; compile with Options(cuda_graphs=False)"
            ) from error
        if why := record.refused or difference(self._asked, record.calls):
            result = self._work()  # nothing of the step has run yet
            self._give_up(why)
            return self._looked_at(result)
        self._result, self._places = result, self._where()
        capture.play()
        return self._looked_at(result)

    def _work(self) -> T:
        with self._guards.unread() as self._found, self._keyed():
            return self._compute(lambda stage, microbatch: list(self._inputs[stage.index, microbatch]))

    @contextmanager
    def _keyed(self) -> Iterator[None]:
        """Inside, random ops find their keys in memory."""
        try:
            for index, stage in self._stages.items():
                stage.rt.keys = self._keys[index]
            yield
        finally:
            for stage in self._stages.values():
                stage.rt.keys = None

    def _looked_at(self, result: T) -> T:
        """The result of a step, once its guards were seen to find nothing."""
        self._guards.look(self._found)
        return result

    def _recorded(self, record: StepRecord) -> T:
        with record:
            return self._work()

    def _copy_in(self, inputs: Inputs) -> None:
        """The batch where the captured one lay; the first one makes the room."""
        for index, stage in self._stages.items():
            for microbatch in self._microbatches:
                own = inputs(stage, microbatch)
                room = self._inputs.get((index, microbatch))
                if room is None:
                    self._inputs[index, microbatch] = [x.clone(memory_format=torch.contiguous_format) for x in own]
                    continue
                for held, x in zip(room, own, strict=True):
                    held.copy_(x)

    def _at_rest(self) -> list[Tensor]:
        """The tensors that stay where they are for all steps."""
        rts = [stage.rt for stage in self._stages.values()]
        held = [t for rt in rts for t in (*rt.params.values(), *rt.narrow.values(), *rt.buffers.values())]
        keys = [keys.table for keys in self._keys.values() if keys.table is not None]
        return [*held, *keys, *(x for inputs in self._inputs.values() for x in inputs)]

    def _where(self) -> list[int]:
        return [t.data_ptr() for t in self._at_rest()]

    def _give_up(self, why: str) -> None:
        if why:
            self.given_up = why
            self._capture, self._asked, self._inputs = None, [], {}
            say_why(why)


def why_not(training: bool, ranks: int, forms: int, loss_scaling: bool, in_tiers: bool, compiler: str) -> str:
    """A text of what keeps a session from being captured, "" where only its steps can tell."""
    impossible = {
        "the program was compiled for inference": not training,
        "it has several ranks, and what they know of their messages is not that of a graph": ranks > 1,
        "batches come in several shapes": forms > 1,
        "the loss scale is a number that changes": loss_scaling,
        "parameters rest in memory tiers": in_tiers,
        f"the compiler {compiler!r} starts kernels that are not recorded": compiler != "none",
    }
    return next((why for why, applies in impossible.items() if applies), "")


def say_why(why: str) -> None:
    """Why steps run as they are written."""
    warnings.warn(
        f"steps are not captured as a CUDA graph, they run as they are written: {why}", CudaGraphWarning, stacklevel=2
    )
