"""The results and the scratch bytes of one line, found by running it once on meta tensors under a counter.

An op's result may be a view of an operand or a copy, its implementation may need scratch (masks of dropout, scores of
attention, chunks of a collective): the functions that emitted programs call know, so they are asked. Meta tensors hold
no data, a line takes microseconds, and the same line on the same layouts is asked once in the life of the process. They stand
for tensors of the device that the program is for: its kernels are asked, with what these need inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from autopar.codegen.printer import Printer
from autopar.counter import ByteCounter
from autopar.ir.lines import Compute, Convert, Cut, GoOn, Join, Line, ParameterGather, Ref, Start, Wait
from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, rows
from autopar.ir.types import TensorType
from autopar.ops.homes import HOMES
from autopar.ops.registry import find
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.played.tensors import Effect, Layout, Out, results_of, watch
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.devices import CPU, Device, standing_for
from autopar.runtime.gradients.gather import Gather, start_gathers
from autopar.runtime.guards import Guards

SMALL = 4 << 20
WholeLine = Compute | Convert | Cut | Join
"""Lines that are not parts of others."""


class _Rank:
    """The part of `rt` that a line may ask for, on meta tensors."""

    device = torch.device("meta")

    def __init__(self, mesh: Mapping[str, int], rank: int | None) -> None:
        self.comm = MetaComm(mesh, rank)
        self.guards = Guards()

    def key(self, call: int, site: int) -> int:
        return 1

    def along(self, axis: str, *inner: str) -> Along:
        return Along(self.comm, axis, *inner)


@cache
def _rank(axes: tuple[tuple[str, int], ...], rank: int | None = None) -> _Rank:
    return _Rank(dict(axes), rank)


def line_effect(
    line: Line, layout_of: Mapping[str, Layout | None], mesh: Mesh, device: Device = CPU
) -> tuple[list[str], Effect]:
    """The tensors that a line reads, by name, and what it makes of them; what is started makes a handle, and then whatever
    operands that holds. layout_of: values by name (None: no tensor). device: whose kernels run."""
    if isinstance(line, (Start, GoOn, Wait)):
        return _part_effect(line, layout_of, mesh, device)
    assert isinstance(line, WholeLine), line
    names, numbered, layouts, key = _asked(line, layout_of, mesh, device)
    if key not in _EFFECTS:
        with standing_for(device):
            _EFFECTS[key] = _probe(numbered, layouts, mesh)
    return names, _EFFECTS[key]


def _asked(
    line: WholeLine, layout_of: Mapping[str, Layout | None], mesh: Mesh, device: Device
) -> tuple[list[str], WholeLine, tuple[Layout, ...], Hashable]:
    """Names of the tensors that a line reads; the line with them numbered, their layouts, and what its effect follows from."""
    operands = {name: layout for name in line.reads() if (layout := layout_of.get(name)) is not None}
    numbered, layouts = _numbered(line, {name: f"v{i}" for i, name in enumerate(operands)}), tuple(operands.values())
    match numbered:
        case Convert(step=step):
            what: Hashable = step
        case Compute(op=op, kwargs=kwargs, carried=carried):
            what = op, carried, _frozen(kwargs)
        case Cut(dim=dim) | Join(dim=dim):
            what = type(numbered), dim
    return list(operands), numbered, layouts, (what, len(line.outs), layouts, mesh.axes, device)


def _part_effect(
    line: Start | GoOn | Wait, layout_of: Mapping[str, Layout | None], mesh: Mesh, device: Device
) -> tuple[list[str], Effect]:
    """The same of a part of a line that was started."""
    names, numbered, layouts, key = _asked(line.line, layout_of, mesh, device)
    assert isinstance(numbered, (Compute, Convert))
    if key not in _PARTS:
        with standing_for(device):
            _PARTS[key] = _probe_parts(numbered, layouts, mesh)
    match line:
        case Start():
            return names, _PARTS[key][0]
        case GoOn(stop=stop):
            return [], _PARTS[key][stop]
    return [], _PARTS[key][-1]


def _probe_parts(line: Compute | Convert, layouts: tuple[Layout, ...], mesh: Mesh) -> list[Effect]:
    """The effects of a line that is split: of its start, of every part between, and of its wait."""
    begin = eval(
        f"lambda {', '.join(['rt', *_names(layouts)])}: {_ASKED.expression(Start(line))}", {**HOMES, "torch": torch}
    )
    tensors = [layout.tensor() for layout in layouts]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    counter = ByteCounter()
    with torch.no_grad(), counter:
        handle = begin(_rank(mesh.axes), *tensors)
        tensors.clear()
        held = [Out(i, -1, None) for i, storage in enumerate(storages) if storage() is not None]
        effects = [Effect((Out(-1, 0, None), *held), (counter.alive,), counter.peak)]
        for _ in range(1, len(line.stops) if isinstance(line, Compute) else 1):
            alive = counter.alive
            counter.restart()
            handle.go_on()
            effects.append(Effect((Out(-1, 0, None),), (counter.alive,), counter.peak - alive))
        alive = counter.alive
        counter.restart()
        result = handle.wait()
        del handle
        peak = counter.peak - alive
    outs, sizes = results_of(result, {})
    return [*effects, Effect(outs, sizes, peak)]


_PARTS: dict[Any, list[Effect]] = {}
_EFFECTS: dict[Any, Effect] = {}
_ASKED = Printer()


def _probe(line: WholeLine, layouts: tuple[Layout, ...], mesh: Mesh) -> Effect:
    names = _names(layouts)
    try:
        rank = _rank(mesh.axes)
        space = {"torch": torch, "aten": torch.ops.aten, **HOMES, "user_ops": _UserOps(), "rt": rank, "call": 0}
        function = eval(f"lambda {', '.join(names)}: {_ASKED.expression(line)}", space)
        definition = find(line.op) if isinstance(line, Compute) else None
        if definition is not None and definition.hidden_workspace:
            return _recurrent(function, layouts)
        rank.comm.asked_index = False
        watched = watch(lambda tensors: function(*tensors), layouts)
        if rank.comm.asked_index:  # the last block sees most keys, or in zigzag order the first
            space["rt"] = _rank(mesh.axes, 0)
            watched = max(watched, watch(lambda tensors: function(*tensors), layouts), key=lambda effect: effect.peak)
    except Exception:  # an op without a meta implementation, or one that looks at data
        return _declared(line, mesh)
    return watched if len(watched.outs) >= len([o for o in line.outs if o != "_"]) else _declared(line, mesh)


def _names(layouts: Sequence[Layout]) -> list[str]:
    """Names of operands, in text that is run."""
    return [f"v{i}" for i in range(len(layouts))]


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


def _declared(line: WholeLine, mesh: Mesh) -> Effect:
    """The effect that the types of the line state: every result is new."""
    outs: list[Out] = []
    sizes: list[int] = []
    for _, type_, spec in line.made():
        layout = None if type_ is None or spec is None else local(type_, spec, mesh)
        outs.append(Out(-1, len(sizes) if layout else -1, layout))
        if layout:
            sizes.append(layout.nbytes)
    outs += [Out(-1, -1, None)] * (len(line.outs) - len(outs))
    return Effect(tuple(outs), tuple(sizes), sum(sizes))


def local(type_: TensorType, spec: Spec, mesh: Mesh) -> Layout:
    """A dense local tensor of a global type under a spec."""
    return Layout.dense(spec.local_shape(type_.shape, mesh), type_.dtype)


@dataclass(frozen=True)
class GatheredShard:
    """A shard that is gathered, and how. tier: where it rests, from which it comes to the device first ("": there)."""

    layout: Layout
    steps: tuple[RuntimeStep, ...]
    dtype: torch.dtype | None = None
    tier: str = ""

    @staticmethod
    def of(gather: ParameterGather, p: StoredParameter, mesh: Mesh) -> GatheredShard:
        """A parameter's stored shard on its way to where a call uses it."""
        return GatheredShard(local(p.type, p.storage, mesh), gather.steps, gather.dtype, p.tier)


@dataclass(frozen=True)
class GatherEffect:
    """Bytes that gathers hold once started, the most until then, the most until their end, and what they make."""

    started: int
    starting_peak: int
    ending_peak: int
    effect: Effect


@cache
def gather_effect(shards: tuple[GatheredShard, ...], axes: tuple[tuple[str, int], ...]) -> GatherEffect:
    """The effect of gathering parameters together on a mesh of these axes."""
    counter = ByteCounter()
    here = {i: shard.layout.tensor() for i, shard in enumerate(shards) if not shard.tier}
    with counter:
        items: list[Gather] = [
            (here[i] if i in here else shard.layout.tensor(), rows(shard.steps), None) for i, shard in enumerate(shards)
        ]
        handle = start_gathers(_rank(axes).comm, items, dtypes=[shard.dtype for shard in shards])
        del items
        started, starting_peak = counter.alive, counter.peak
        counter.restart()
        results = handle.wait()
        ending_peak = counter.peak
    given = {t.untyped_storage()._cdata: i for i, t in here.items()}
    outs, sizes = [], []
    for value in results:
        storage = value.untyped_storage()
        alias = given.get(storage._cdata, -1)
        if alias < 0:
            sizes.append(storage.nbytes())
        outs.append(Out(alias, -1 if alias >= 0 else len(sizes) - 1, Layout.of(value)))
    return GatherEffect(started, starting_peak, ending_peak, Effect(tuple(outs), tuple(sizes), ending_peak))


@cache
def regather_peak(
    shards: tuple[tuple[Layout, tuple[RuntimeStep, ...], Layout], ...], axes: tuple[tuple[str, int], ...]
) -> int:
    """The most bytes beside shards and storage while updated shards go back to storage: (shard, steps, storage)."""
    items = [(shard.tensor(), rows(steps), storage.tensor()) for shard, steps, storage in shards]
    counter = ByteCounter()
    with torch.no_grad(), counter:
        start_gathers(_rank(axes).comm, items).wait()
    return counter.peak


def _numbered(line: WholeLine, names: Mapping[str, str]) -> WholeLine:
    """The line with its operands under other names."""
    if isinstance(line, (Convert, Cut)):
        return replace(line, value=names[line.value])
    if isinstance(line, Join):
        return replace(line, pieces=tuple(names[piece] for piece in line.pieces))

    def place(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names[value.name])
        if isinstance(value, (list, tuple)):
            return type(value)(map(place, value))
        return value

    return replace(line, kwargs={k: place(v) for k, v in line.kwargs.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return value if isinstance(value, (int, str, bool, Ref, type(None), torch.dtype)) else repr(value)
