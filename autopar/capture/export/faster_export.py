"""Export without the work whose result nobody reads.

Every pass of `torch.export` prints its graph as Python and compiles the text, whose forward nobody calls; the garbage
collector walks over nodes and fake tensors that all live as long as the trace; and every node gets the whole Python stack,
of which all frames but those of methods `forward` are then dropped.
"""

from __future__ import annotations

import gc
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.fx import proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextmanager
def lean() -> Iterator[None]:
    """Within the context graph modules are compiled when they are called, garbage waits, and stacks are of `forward` alone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True), mock.patch.object(proxy, "CapturedTraceback", _Stack):
            yield
    finally:
        if collects:
            gc.enable()


class _Stack:
    """Takes the place of torch's CapturedTraceback: the frames that its tracer keeps of a stack while exporting."""

    @staticmethod
    def extract() -> type[_Stack]:
        return _Stack

    @staticmethod
    def summary() -> traceback.StackSummary:
        """The frames, outermost first."""
        frames: list[traceback.FrameSummary] = []
        frame: types.FrameType | None = sys._getframe(1)
        anchors: set[tuple[str, str]] = getattr(proxy, "_STACK_TRACE_ANCHORS", set())  # since torch 2.13
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if name == "forward" or file.endswith("torch/__init__.py") or (file, name) in anchors:
                frames.append(traceback.FrameSummary(file, frame.f_lineno, name))
            frame = frame.f_back
        return traceback.StackSummary.from_list(frames[::-1])
