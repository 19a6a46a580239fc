"""Export without the work whose result nobody reads.

Every pass of `torch.export` prints its graph as Python and compiles the text, whose forward nobody calls; the garbage
collector walks over nodes and fake tensors that all live as long as the trace; every node gets the whole Python stack, of which
all frames but those of methods `forward` are then dropped, and beside its value a description of it; and every attribute of a
tensor that the tracer reads itself passes the function modes which are there for the user's code. Where a step is made
functional, all ops are listed once per namespace of ops.

A trace by `make_fx` puts methods of its own into `nn.Module`, which for it do nothing but take milliseconds each time: Python
then forgets what it knew of every class of modules.
"""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._export import utils as export_utils
from torch.fx import _symbolic_trace, proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor


@contextmanager
def lean() -> Iterator[None]:
    """Within the context graph modules are compiled when they are called, garbage waits, stacks are of `forward` alone, and nodes
    have no `tensor_meta`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True), ExitStack() as patches:
            patches.enter_context(mock.patch.object(proxy, "CapturedTraceback", _Stack))
            patches.enter_context(mock.patch.object(proxy_tensor, "_extract_tensor_metadata", _not_described))
            patches.enter_context(mock.patch.object(proxy_tensor, "track_tensor_tree", _track_tensor_tree))
            once = functools.cache(export_utils._materialize_cpp_cia_ops)
            patches.enter_context(mock.patch.object(export_utils, "_materialize_cpp_cia_ops", once))
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def of_functions() -> Iterator[None]:
    """Within the context `make_fx` leaves the methods of `nn.Module` as they are. A trace that notes modules, such as export's,
    may not be made in it."""
    with mock.patch.object(_symbolic_trace._Patcher, "patch_method", _patch_other_methods):
        yield


_PATCH_METHOD = _symbolic_trace._Patcher.patch_method


def _patch_other_methods(patcher: Any, cls: type, *rest: Any, **options: Any) -> None:
    """torch's `patch_method`, but for modules."""
    if cls is not nn.Module:
        _PATCH_METHOD(patcher, cls, *rest, **options)


def _not_described(value: object) -> None:
    """In place of torch's `_extract_tensor_metadata`."""


_OF_TORCH = proxy_tensor.track_tensor_tree


def _track_tensor_tree(*args: Any, **kwargs: Any) -> Any:
    """torch's own, outside function modes."""
    with torch._C.DisableTorchFunction():
        return _OF_TORCH(*args, **kwargs)


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
