"""Tensors that an exported graph reads and that are no parameter, buffer or input: numbers in `forward`, attributes.

A program holds them as buffers. Their names say what they hold, so programs of the same model for other shapes have the same
names for the same constants, and for no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import CaptureError

Kinds = dict[str, tuple[str, Any]]
"""The meaning of every placeholder of a graph: a kind, and which one of it."""


def check_constants(constants: Mapping[str, torch.Tensor]) -> None:
    """Raises CaptureError for a value that was computed while tracing and is no part of the graph."""
    for name, tensor in constants.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} is a sparse tensor ({tensor.layout}); a program holds dense tensors: convert it (to_dense)"
            )
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a value of shape {tuple(tensor.shape)} ({name}) was computed outside the graph, so it would be lost; compute "
                "it with torch ops from the inputs (not through .data, numpy or a second derivative)"
            )


def named_by_content(kinds: Kinds, constants: Mapping[str, torch.Tensor]) -> tuple[Kinds, dict[str, torch.Tensor]]:
    """Placeholders and constants with names that follow from what the constants hold."""
    read = [name for kind, name in kinds.values() if kind == "constant" and name in constants]
    names = {name: f"constant_{_digest(constants[name])}" for name in read}
    renamed = {
        node: (kind, names.get(which, which) if kind == "constant" else which) for node, (kind, which) in kinds.items()
    }
    return renamed, {names.get(name, name): tensor for name, tensor in constants.items()}


def same_constants(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two traces have the same constants under the same names."""
    first, second = ({n: _digest(t) for n, t in held.items() if _has_values(t)} for held in (one, other))
    return first == second


def _has_values(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _digest(tensor: torch.Tensor) -> str:
    """A hash of shape, dtype and values; a meta tensor has none."""
    said = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    if tensor.is_meta or not tensor.numel():
        return hashlib.sha256(said).hexdigest()[:12]
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(said + flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
