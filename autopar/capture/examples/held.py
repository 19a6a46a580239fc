"""The parameters and buffers that several modules have together, each under one name.

A program that runs several modules holds the tensors of all of them once. They are told apart by identity, so what modules share
is one, and named as the first module, the one that `compile` was called with, names them; what another module alone has is
`NAME.its own name` there, NAME being that of the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.errors import InputError
from autopar.ir.program import Buffer, Parameter
from autopar.ir.types import TensorType


@dataclass(frozen=True, eq=False)
class Held:
    """The tensors of all modules of a program. modules: the first, and those of entries by the entries' names."""

    first: nn.Module
    others: Mapping[str, nn.Module] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, shared ones under each of the names that the first module has for them. Raises InputError where the first
        module has a tensor of the name that another module's would get."""
        held = _tensors(self.first)
        known = {id(tensor) for tensor in held.values()}
        for entry, module in self.others.items():
            for name, tensor in _tensors(module).items():
                if id(tensor) not in known:
                    known.add(id(tensor))
                    if f"{entry}.{name}" in held:
                        raise InputError(
                            f"the model has a tensor {entry}.{name} of its own, as that of entries[{entry!r}] would be called; "
                            "give the entry another name"
                        )
                    held[f"{entry}.{name}"] = tensor
        return held

    def names(self, module: nn.Module) -> dict[str, str]:
        """The names of a module's tensors here, by its own."""
        names: dict[int, str] = {}
        for name, tensor in self.tensors().items():
            names.setdefault(id(tensor), name)
        return {own: names[id(tensor)] for own, tensor in _tensors(module).items()}

    def parameters(self) -> dict[str, Parameter]:
        """The parameters, each once, by name."""
        found: dict[int, Parameter] = {}
        for name, tensor in self.tensors().items():
            if isinstance(tensor, nn.Parameter):
                known = found.get(id(tensor), Parameter(name, TensorType.of(tensor), tensor.requires_grad))
                aliases = (*known.aliases, name) if known.name != name else ()
                found[id(tensor)] = Parameter(known.name, known.type, known.trainable, aliases)
        return {parameter.name: parameter for parameter in found.values()}

    def buffers(self) -> dict[str, Buffer]:
        """The buffers, by name."""
        persistent = {id(t) for m in (self.first, *self.others.values()) for t in m.state_dict(keep_vars=True).values()}
        return {
            name: Buffer(name, TensorType.of(tensor), id(tensor) in persistent)
            for name, tensor in self.tensors().items()
            if not isinstance(tensor, nn.Parameter)
        }


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, shared ones under each of their names, and buffers."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
