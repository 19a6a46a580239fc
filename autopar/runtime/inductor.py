"""Stages compiled by torch's inductor, region by region (regions.py).

A region is traced with the shapes of its first call and compiled once, however many calls of its template there are: layers
that are alike share it. Its parameters are arguments; numbers of the rank (its place on an axis) are constants. It is
compiled again only where a tensor comes with other strides. What cannot be compiled runs as it is written, and a warning says
so; what the cache of compiled regions is damaged for is compiled anew.

Memory is promised for the program as it is written. Here what a region takes lives until its end, and the compiler has buffers of
its own: more by what one region takes and makes, and not counted.
"""

from __future__ import annotations

import os
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .convolutions import join_backward
from .rank import Rank
from .regions import cut
from .tiles import whole

COMPILERS = ("none", "inductor")
CACHE = "compile_cache"
"""The folder beside a program's files in which its compiled regions are kept for the next start."""
CACHE_IS_CHOSEN = "TORCHINDUCTOR_CACHE_DIR" in os.environ
"""By the user: parts of torch that are imported later set it themselves."""
SETTINGS = {"layout_optimization": False}
"""Values have the strides that they have as it is written, so that whatever reads them takes them and a region has one form;
convolutions that want channels last would then convert there and back in every region."""

Compiled = Callable[..., Sequence[Tensor]]
_one_at_a_time = threading.RLock()
"""Ranks that are threads of one process: the compiler's state belongs to the process. No message is sent inside."""


class CompilerWarning(UserWarning):
    """A part of the program runs uncompiled."""


def compiled_stage(module: Any, rt: Rank, index: int) -> types.ModuleType:
    """The module of a stage, its regions compiled for one rank when they are first called."""
    made = types.ModuleType(module.__name__)
    file = getattr(module, "__file__", f"<{module.__name__}>")
    with _one_at_a_time:
        parts = cut(source_of(module))
        code = compile(parts.tree, file, "exec")
    exec(code, made.__dict__)
    for region in parts.regions:
        where = f"{region.function} of stage {index} ({file}, line {region.line}; {region.source or 'no line of the model'})"
        setattr(made, region.name, CompiledRegion(where, getattr(made, region.name), rt))
    return made


def source_of(module: Any) -> str:
    """The text of a stage file: what its module was made of (`__source__`), or its file."""
    text = getattr(module, "__source__", None)
    return Path(module.__file__).read_text() if text is None else str(text)


def keep_beside(directory: Path) -> None:
    """Compiled regions go to a folder beside the program, unless the user says where or nothing can be written there."""
    if not CACHE_IS_CHOSEN and os.access(directory, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((directory / CACHE).resolve())


class CompiledRegion:
    """A region on one rank, called like its function. where: in the program and in the model."""

    def __init__(self, where: str, function: Callable[..., Any], rt: Rank) -> None:
        self.where, self.function, self.rt = where, function, rt
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.given_up = False

    def __call__(self, rt: Rank, *tensors: Tensor) -> Sequence[Tensor]:
        if not self.given_up:
            with _one_at_a_time:
                try:
                    compiled = self._compiled(tensors)
                except Exception as error:
                    self._give_up(error)
                else:
                    return compiled(*tensors)
        return self.function(rt, *tensors)

    def _compiled(self, tensors: Sequence[Tensor]) -> Compiled:
        """The code for tensors like these."""
        form = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        if form not in self.compiled:
            self.compiled[form] = self._compile(tensors)
        return self.compiled[form]

    def _compile(self, tensors: Sequence[Tensor]) -> Compiled:
        from torch._inductor import compile as inductor  # takes seconds to import
        from torch._inductor.utils import fresh_cache
        from torch.fx.experimental.proxy_tensor import make_fx

        with whole():
            graph = make_fx(lambda *given: self.function(self.rt, *given), tracing_mode="fake")(*tensors)
        join_backward(graph.graph)
        graph.recompile()
        try:
            return inductor(graph, list(tensors), options=dict(SETTINGS))
        except Exception:  # a process that was killed may have left half a file in the cache: once more, without it
            with fresh_cache():
                return inductor(graph, list(tensors), options=dict(SETTINGS))

    def _give_up(self, error: Exception) -> None:
        self.given_up = True
        self.compiled.clear()
        why = (str(error).strip() or "no reason is given").splitlines()[0][:300]
        warnings.warn(
            f"{self.where} is not compiled, it runs as it is written: {type(error).__name__}: {why}",
            CompilerWarning,
            stacklevel=3,
        )
