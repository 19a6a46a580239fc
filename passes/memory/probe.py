"""What one line makes and needs beside it, found by running it once on meta tensors under a counter.

An op's result may be a view of an operand or a copy, its implementation may need scratch (masks of dropout, scores of
attention, chunks of a collective): the functions that emitted programs call know, so they are asked. Meta tensors hold
no data, a line takes microseconds, and the same line on the same layouts is asked once in the life of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from autopar.codegen.printer import Printer
from autopar.counter import ByteCounter
from autopar.ir.lowered import Line, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.types import TensorType
from autopar.runtime import attention, ops, rnn
from autopar.runtime.comm import Call, Comm
from autopar.runtime.gather import Gather, start_gathers

SMALL = 4 << 20


@dataclass(frozen=True)
class Layout:
    """How a local tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Contiguous."""
        stride, step = [], 1
        for n in reversed(shape):
            stride.append(step)
            step *= max(n, 1)
        return Layout(tuple(shape), tuple(reversed(stride)), dtype)

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, device: str = "meta") -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Out:
    """A result: a view of operand `alias`, or (alias -1) in the fresh storage number `fresh`. None: no tensor."""

    alias: int
    fresh: int
    layout: Layout | None


@dataclass(frozen=True)
class Effect:
    """fresh: bytes of the storages that the results bring. peak: the most new bytes at once, those included."""

    outs: tuple[Out, ...]
    fresh: tuple[int, ...]
    peak: int


class MetaComm(Comm):
    """A rank whose collectives move nothing: buffers without data, of the right size."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__(math.prod(mesh.values()) - 1, mesh, "meta")

    def _start(self, call: Call) -> Callable[[], None]:
        def wait(held: Call = call) -> None:
            """Until then the backend holds the buffers."""

        return wait

    def start_messages(self, messages: Any) -> Any:
        raise NotImplementedError

    def _part(self, mesh: Any, first_rank: int, inside: bool) -> Any:
        raise NotImplementedError

    def share(self, value: Any) -> Any:
        raise NotImplementedError


class _Rank:
    """What a line may ask of `rt`."""

    device = torch.device("meta")

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.comm = MetaComm(mesh)

    def key(self, call: int, site: int) -> int:
        return 1


@cache
def _rank(axes: tuple[tuple[str, int], ...]) -> _Rank:
    return _Rank(dict(axes))


def watch(run: Callable[[list[torch.Tensor]], Any], layouts: Sequence[Layout], device: str = "meta") -> Effect:
    """The effect of a function of tensors."""
    tensors = [layout.tensor(device) for layout in layouts]
    given = {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}
    counter = ByteCounter()
    with torch.no_grad(), counter:
        result = run(tensors)
    outs: list[Out] = []
    fresh: dict[int, int] = {}
    sizes: list[int] = []
    for value in result if isinstance(result, (tuple, list)) else [result]:
        if not isinstance(value, torch.Tensor):
            outs.append(Out(-1, -1, None))
            continue
        storage = value.untyped_storage()
        alias = given.get(storage._cdata, -1)
        if alias < 0 and storage._cdata not in fresh:
            fresh[storage._cdata] = len(sizes)
            sizes.append(storage.nbytes())
        outs.append(Out(alias, fresh.get(storage._cdata, -1), Layout.of(value)))
    return Effect(tuple(outs), tuple(sizes), max(counter.peak, sum(sizes)))


def effect(line: Line, layouts: Sequence[Layout], mesh: Mesh, names: Sequence[str]) -> Effect:
    """The effect of a line that makes tensors; layouts: of the values that it reads, by `names`."""
    places = {name: i for i, name in enumerate(names)}
    args, kwargs = _numbered(line.args, places), _numbered(line.kwargs, places)
    key = (line.op, _frozen(args), _frozen(kwargs), len(line.outs), tuple(layouts), mesh.axes)
    known = _EFFECTS.get(key)
    if known is None:
        known = _EFFECTS[key] = _probe(replace(line, args=args, kwargs=kwargs), tuple(layouts), mesh)
    return known


_EFFECTS: dict[Any, Effect] = {}
_ASKED = Printer()


def _probe(line: Line, layouts: tuple[Layout, ...], mesh: Mesh) -> Effect:
    names = [f"v{i}" for i in range(len(layouts))]
    try:
        text = _ASKED.expression(line)
        space = {
            "torch": torch,
            "aten": torch.ops.aten,
            "ops": ops,
            "attention": attention,
            "rnn": rnn,
            "user_ops": _UserOps(),
            "rt": _rank(mesh.axes),
            "call": 0,
        }
        function = eval(f"lambda {', '.join(names)}: {text}", space)
        if line.op.startswith("autopar.rnn"):
            return _recurrent(function, layouts)
        found = watch(lambda tensors: function(*tensors), layouts)
    except Exception:  # an op without a meta implementation, or one that looks at data
        return _declared(line, mesh)
    return found if len(found.outs) >= len([o for o in line.outs if o != "_"]) else _declared(line, mesh)


def _recurrent(function: Callable[..., Any], layouts: tuple[Layout, ...]) -> Effect:
    """Layers of recurrent networks run in kernels whose workspace no meta function knows: small ones are run, of others a
    few time steps, as everything (time, batch, …) grows with time."""
    if sum(layout.nbytes for layout in layouts) <= SMALL:
        return watch(lambda tensors: function(*tensors), layouts, "cpu")
    steps = next(layout.shape[0] for layout in layouts if len(layout.shape) == 3)

    def run(count: int) -> Effect:
        cut = tuple(Layout.dense((count, *x.shape[1:]), x.dtype) if len(x.shape) == 3 else x for x in layouts)
        return watch(lambda tensors: function(*tensors), cut, "cpu")

    few, more = run(min(steps, 8)), run(min(steps, 16))
    if steps <= 16:
        return more
    grown = tuple(b + (b - a) // 8 * (steps - 16) for a, b in zip(few.fresh, more.fresh, strict=True))
    outs = tuple(
        replace(o, layout=Layout.dense((steps, *o.layout.shape[1:]), o.layout.dtype))
        if o.layout is not None and len(o.layout.shape) == 3 and o.layout.shape[0] == 16
        else o
        for o in more.outs
    )
    return Effect(outs, grown, more.peak + (more.peak - few.peak) // 8 * (steps - 16))


class _UserOps:
    """Registered ops by name, as the emitted `user_ops` module has them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.autopar_ops, name)


def _declared(line: Line, mesh: Mesh) -> Effect:
    """By the types that the line states: every result is new."""
    outs: list[Out] = []
    sizes: list[int] = []
    for type_, spec in zip(line.types, line.specs, strict=False):
        layout = None if type_ is None or spec is None else local(type_, spec, mesh)
        outs.append(Out(-1, len(sizes) if layout else -1, layout))
        if layout:
            sizes.append(layout.nbytes)
    outs += [Out(-1, -1, None)] * (len(line.outs) - len(outs))
    return Effect(tuple(outs), tuple(sizes), sum(sizes))


def local(type_: TensorType, spec: Any, mesh: Mesh) -> Layout:
    """A dense local tensor of a global type under a spec."""
    return Layout.dense(spec.local_shape(type_.shape, mesh), type_.dtype)


@cache
def gathers(
    shards: tuple[Layout, ...], steps: tuple[Any, ...], axes: tuple[tuple[str, int], ...]
) -> tuple[int, int, int, Effect]:
    """Gathering parameters together, each along its (steps, dtype, tier): (bytes after the start, most until then, most
    until the end, effect). Shards in a tier come to the device first."""
    counter = ByteCounter()
    here = {i: shard.tensor() for i, (shard, (_, _, tier)) in enumerate(zip(shards, steps, strict=True)) if not tier}
    with counter:
        items: list[Gather] = [
            (here[i] if i in here else shard.tensor(), path, None)
            for i, (shard, (path, _, _)) in enumerate(zip(shards, steps, strict=True))
        ]
        handle = start_gathers(_rank(axes).comm, items, dtypes=[dtype for _, dtype, _ in steps])
        del items
        started, most = counter.alive, counter.peak
        counter.restart()
        results = handle.wait()
        ended = counter.peak
    given = {t.untyped_storage()._cdata: i for i, t in here.items()}
    outs, sizes = [], []
    for value in results:
        storage = value.untyped_storage()
        alias = given.get(storage._cdata, -1)
        if alias < 0:
            sizes.append(storage.nbytes())
        outs.append(Out(alias, -1 if alias >= 0 else len(sizes) - 1, Layout.of(value)))
    return started, most, ended, Effect(tuple(outs), tuple(sizes), ended)


@cache
def regather_peak(rows: tuple[tuple[Layout, tuple[Any, ...], Layout], ...], axes: tuple[tuple[str, int], ...]) -> int:
    """The most bytes beside shards and storage while updated shards go back to storage: (shard, steps, storage)."""
    items = [(shard.tensor(), steps, storage.tensor()) for shard, steps, storage in rows]
    counter = ByteCounter()
    with torch.no_grad(), counter:
        start_gathers(_rank(axes).comm, items).wait()
    return counter.peak


def _numbered(value: Any, places: Mapping[str, int]) -> Any:
    """Refs by their place among the operands."""
    if isinstance(value, Ref):
        return Ref(f"v{places[value.name]}")
    if isinstance(value, (list, tuple)):
        return type(value)(_numbered(v, places) for v in value)
    if isinstance(value, dict):
        return {k: _numbered(v, places) for k, v in value.items()}
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return value if isinstance(value, (int, str, bool, Ref, type(None), torch.dtype)) else repr(value)
