"""The lowered program: straight lines over local tensors, the same on every rank of a stage.

Each line is one op on blocks, one collective, or (at step level) one use of a template's function. Lines know the
global type and the Spec of what they make, so the checker can type them again, and where in the model they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType

RuntimeStep = tuple[Any, ...]


@dataclass(frozen=True)
class Ref:
    """A local value by name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Line:
    """`outs` = op(args, kwargs). op: an op name, `comm.<kind>`, or at step level `call.<…>`, `params.<…>`, `grads.<…>`.

    types, specs: global type and spec per out (None: not a tensor, or not used). phase: F, B, W.
    """

    outs: tuple[str, ...]
    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    types: tuple[TensorType | None, ...] = ()
    specs: tuple[Spec | None, ...] = ()
    phase: str = "F"
    source: str = ""
    node: str = ""

    def reads(self) -> Iterator[str]:
        """Names of the values that the line reads, in order."""
        yield from refs_in(self.args)
        yield from refs_in(tuple(self.kwargs.values()))


def refs_in(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from refs_in(v)


@dataclass(frozen=True)
class Function:
    """A straight-line function: argument names with types and specs, lines, names returned (None: no gradient)."""

    name: str
    args: tuple[str, ...]
    lines: tuple[Line, ...]
    returns: tuple[str | None, ...]
    arg_types: dict[str, tuple[TensorType, Spec]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class LoweredTemplate:
    """forward(params…, inputs…) -> outputs…, saved; backward(saved, params…, tangents…) -> gradients."""

    name: str
    forward: Function
    backward: Function | None
    saved: tuple[str, ...]
    random: bool
    outputs: tuple[Spec, ...]
    input_grads: tuple[Spec | None, ...]
    param_grads: tuple[Spec | None, ...]
    late_params: tuple[int, ...]


@dataclass(frozen=True)
class StoredParameter:
    """How one parameter rests: spec, the finer spec of gradient and optimizer state, and the steps between them."""

    name: str
    type: TensorType
    storage: Spec
    optimizer: Spec
    trainable: bool
    regather: tuple[RuntimeStep, ...]
    contributions: int
    reduce: tuple[RuntimeStep, ...]


@dataclass(frozen=True)
class LoweredStage:
    """One stage's program: functions of its templates and the step that calls them."""

    mesh: Mesh
    templates: dict[str, LoweredTemplate]
    step: Function
    parameters: dict[str, StoredParameter]
    buffers: dict[str, TensorType]
    inputs: tuple[tuple[str, TensorType, Spec], ...]
    outputs: tuple[tuple[str, TensorType, Spec], ...]
    training: bool
    microbatches: int
