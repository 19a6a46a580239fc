"""A model with fake CPU parameters: shapes without memory.

Real, meta and CUDA parameters alike become fake CPU tensors while a model is traced (a meta parameter with
`F.cross_entropy` would silently lose its backward; a fake CUDA tensor aborts a CPU build), memoised by identity so that
tied weights stay tied. The model is handed back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture.direct_shapes import DirectShapes
from autopar.ops.dialect import SHAPES


def fake_mode() -> DirectShapes:
    """One mode per compilation; plain tensor attributes of modules are let in as constants."""
    return DirectShapes(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of the same shape, dtype and requires_grad; a parameter without elements has nothing to train."""
    fake: torch.Tensor = FakeTensor(
        mode, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), torch.device("cpu")
    )  # what `torch.empty` gives under the mode, at a sixth of the time
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # as nn.Parameter does with a tensor of another class, after a detach
        return fake.requires_grad_(tensor.requires_grad and tensor.numel() > 0)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake


@contextmanager
def exports(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Within the context torch.export traces a model of fake tensors in their own mode, which it would copy all of them from
    into a new one: parameters that are trained are taken as they are (they are leaves, in which a trace can leave nothing),
    others are copied."""
    converter = FakeTensorConverter(export=True)
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor) and parameter.requires_grad:
            converter.set_tensor_memo(parameter, parameter)
    as_export_has_them: dict[str, Any] = {
        "shape_env": ShapeEnv(tracked_fakes=[], trace_asserts=True),
        "static_shapes": False,
        "fake_tensor_converter": converter,
        "_allow_unsafe_data_ptr_access": False,
    }
    with mock.patch.multiple(mode, **as_export_has_them), tracing(TracingContext(mode)):
        yield


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[dict[int, str]]:
    """Within the context the model's parameters and buffers are fake. Yields {id of fake tensor: first name}."""
    memo: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    undo: list[tuple[nn.Module, dict[str, torch.Tensor], str, torch.Tensor]] = []
    torchs_shapes = dict(fake_impls.op_implementations_dict)
    fake_impls.op_implementations_dict.update(dict.fromkeys(SHAPES, _run_fake))
    try:
        for prefix, module in model.named_modules(remove_duplicate=True):
            tables = ((module._parameters, True), (module._buffers, False))
            for table, is_parameter in tables:
                for name, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    fake = memo.get(id(tensor))
                    if fake is None:
                        fake = memo[id(tensor)] = fake_like(tensor, mode)
                    names.setdefault(id(fake), f"{prefix}.{name}" if prefix else name)
                    undo.append((module, table, name, tensor))
                    _put(module, table, name, fake, is_parameter)
        yield names
    finally:
        for op in SHAPES:
            fake_impls.op_implementations_dict.pop(op)
        fake_impls.op_implementations_dict.update(torchs_shapes)
        for module, table, name, tensor in undo:
            _put(module, table, name, tensor, isinstance(tensor, nn.Parameter))


def _run_fake(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with mode:
        return SHAPES[op](*args, **kwargs)


def _put(
    module: nn.Module, table: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, is_parameter: bool
) -> None:
    if is_parameter and isinstance(module, nn.RNNBase):
        setattr(module, name, tensor)  # keeps the module's flat list of weights in step
    else:
        table[name] = tensor
