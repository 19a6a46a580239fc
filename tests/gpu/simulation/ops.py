"""Every op that a rank runs, as events of its machine: which stream it runs on, what it reads and writes, whether the host waits.

What an op writes is what its schema says is mutated, and its new results. An op with a CUDA tensor is a kernel of the current
stream; tensors of the host that it takes are read as it is launched. A copy between host and device runs on the stream, and the
host waits for it unless it is `non_blocking` and the memory of the host is pinned.

Nothing is computed, so whoever runs a program says what the host reads (`Answer`). Integers that it brought are real tensors of
the host, and what is made of these alone is computed: sizes of messages that depend on data are those that the answer gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.simulation.budgets import COPY, LAUNCH
from tests.gpu.simulation.clocks import Timeline
from tests.gpu.simulation.device import Machine
from tests.gpu.simulation.findings import Place
from tests.gpu.simulation.preconditions import refused

_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "from_file"}
_VIEWS = {"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "detach", "alias", "set_"}
_COPIES = {"copy_", "_to_copy"}
_OVERWRITES = {"copy_", "fill_", "zero_"}
_HOST_WAITS = {"bincount", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_SYNC_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Answer = Callable[[Tensor], Any]
"""The number that the host finds in every element of a tensor."""


@dataclass(frozen=True)
class _Kind:
    """The facts of an op that its schema says. written: the places and names of arguments that it mutates."""

    name: str
    view: bool
    factory: bool
    copy: bool
    waits: bool
    written: tuple[tuple[int, str], ...]


@functools.cache
def _kind(func: Any) -> _Kind:
    schema, name = func._schema, func._schema.name.partition("::")[2]
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    waits = name in _HOST_WAITS or (not name.startswith("index") and bool(_SYNC_TAGS & set(func.tags)))
    return _Kind(name, aliases or name in _VIEWS, name in _FACTORIES, name in _COPIES, waits, written)


def zero(tensor: Tensor) -> Any:
    """The number that the host is told where nobody says another."""
    return False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0


class Ops(TorchDispatchMode):
    """The ops of a machine. messages: takes ops of process groups."""

    def __init__(self, machine: Machine, messages: Callable[[Any, Sequence[Any]], Any], answer: Answer = zero) -> None:
        super().__init__()
        self.machine, self._messages, self._answer = machine, messages, answer
        self._pinned: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return self._messages(func, args)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        kind = _kind(func)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and _are_told(given) and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if kind.factory:
            return self._made(func, args, kwargs)
        if kind.name == "is_pinned":
            return self.is_pinned(args[0])
        if kind.view:
            return func(*args, **kwargs)
        return self._run(kind, func, args, kwargs, given)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host lies in pinned memory."""
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        pinned = kwargs.pop("pin_memory", None)
        if func is torch.ops.aten.from_file.default:
            func, args, kwargs = torch.ops.aten.empty.memory_format, ([args[2]],), {"dtype": kwargs["dtype"]}
        made: Tensor = func(*args, **kwargs)
        if pinned:
            self._pin(made)
        self.machine.memory.allocated(made, self._home(made))
        return made

    def _pin(self, made: Tensor) -> None:
        whole = made.untyped_storage()
        self._pinned[whole._cdata] = StorageWeakRef(whole)

    def _run(self, kind: _Kind, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        """Run an op, as an event of the current stream, or of the host where it has no tensor of the device."""
        machine, place = self.machine, self.machine.places.here()
        if why := refused(kind.name, args):
            machine.report("precondition", f"{kind.name} wants {why}", (place,))
        result = self._result(kind, func, args, kwargs, given)
        known = {id(x) for x in given}
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and id(x) not in known]
        if not any(x.device.type == "cuda" for x in (*given, *made)):
            self._touch(kind, args, kwargs, given, made, machine.host, machine.host.tick(), place)
            return result
        host = [x for x in (*given, *made) if x.device.type == "cpu"]
        crossing = kind.copy and bool(host)
        waits = kind.waits or _by_mask(kind, args)
        if crossing and not self._copies_alone(kind, args, kwargs, host[0], made):
            waits = True
        self._touch(kind, args, kwargs, given, made, *machine.launch(), place, crossing)
        if kind.name != "_local_scalar_dense":
            machine.budget.note(COPY if crossing else LAUNCH, kind.name, place, (*given, *made))
        if waits:
            machine.block(machine.current.timeline.clock, kind.name)
        return result

    def _result(self, kind: _Kind, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        """The fake result of an op, or the number that the host is told."""
        if kind.name == "_local_scalar_dense":
            return self._number(func, args, given[0])
        if kind.name == "_fused_sgd_":
            return None  # torch cannot fake it, nor the next one
        if kind.name == "_thnn_fused_gru_cell":
            state: Tensor = args[2]
            return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])
        if kind.name == "_pin_memory":
            pinned = torch.empty_like(given[0])
            self._pin(pinned)
            return pinned
        if kind.name == "convolution_backward":
            args = pytree.tree_map_only(Tensor, _dense, args)
        result = func(*args, **kwargs)
        brought = kind.name == "_to_copy" and _is_brought(result, given[0], kwargs)
        return self._told(result) if brought else result

    def _touch(
        self,
        kind: _Kind,
        args: Any,
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        timeline: Timeline,
        number: int,
        place: Place,
        crossing: bool = True,
    ) -> None:
        """The accesses of an event. crossing: to memory of the host too, which else the host reads as it launches."""
        written = _tensors(kind, args, kwargs)
        overwritten = {id(x) for x in written} if kind.name in _OVERWRITES else set()
        accesses = [(x, False) for x in given if id(x) not in overwritten] + [(x, True) for x in (*written, *made)]
        host = self.machine.host
        for tensor, writes in accesses:
            of_host = tensor.device.type == "cpu"
            event = (host, host.tick()) if of_host and not crossing else (timeline, number)
            self.machine.memory.access(tensor, *event, writes, kind.name, place, self._home(tensor))

    def _copies_alone(
        self, kind: _Kind, args: Any, kwargs: dict[str, Any], host: Tensor, made: Sequence[Tensor]
    ) -> bool:
        """Whether a copy between host and device goes on while the host does something else."""
        place = {"copy_": 2}.get(kind.name, -1)
        wanted = bool(kwargs.get("non_blocking", args[place] if 0 <= place < len(args) else False))
        if wanted and any(host is one for one in made):
            self._pin(host)  # torch gives such a copy pinned memory
        return wanted and self.is_pinned(host)

    def _home(self, tensor: Tensor) -> Timeline | None:
        return self.machine.current.timeline if tensor.device.type == "cuda" else None

    def _told(self, brought: Tensor) -> Tensor:
        """A real tensor of the host with what the host finds in one that was brought."""
        with unset_fake_temporarily():
            return torch.full(tuple(brought.shape), self._answer(brought), dtype=brought.dtype)

    def listed(self, tensor: Tensor) -> Any:
        """The double of `tolist`: one copy, and not one per element."""
        host = tensor.cpu() if tensor.is_cuda else tensor.clone()
        if isinstance(host, FakeTensor):
            host = self._told(host)
        return torch.Tensor.tolist(host)

    def _number(self, func: Any, args: Any, tensor: Tensor) -> Any:
        try:
            return func(*args) if tensor.device.type == "cpu" else self._answer(tensor)
        except DataDependentOutputException:
            return self._answer(tensor)


def _tensors(kind: _Kind, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call mutates."""
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in kind.written]
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _dense(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape: torch, as it fakes a convolution, would ask a GPU to make it so."""
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _are_told(given: Sequence[Tensor]) -> bool:
    """Whether these are real tensors of the host."""
    return all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in given)


def _is_brought(result: Tensor, source: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy blocks the host until it has integers of the device."""
    return (
        result.device.type == "cpu"
        and source.device.type == "cuda"
        and not (result.dtype.is_floating_point or result.dtype.is_complex or kwargs.get("non_blocking"))
    )


def _by_mask(kind: _Kind, args: Any) -> bool:
    """Whether an op indexes by a mask, whose size the host has to know."""
    if not kind.name.startswith(("index", "_index_put")) or len(args) < 2:
        return False
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in pytree.tree_leaves(args[1]))
