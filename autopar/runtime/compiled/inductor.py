"""Stages compiled by torch's inductor, region by region (regions.py).

What a step meets for the first time runs as it is written. When the step is over, the regions that it met are traced with the
shapes of their arguments and compiled side by side: while one is lowered, the kernels of those before it are built
(kernel_files.py). A region is compiled once, however many calls of its template there are: layers that are alike share it. Its
parameters are arguments; numbers of the rank (its place on an axis) are constants. It is compiled again only where a tensor
comes with other strides. What cannot be compiled runs as it is written, and a warning says so; what the cache of compiled
regions is damaged for is compiled anew.

Memory is promised for the program as it is written. What a region takes is freed after its last use, as there; the compiler's
kernels hold fewer values on the way, and may hold some for longer.
"""

from __future__ import annotations

import os
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ..comm.backends import backend_of
from ..kernels.convolutions import join_backward
from ..kernels.tiles import whole
from ..rank import Rank
from .kernel_files import KernelFile, one_file
from .regions import cut

COMPILERS = ("auto", "none", "inductor")
CACHE = "compile_cache"
"""The folder beside a program's files in which its compiled regions are kept for the next start."""
CACHE_IS_CHOSEN = "TORCHINDUCTOR_CACHE_DIR" in os.environ
"""Whether the user chose the cache: parts of torch that are imported later set it themselves."""
SETTINGS = {"layout_optimization": False}
"""Values have the strides that they have as it is written, so that whatever reads them takes them and a region has one form;
convolutions that want channels last would then convert there and back in every region."""

Form = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
"""Shapes, strides and dtypes of arguments."""
Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""A function of the tensors in a list, which it empties."""
_one_at_a_time = threading.RLock()
"""Ranks that are threads of one process: the compiler's state belongs to the process. No message is sent inside."""


class CompilerWarning(UserWarning):
    """A part of the program runs uncompiled."""


def compiler_on(device: torch.device, compiler: str, captures: bool = False) -> str:
    """The compiler that sessions on a device have: "auto" is inductor where most ops are passes over memory that a kernel each
    launches, unless steps are to be captured as graphs. Where inductor cannot make kernels for the device a warning says so, and
    the program runs as it is written."""
    backend = backend_of(device)
    if compiler == "auto":
        compiler = "none" if backend.is_host or captures else "inductor"
    if compiler == "inductor" and not backend.is_host and not _has_triton():
        warnings.warn(
            f"the program is not compiled, it runs as it is written: inductor finds no Triton that makes kernels for "
            f"{device.type}; install triton, or pass --compiler none",
            CompilerWarning,
            stacklevel=3,
        )
        return "none"
    return compiler


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


def compiled_stage(module: Any, rt: Rank, index: int) -> tuple[types.ModuleType, list[CompiledRegion]]:
    """The module of a stage that calls its regions, and these, on one rank."""
    made = types.ModuleType(module.__name__)
    file = getattr(module, "__file__", f"<{module.__name__}>")
    with _one_at_a_time:
        parts = cut(source_of(module))
        code = compile(parts.tree, file, "exec")
    exec(code, made.__dict__)
    regions: list[CompiledRegion] = []
    for region in parts.regions:
        where = f"{region.function} of stage {index} ({file}, line {region.line}; {region.source or 'no line of the model'})"
        regions.append(CompiledRegion(where, getattr(made, region.name), rt))
        setattr(made, region.name, regions[-1])
    return made, regions


def source_of(module: Any) -> str:
    """The text of a stage file: what its module was made of (`__source__`), or its file."""
    text = getattr(module, "__source__", None)
    return Path(module.__file__).read_text() if text is None else str(text)


def keep_beside(directory: Path) -> None:
    """Compiled regions go to a folder beside the program, unless the user says where or nothing can be written there."""
    if not CACHE_IS_CHOSEN and os.access(directory, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((directory / CACHE).resolve())


class CompiledRegion:
    """A region on one rank, called like its function. where: in the program and in the model. met: forms of its arguments that it
    was called with and is not compiled for, with their devices."""

    def __init__(self, where: str, function: Callable[..., Any], rt: Rank) -> None:
        self.where, self.function, self.rt = where, function, rt
        self.met: dict[Form, list[torch.device]] = {}
        self.compiled: dict[Form, Compiled] = {}
        self.given_up = False

    def __call__(self, rt: Rank, tensors: list[Tensor]) -> Sequence[Tensor]:
        if not self.given_up:
            try:
                form = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
            except AttributeError as error:
                self._give_up(error)
            else:
                if (compiled := self.compiled.get(form)) is not None:
                    with _one_at_a_time:
                        return compiled(tensors)
                if form not in self.met:
                    self.met[form] = [t.device for t in tensors]
        return self.function(rt, tensors)

    def start(self, form: Form) -> Callable[[], None]:
        """Lower the region for arguments of a form that it has met; the function that is given waits for its code."""
        devices = self.met.pop(form)
        try:
            with FakeTensorMode():
                tensors = [
                    torch.empty_strided(shape, strides, dtype=dtype, device=device)
                    for (shape, strides, dtype), device in zip(form, devices, strict=True)
                ]
            with whole():
                graph = make_fx(lambda *given: self.function(self.rt, [*given]), tracing_mode="fake")(*tensors)
            join_backward(graph.graph)
            graph.recompile()
            finish = lowered(graph, tensors)
        except Exception as error:
            self._give_up(error)
            return lambda: None
        return lambda: self._finish(form, finish)

    def _finish(self, form: Form, finish: Callable[[], Compiled]) -> None:
        try:
            self.compiled[form] = finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.given_up = True
        self.met.clear()
        self.compiled.clear()
        why = (str(error).strip() or "no reason is given").splitlines()[0][:300]
        warnings.warn(
            f"{self.where} is not compiled, it runs as it is written: {type(error).__name__}: {why}",
            CompilerWarning,
            stacklevel=3,
        )


def compile_met(regions: Iterable[CompiledRegion]) -> None:
    """Compile what regions have met, side by side; what takes more arguments, and so likely more kernels, first."""
    met = [(region, form) for region in regions for form in region.met]
    if met:
        with _one_at_a_time:
            for finish in [region.start(form) for region, form in sorted(met, key=lambda one: -len(one[1]))]:
                finish()


def lowered(graph: GraphModule, tensors: Sequence[Tensor]) -> Callable[[], Compiled]:
    """A graph lowered by inductor; the function that is given waits for its kernels, which on a CPU are built meanwhile."""
    from torch._inductor import compile as inductor  # takes seconds to import
    from torch._inductor.utils import fresh_cache

    def made() -> Compiled:
        return emptying(graph, inductor(graph, list(tensors), options=dict(SETTINGS)))

    def made_again() -> Compiled:
        """The kernels compiled as torch does it, without what a process that was killed may have left half written in
        the cache."""
        with fresh_cache():
            return made()

    on_cpu = all(backend_of(tensor.device).is_host for tensor in tensors)
    try:
        with one_file() if on_cpu else nullcontext(KernelFile()) as kernels:
            compiled = made()
    except Exception:
        return made_again

    def finish() -> Compiled:
        try:
            kernels.wait()
        except Exception:
            return made_again()
        return compiled

    return finish


def emptying(graph: GraphModule, compiled: Callable[..., Sequence[Tensor]]) -> Compiled:
    """A compiled graph as a function of a list. Under inductor's functions of separate arguments, which hold these until they
    return, lies one that takes a list and empties it; where that is not found, or the graph has tensors of its own, which come
    before the arguments, the outer one is called."""
    inner: Any = compiled
    while inner.__name__ == "forward" and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if getattr(inner, "_boxed_call", False) and inner is not compiled and not {*graph.buffers(), *graph.parameters()}:
        return inner

    def separate(tensors: list[Tensor]) -> Sequence[Tensor]:
        given = tuple(tensors)
        tensors.clear()
        return compiled(*given)

    return separate
