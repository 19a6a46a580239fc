"""The lines of a lowered function: one frozen dataclass per kind, local values by name.

A template's function has two kinds of lines, an op on blocks (`Compute`) and a step between specs (`Convert`), which may be
in two parts (`Start` and `Wait`) with others between them. A stage's function calls its templates and has all that happens
between the calls: parameters gathered, gradients handed over, buffers, memory tiers. Two ranks, a row-parallel product inside
a template, and what its stage says about it:

    Compute("autopar.linear", {"x": Ref("x"), "w": Ref("w")}, outs=("y",), …)       y = ops.linear(x, w)
    Convert("y", Step("all_reduce", "tp"), outs=("y_reduced",), …)                  y_reduced = rt.comm.all_reduce(y, 'tp')
    Start(Convert(…), outs=("y_coming",))                                           y_coming = rt.comm.start_all_reduce(y, 'tp')
    Wait("y_coming", Convert(…), outs=("y_reduced",), …)                            y_reduced = y_coming.wait()

    Prefetch(GatherKey(3), (ParameterGather("w", …),))                              rt.prefetch('3f', […])
    TakeParameters(GatherKey(3), outs=("w_3f",))                                    w_3f, = rt.take('3f')
    CallForward("block", 3, (Ref("w_3f"),), ("x",), outs=("y_3", "saved_3"))        y_3, saved_3 = block_forward(…)

Every line knows the global type and the Spec of what it makes, so that the checker can type it again, and where in the
model it comes from. Whoever treats kinds differently matches on the classes; the names of kinds are for files and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.sent import Sent
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.ir.types import TensorType

# --- what lines speak of


@dataclass(frozen=True)
class Ref:
    """A local value by name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Stored:
    """A parameter's stored shard, by the parameter's name. narrow: its copy in lower precision is meant."""

    name: str
    narrow: bool = False


@dataclass(frozen=True)
class Site:
    """Place of a random op inside its template; emitted as a key of the current step, microbatch and call."""

    number: int


@dataclass(frozen=True)
class GatherKey:
    """Parameters gathered together: those of one call (by its number in the program), for forward or for backward."""

    call: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.call}{'b' if self.backward else 'f'}"


@dataclass(frozen=True)
class ParameterGather:
    """A parameter, the dtype it is cast to (None: as stored), and the steps from its storage to where a call uses it."""

    name: str
    steps: tuple[RuntimeStep, ...]
    dtype: torch.dtype | None


# --- lines


@dataclass(frozen=True, kw_only=True)
class Line:
    """The fields of every line. outs: names of what it makes ("_": not used); types, specs: global type and spec per
    out (None: no tensor, or not used). phase: F, B or W. source: where in the model it comes from."""

    outs: tuple[str, ...] = ()
    types: tuple[TensorType | None, ...] = ()
    specs: tuple[Spec | None, ...] = ()
    phase: str = "F"
    source: str = ""

    def reads(self) -> Iterator[str]:
        """Names of the local values that the line reads, in order."""
        yield from ()

    def made(self) -> Iterator[tuple[str, TensorType | None, Spec | None]]:
        """Name, type and spec of everything that the line makes and describes."""
        yield from zip(self.outs, self.types, self.specs, strict=False)


@dataclass(frozen=True)
class ValueLine(Line):
    """A line that reads one value, or one list of what a call saved."""

    value: str

    def reads(self) -> Iterator[str]:
        yield self.value


@dataclass(frozen=True)
class Compute(Line):
    """`outs` = op(kwargs), on blocks. Tensors among the arguments are Refs. node: the template's graph node, if it is one.

    carried: mesh axes that take a choice with messages (`autopar.ir.rule.Carried`), and which; sent: these messages. piece: of an
    op that has one of so many pieces of its blocks, the factor of its rule that is cut for that, and how many (None: it has
    all).
    """

    op: str
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    node: str = ""
    carried: tuple[tuple[str, str], ...] = ()
    sent: tuple[Sent, ...] = ()
    piece: tuple[str, int] | None = None

    @property
    def stops(self) -> tuple[Sent, ...]:
        """The messages for which the op stops where it is suspended."""
        return tuple(sent for sent in self.sent if sent.after is not None)

    @cached_property
    def _operands(self) -> tuple[str, ...]:
        return tuple(_refs_in(list(self.kwargs.values())))

    def reads(self) -> Iterator[str]:
        return iter(self._operands)


@dataclass(frozen=True)
class Convert(ValueLine):
    """One step of a value to another spec. node: the value of the template that is converted, or a local name. whole: the length
    of a dim that is gathered from blocks of unequal length."""

    step: Step
    node: str = ""
    whole: int | None = None


@dataclass(frozen=True)
class Start(Line):
    """A conversion whose message sets out, or an op that is run until it stops for a message of its own. outs: a handle, which
    the line's Wait takes; lines between run meanwhile."""

    line: Convert | Compute

    def reads(self) -> Iterator[str]:
        yield from self.line.reads()


@dataclass(frozen=True)
class GoOn(ValueLine):
    """An op that was started is run until it stops for a message again. value: the handle; stop: number of that message among
    those for which it stops."""

    line: Compute
    stop: int = 1


@dataclass(frozen=True)
class Wait(ValueLine):
    """The end of a line that was started: its values are there. value: the handle."""

    line: Convert | Compute


@dataclass(frozen=True)
class Cut(ValueLine):
    """Views of a value's block on every rank, in equal pieces along a dim (`autopar.passes.lower.pieces`). outs: the pieces."""

    dim: int


@dataclass(frozen=True)
class Join(Line):
    """The value whose blocks, along a dim, are these pieces one after another; dim None: which is their sum."""

    pieces: tuple[str, ...]
    dim: int | None

    def reads(self) -> Iterator[str]:
        yield from self.pieces


@dataclass(frozen=True)
class Prefetch(Line):
    """Start to gather the parameters of a call."""

    key: GatherKey
    gathers: tuple[ParameterGather, ...]


@dataclass(frozen=True)
class TakeParameters(Line):
    """Wait for the parameters that a Prefetch of the same key started to gather."""

    key: GatherKey


@dataclass(frozen=True)
class TemplateCall(Line):
    """A call of one of a template's functions; number: of the call in the whole program. action: which one, F, B or W."""

    template: str
    number: int
    action: ClassVar[str]


@dataclass(frozen=True)
class CallForward(TemplateCall):
    """A template's forward. keeps: whether the last of `outs` is the list of what backward needs."""

    params: tuple[Ref | Stored, ...]
    inputs: tuple[str, ...]
    keeps: bool = False
    action = "F"

    def reads(self) -> Iterator[str]:
        yield from _refs_in(self.params)
        yield from self.inputs


@dataclass(frozen=True)
class CallBackward(TemplateCall):
    """A template's backward, from the list that its forward saved and the gradients of its outputs."""

    saved: str
    params: tuple[Ref | Stored, ...]
    tangents: tuple[str, ...]
    action = "B"

    def reads(self) -> Iterator[str]:
        yield self.saved
        yield from _refs_in(self.params)
        yield from self.tangents


@dataclass(frozen=True)
class CallWeights(TemplateCall):
    """A template's gradients of parameters, from the list that its backward left."""

    later: str
    action = "W"

    def reads(self) -> Iterator[str]:
        yield self.later


@dataclass(frozen=True)
class SeedGradient(Line):
    """The gradient of the loss, where backward begins."""


@dataclass(frozen=True)
class ZeroGradient(Line):
    """The gradient of an output that nobody used."""


@dataclass(frozen=True)
class AddGradient(ValueLine):
    """A gradient goes to the store. owned: nobody else holds the tensor."""

    parameter: str
    owned: bool = False


@dataclass(frozen=True)
class SumLoss(ValueLine):
    """The loss, or a count of what rows chose, summed over axes in a message beside the gradients."""

    axes: tuple[str, ...]


@dataclass(frozen=True)
class ReadBuffer(Line):
    """A buffer's value. copy: the buffer changes before everybody has read the value."""

    buffer: str
    copy: bool = False


@dataclass(frozen=True)
class WriteBuffer(ValueLine):
    """A buffer's new value: written "now", or at the end of the step, where microbatches have the "same" one or "sum" it up."""

    buffer: str
    when: Literal["now", "same", "sum"] = "now"


@dataclass(frozen=True)
class ParkSaved(ValueLine):
    """The values at `places` of the list that a call of `template` saved go to a memory tier."""

    places: tuple[int, ...]
    tier: str
    template: str


@dataclass(frozen=True)
class FetchSaved(ValueLine):
    """Start to bring back what a call parked."""


@dataclass(frozen=True)
class AwaitSaved(ValueLine):
    """Wait for what FetchSaved started to bring back."""


_LABELS: dict[type[Line], str] = {
    Cut: "cut",
    Join: "join",
    Prefetch: "params.prefetch",
    TakeParameters: "params.take",
    CallForward: "call.forward",
    CallBackward: "call.backward",
    CallWeights: "call.weights",
    SeedGradient: "grads.seed",
    ZeroGradient: "grads.zero",
    AddGradient: "grads.add",
    SumLoss: "grads.sum",
    ReadBuffer: "buffer.read",
    WriteBuffer: "buffer.write",
    ParkSaved: "tier.park",
    FetchSaved: "tier.fetch",
    AwaitSaved: "tier.ready",
}


def label(line: Line) -> str:
    """The name of a line in files and messages: its op, `comm.<kind>` of a step, or the name of its kind."""
    match line:
        case Compute(op=op):
            return op
        case Convert(step=step):
            return f"comm.{step.kind}"
        case Start(line=Convert(step=step)):
            return f"comm.start_{step.kind}"
        case Start(line=Compute(op=op)):
            return f"start {op}"
        case GoOn(line=Compute(op=op)):
            return f"go on {op}"
        case Wait(line=Convert()):
            return "comm.wait"
        case Wait(line=Compute(op=op)):
            return f"wait {op}"
        case Join(dim=None):
            return "add pieces"
    return _LABELS[type(line)]


def _refs_in(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _refs_in(v)


# --- functions


@dataclass(frozen=True)
class Function:
    """A straight-line function: argument names with types and specs, lines, names returned (None: no gradient).

    Every name but "_" is given once.
    """

    name: str
    args: tuple[str, ...]
    lines: tuple[Line, ...]
    returns: tuple[str | None, ...]
    arg_types: dict[str, tuple[TensorType, Spec]] = field(default_factory=dict, hash=False)

    @property
    def calls(self) -> tuple[TemplateCall, ...]:
        """The calls of templates."""
        return tuple(line for line in self.lines if isinstance(line, TemplateCall))

    @property
    def types(self) -> dict[str, TensorType | None]:
        """The global type of every value that has one, by name."""
        types: dict[str, TensorType | None] = {name: type_ for name, (type_, _) in self.arg_types.items()}
        return types | {name: type_ for line in self.lines for name, type_, _ in line.made()}

    def local_bytes(self, mesh: Mesh) -> dict[str, float]:
        """Bytes of every value on one rank, by name; lists of saved values are left out."""
        sizes = {name: value_bytes(type_, spec, mesh) for name, (type_, spec) in self.arg_types.items()}
        for line in self.lines:
            for name, type_, spec in line.made():
                sizes[name] = value_bytes(type_, spec, mesh)
        return sizes


def value_bytes(type_: TensorType | None, spec: Spec | None, mesh: Mesh) -> float:
    """Bytes of a value on one rank; none of what is no tensor."""
    return 0.0 if type_ is None or spec is None else float(spec.local_bytes(type_, mesh))
