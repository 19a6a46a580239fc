"""The results and the scratch bytes of one line, found by running it once on meta tensors under a counter.

An op's result may be a view of an operand or a copy, its implementation may need scratch (masks of dropout, scores of
attention, chunks of a collective): the functions that emitted programs call know, so they are asked. Meta tensors hold
no data, a line takes microseconds, and the same line on the same layouts is asked once in a search. They stand
for tensors of the device that the program is for: its kernels are asked, with what these need inside.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.codegen.runtime_call import call_of
from autopar.counter import ByteCounter
from autopar.ir.lines import Compute, Convert, Cut, GoOn, Join, Line, ParameterGather, Ref, Start, Stored, Wait
from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, rows
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.memory.any_size import Grown, any_size, grown
from autopar.passes.memory.meta_rank import MetaRank
from autopar.passes.memory.recurrent import recurrent
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.played.tensors import Effect, Layout, Out, results_of, watch
from autopar.passes.rules.memo import Memo
from autopar.runtime.comm.devices import CPU, Device, standing_for
from autopar.runtime.gradients.gather import Gather, start_gathers

_WITHOUT_DATA = re.compile(r"\bmeta\b|no fake impl")
"""Torch's errors say so where it raises no NotImplementedError: of `item`, of sizes that data tell, of ops of users."""
WholeLine = Compute | Convert | Cut | Join
"""Lines that are not parts of others."""
Make = Callable[[WholeLine, tuple[Layout, ...]], list[Effect]]
"""Finds the effects of a line on operands that lie so."""
Shards = tuple["GatheredShard", ...]
Returning = tuple[tuple[Layout, tuple[RuntimeStep, ...], Layout], ...]
"""Updated shards that go back to storage: (shard, steps, storage)."""


class Probe:
    """The effects of lines on a mesh where the kernels of a device run, each asked once; of those that ask nothing of the mesh,
    once on all. memo: of probes, and of what else is known of stages on such ranks."""

    def __init__(self, mesh: Mesh, device: Device = CPU, memo: Memo | None = None) -> None:
        self.mesh, self.device, self.memo = mesh, device, memo or Memo()
        self._anywhere = self.memo.get((Probe, device), dict[Hashable, list[Effect]])
        self._last, self._first = MetaRank(mesh.sizes), MetaRank(mesh.sizes, 0)

    def effect(self, line: Line, layout_of: Mapping[str, Layout | None]) -> tuple[list[str], Effect]:
        """The tensors that a line reads, by name, and what it makes of them; what is started makes a handle, and then whatever
        operands that holds. layout_of: values by name (None: no tensor)."""
        whole = line.line if isinstance(line, (Start, GoOn, Wait)) else line
        assert isinstance(whole, WholeLine), line
        operands = {name: layout for name in whole.reads() if (layout := layout_of.get(name)) is not None}
        numbered = _numbered(whole, {name: f"v{i}" for i, name in enumerate(operands)})
        layouts, names = tuple(operands.values()), list(operands)
        make = self._whole if whole is line else self._parts
        key = make.__name__, _what(numbered), len(whole.outs), layouts
        effects = self._anywhere.get(key) or self.memo.get(
            (self, key), lambda: self._asked(make, numbered, layouts, key)
        )
        match line:
            case GoOn(stop=stop):
                return [], effects[stop]
            case Wait():
                return [], effects[-1]
        return names, effects[0]

    def gathered(self, shards: Shards) -> GatherEffect:
        """The effect of gathering parameters together."""
        return self.memo[_gather_effect](self._last.comm, shards)

    def regather_peak(self, shards: Returning) -> int:
        """The most bytes beside shards and storage while updated shards go back to storage."""
        return self.memo[_regather_peak](self._last.comm, shards)

    def _asked(self, make: Make, line: WholeLine, layouts: tuple[Layout, ...], key: Hashable) -> list[Effect]:
        """The effects of a line that is new here. key: of all that they follow from where nothing of the mesh is asked."""
        effects, asked_mesh = self._standing(make, line, layouts)
        if not asked_mesh:
            self._anywhere[key] = effects
        return effects

    def _standing(self, make: Make, line: WholeLine, layouts: tuple[Layout, ...]) -> tuple[list[Effect], bool]:
        """The effects of a line, and whether anything of the mesh was asked for them."""
        self._last.listen()
        with standing_for(self.device):
            return make(line, layouts), self._last.asked_mesh

    def _parts(self, line: WholeLine, layouts: tuple[Layout, ...]) -> list[Effect]:
        """The effects of a line that is split: of its start, of every part between, and of its wait."""
        assert isinstance(line, (Compute, Convert)), line
        call, tensors = call_of(Start(line)), [layout.tensor() for layout in layouts]
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        counter = ByteCounter()
        with torch.no_grad(), counter:
            handle = self._last.result(call, _by_name(tensors))
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

    def _whole(self, line: WholeLine, layouts: tuple[Layout, ...]) -> list[Effect]:
        """The effect of a line that is not split."""

        def on(rank: MetaRank) -> Callable[[list[torch.Tensor]], Any]:
            return lambda tensors: rank.result(call, _by_name(tensors))

        try:
            call = call_of(line)
            definition = find(line.op) if isinstance(line, Compute) else None
            if definition is not None and definition.hidden_workspace:
                assert isinstance(line, Compute)
                return [recurrent(line, layouts, on(self._last), self.memo)]
            watched = self._at_any_size(line, layouts)
            if watched is None:
                watched = watch(on(self._last), layouts)
                if self._last.asked_index:  # the last block sees most keys, or in zigzag order the first
                    watched = max(watched, watch(on(self._first), layouts), key=lambda effect: effect.peak)
            if isinstance(line, Compute) and definition is not None and definition.workspace is not None:
                results = (out.layout for out in watched.outs if out.layout is not None)
                tensors = [layout.tensor() for layout in (*layouts, *results)]
                workspace = definition.workspace(tensors, line.kwargs, self.device)
                watched = replace(watched, peak=max(watched.peak, sum(watched.fresh) + workspace))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not needs_data(error):
                raise
            return [self._declared(line)]
        return [watched if len(watched.outs) >= len([o for o in line.outs if o != "_"]) else self._declared(line)]

    def _declared(self, line: WholeLine) -> Effect:
        """The effect that the types of the line state, whose blocks are the mesh's."""
        self._last.asked_mesh = True
        return _declared(line, self.mesh)

    def _at_any_size(self, line: WholeLine, layouts: tuple[Layout, ...]) -> Effect | None:
        """The effect as that of lines like it at other sizes, where it grows with these."""
        alike = any_size(line, layouts) if isinstance(line, Compute) else None
        if alike is None:
            return None

        def run(line: Compute, layouts: tuple[Layout, ...], counter: ByteCounter) -> Effect:
            call = call_of(line)
            return watch(lambda tensors: self._last.result(call, _by_name(tensors)), layouts, counter=counter)

        def found_at_primes() -> Grown | None:
            try:
                return grown(alike, run)
            except Exception:  # it cannot run at such sizes
                return None

        key = grown, _what(alike.line), alike.layouts, len(alike.sizes), len(line.outs)
        found = self.memo.get(key, found_at_primes)
        return None if found is None else found.at(alike.sizes)


def needs_data(error: Exception) -> bool:
    """Whether torch says by an error that tensors without data are not enough: an op has no meta function, or looks at data."""
    return isinstance(error, NotImplementedError) or _WITHOUT_DATA.search(str(error)) is not None


def _what(numbered: WholeLine) -> Hashable:
    """The part of a line that its effect on operands of given layouts follows from."""
    match numbered:
        case Convert(step=step, whole=whole):
            return step, whole
        case Compute(op=op, kwargs=kwargs, carried=carried):
            return op, carried, _frozen(kwargs)
        case Cut(dim=dim) | Join(dim=dim):
            return type(numbered), dim


def _by_name(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Operands under the names that a numbered line has for them."""
    return {f"v{i}": tensor for i, tensor in enumerate(tensors)}


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
    def of(gather: ParameterGather, p: StoredParameter, lie: Callable[[TensorType, Spec], Layout]) -> GatheredShard:
        """A parameter's stored shard on its way to where a call uses it. lie: the layout of a rank's block."""
        shard = lie(p.type_of(Stored(p.name, gather.dtype is not None)), p.storage)
        return GatheredShard(shard, gather.steps, gather.dtype, p.tier)


@dataclass(frozen=True)
class GatherEffect:
    """Bytes that gathers hold once started, the most until then, the most until their end, and what they make."""

    started: int
    starting_peak: int
    ending_peak: int
    effect: Effect


def _gather_effect(comm: MetaComm, shards: Shards) -> GatherEffect:
    counter = ByteCounter()
    here = {i: shard.layout.tensor() for i, shard in enumerate(shards) if not shard.tier}
    with counter:
        items: list[Gather] = [
            (here[i] if i in here else shard.layout.tensor(), rows(shard.steps), None) for i, shard in enumerate(shards)
        ]
        handle = start_gathers(comm, items, dtypes=[shard.dtype for shard in shards])
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


def _regather_peak(comm: MetaComm, shards: Returning) -> int:
    items = [(shard.tensor(), rows(steps), storage.tensor()) for shard, steps, storage in shards]
    counter = ByteCounter()
    with torch.no_grad(), counter:
        start_gathers(comm, items).wait()
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
