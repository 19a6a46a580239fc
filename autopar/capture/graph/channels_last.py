"""Images whose channels lie together stay so: what a user says of a layout is kept in the captured graph.

A layout is no part of a value's type, and kernels of convolutions are faster with this one (on tensor cores, which else
transpose; on processors, whose kernels are vectorized along channels). Users say it in three ways:

    inputs                                     they are taken as they lie, so nothing is to be done
    x.to(memory_format=torch.channels_last)    a copy that is kept, as `clone(x, memory_format=…)`
    model.to(memory_format=…)                  the first convolutions of such weights get that copy of their images; what
                                               follows has the layout of its operand. The weights themselves rest as others do
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.capture.exported import Exported

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout of images by their number of dims."""
_COPIES = (
    aten.clone.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
)
_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default, aten.conv3d.padding)


def keep_channels_last(exported: Exported, model: nn.Module) -> None:
    """Rewrite copies that ask for the layout alone, and add those that weights ask for."""
    graph, parameters = exported.graph, dict(model.named_parameters(remove_duplicate=False))
    lying = {name for name, parameter in parameters.items() if _lies_so(parameter)}
    weights = {name for name, (kind, what) in exported.kinds.items() if kind == "param" and what in lying}
    last = set[fx.Node]()
    for node in list(graph.nodes):
        value = node.meta.get("val") if node.op == "call_function" else None
        if isinstance(value, torch.Tensor) and value.ndim not in FORMATS:
            continue
        source = node.args[0] if node.args else None
        if node.target in _COPIES and _asked(node) and isinstance(source, fx.Node):
            if source.meta["val"].dtype == node.meta["val"].dtype:
                node.target, node.args, node.kwargs = aten.clone.default, (source,), _like(node)
            last.add(node)
        elif node.target in _CONVOLUTIONS and getattr(node.args[1], "name", "") in weights:
            if isinstance(source, fx.Node) and source not in last:
                with graph.inserting_before(node):
                    copy = graph.create_node("call_function", aten.clone.default, (source,), _like(source))
                copy.meta = {**node.meta, "val": source.meta["val"]}
                node.args = (copy, *node.args[1:])
            last.add(node)
        elif not last.isdisjoint(node.all_input_nodes):
            last.add(node)


def is_kept(node: fx.Node) -> bool:
    """Whether a copy is one that has the layout to be kept."""
    return node.kwargs.get("memory_format") in FORMATS.values()


def _like(node: fx.Node) -> dict[str, Any]:
    return {"memory_format": FORMATS[node.meta["val"].ndim]}


def _asked(node: fx.Node) -> bool:
    return any(argument in FORMATS.values() for argument in (*node.args[1:], *node.kwargs.values()))


def _lies_so(tensor: torch.Tensor) -> bool:
    format = FORMATS.get(tensor.ndim)
    return format is not None and tensor.is_contiguous(memory_format=format) and not tensor.is_contiguous()
