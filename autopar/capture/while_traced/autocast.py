"""`torch.autocast` inside a model, as the casts that it makes: an exported region names the dtype, its ops do not cast.

Which operands an op casts is found by running it under autocast on fake tensors and watching. It is believed where the op
with these casts before it, and without autocast, runs the same kernels in the same dtypes; any other op is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autopar.capture.explain import refusal
from autopar.capture.source_lines import source_of
from autopar.capture.while_traced.repeat_ops import MARKS
from autopar.errors import CaptureError, InputError
from autopar.runtime.comm.backends import BACKENDS

aten = torch.ops.aten
_SETTLED = "autocast"  # meta of a node whose casts are in the graph
_INSTEAD = "take the region out and let Options(precision=...) choose, or write the casts yourself (x.to(dtype))"
_MOVES = (aten.clone.default, aten._unsafe_view.default, aten.contiguous.default, aten.lift_fresh.default)
Casts = Mapping[int, torch.dtype]
"""Operand, by its place among the tensors of a call → dtype."""


@dataclass(frozen=True)
class Region:
    """The setting of `with torch.autocast(…)` for the ops inside."""

    device: str
    dtype: torch.dtype
    enabled: bool


def settle(graph: fx.Graph, region: Region) -> None:
    """Put the casts of a region into its graph, all but those of regions inside it, which are settled already."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.meta.get(_SETTLED) or node.target in MARKS:
            continue
        node.meta[_SETTLED] = True
        if region.enabled:
            _cast_operands(graph, node, region)


def _cast_operands(graph: fx.Graph, node: fx.Node, region: Region) -> None:
    operands = [n for n in node.all_input_nodes if _castable(n.meta.get("val"))]
    if not operands or not isinstance(node.target, torch._ops.OpOverload):
        return
    if node.target.namespace != "aten":
        raise CaptureError(
            f"a torch.autograd.Function, or an op that is not torch's, computes under torch.autocast at {source_of(node)}; what "
            f"is cast inside it is not known: {_INSTEAD}"
        )
    for operand, dtype in _casts(node, operands, region).items():
        with graph.inserting_before(node):
            new = graph.call_function(aten.to.dtype, (operands[operand], dtype))
        value = operands[operand].meta["val"]
        with value.fake_mode:
            new.meta = {**node.meta, "val": value.to(dtype)}
        node.replace_input_with(operands[operand], new)


def _castable(value: object) -> bool:
    """Whether autocast may cast a value: it leaves float64 alone."""
    return isinstance(value, FakeTensor) and value.is_floating_point() and value.dtype != torch.float64


def _casts(node: fx.Node, operands: Sequence[fx.Node], region: Region) -> Casts:
    """The casts of operands that autocast makes. Raises CaptureError where there are none that give the same."""
    values = [n.meta["val"].detach() for n in operands]

    def run(given: Sequence[torch.Tensor], enabled: bool) -> _Kernels:
        by_node = dict(zip(operands, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: by_node.get(n, n.meta["val"]))
        kernels = _Kernels(given)
        casting = torch.autocast(region.device, region.dtype, enabled=enabled, cache_enabled=False)
        with values[0].fake_mode, torch.no_grad(), casting, kernels:
            kernels.results = _dtypes(node.target(*args, **kwargs))  # type: ignore[operator]
        return kernels

    wanted = run(values, True)
    every = range(len(values))
    for casts in ({}, wanted.casts, dict.fromkeys(every, region.dtype), dict.fromkeys(every, torch.float32)):
        with values[0].fake_mode, torch.no_grad():
            given = [v.to(casts[i]) if i in casts else v for i, v in enumerate(values)]
        try:
            same = run(given, False).what == wanted.what
        except Exception:  # operands of dtypes that the op takes under autocast alone
            continue
        if same:
            return {i: dtype for i, dtype in casts.items() if values[i].dtype != dtype}
    raise CaptureError(f"what torch.autocast casts inside {node.target} at {source_of(node)} is not known; {_INSTEAD}")


class _Kernels(TorchDispatchMode):
    """The kernels that run and their dtypes, moves and casts aside; casts: of the operands themselves."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.places = {id(t): i for i, t in enumerate(operands)}
        self.casts: dict[int, torch.dtype] = {}
        self.ran: list[Any] = []
        self.results: Any = None

    @property
    def what(self) -> Any:
        """The part of two runs that they must have in common."""
        return self.ran, self.results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is aten._to_copy.default:
            place = self.places.get(id(args[0]))
            if place is not None and place not in self.casts:
                self.casts[place] = result.dtype
        elif not func.is_view and func not in _MOVES and func.namespace != "prim":
            self.ran.append((func, _dtypes((args, kwargs)), _dtypes(result)))
        return result


def _dtypes(value: Any) -> Any:
    """Nested arguments or results with tensors, and everything else that is no dtype, replaced."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {k: _dtypes(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dtypes(v) for v in value]
    return value if isinstance(value, torch.dtype) else None


# --- around the trace


def check_outside() -> None:
    """Raises InputError where capture itself is called under autocast, whose casts no region of the graph would name."""
    for device in (row.device_type for row in BACKENDS.values()):
        if torch.is_autocast_enabled(device):
            raise InputError(
                f'compile is called under torch.autocast("{device}"); call it outside, and let Options(precision=…) choose the '
                "precision, or enter autocast inside the model or the loss"
            )


class Regions:
    """Follows regions while a model is traced. Within the context one for another device than the CPU is an error."""

    def __init__(self) -> None:
        self.depth = 0
        self._patches: list[Any] = []

    def __enter__(self) -> Regions:
        make: Callable[..., None] = torch.autocast.__init__
        enter: Callable[..., Any] = torch.autocast.__enter__
        leave: Callable[..., Any] = torch.autocast.__exit__

        def init(one: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
            enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
            if enabled and device_type != "cpu":
                raise refusal(f"enters torch.autocast({device_type!r}), and models are traced on the CPU", _INSTEAD)
            make(one, device_type, *args, **kwargs)

        def entered(one: torch.autocast) -> Any:
            self.depth += 1
            return enter(one)

        def left(one: torch.autocast, *error: Any) -> Any:
            self.depth -= 1
            return leave(one, *error)

        names = {"__init__": init, "__enter__": entered, "__exit__": left}
        self._patches = [mock.patch.object(torch.autocast, name, f) for name, f in names.items()]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def detached(self, result: Any) -> Any:
        """The result of torch, without its history where there is none: export forgets `no_grad` inside a region."""
        if not self.depth or torch.is_grad_enabled():
            return result
        return tree_map_only(
            torch.Tensor, lambda t: t.detach() if t.is_floating_point() or t.is_complex() else t, result
        )
