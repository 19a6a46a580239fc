"""Emit conversions between specs as lines, each conversion of a value once."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.ir.lowered import Line, Ref, RuntimeStep
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.lattice import Step

_SUFFIX = {
    "all_gather": "gathered",
    "slice": "sliced",
    "all_to_all": "exchanged",
    "all_reduce": "reduced",
    "reduce_scatter": "scattered",
    "to_partial": "masked",
}


_USED = ("rt", "call", "saved", "inputs", "torch", "aten", "ops", "attention", "rnn", "user_ops", *keyword.kwlist)


class Names:
    """Unique local names, none of which the emitted files use for something else."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = dict.fromkeys(_USED, 1)

    def fresh(self, stem: str) -> str:
        """`stem` as an identifier, or `stem_2`, `stem_3`, … when taken."""
        stem = re.sub(r"\W", "_", stem).lstrip("0123456789_") or "x"
        count = self._taken.get(stem, 0) + 1
        self._taken[stem] = count
        if count == 1:
            return stem
        name = f"{stem}_{count}"
        return self.fresh(name) if name in self._taken else self._claim(name)

    def take(self, name: str) -> None:
        """Keep `name` from being given."""
        self._taken.setdefault(name, 1)

    def _claim(self, name: str) -> str:
        self._taken[name] = 1
        return name


@dataclass(frozen=True)
class Gathered:
    """A parameter as a call wants it: steps from storage, dtype it is cast to before them (None: as stored), and the
    type and spec that come out. stem: of its local name. tier: where the shard rests ("": on the device)."""

    name: str
    stem: str
    steps: tuple[RuntimeStep, ...]
    dtype: torch.dtype | None
    type: TensorType
    wanted: Spec
    tier: str = ""

    @property
    def moves(self) -> bool:
        """Whether what is stored is not what is wanted, where it is wanted."""
        return bool(self.steps) or self.dtype is not None or bool(self.tier)


class Converter:
    """Appends conversion lines through `append`; equal conversions of one value are made once."""

    def __init__(self, pricer: Pricer, names: Names, append: Callable[[Line], None]) -> None:
        self.pricer, self.names, self.append = pricer, names, append
        self._made: dict[tuple[str, Spec], str] = {}

    def convert(
        self, name: str, stem: str, type_: TensorType, before: Spec, after: Spec, phase: str, source: str
    ) -> str:
        """Name of the value `name` (of spec `before`) in spec `after`."""
        current = name
        for step, following in path(self.pricer, type_, before, after):
            key = (current, following)
            if key not in self._made:
                made = self.names.fresh(f"{stem}_{_SUFFIX[step.kind]}")
                self.append(
                    Line(
                        (made,),
                        f"comm.{step.kind}",
                        (Ref(current), *_arguments(step)),
                        {},
                        (type_,),
                        (following,),
                        phase,
                        source,
                        stem,
                    )
                )
                self._made[key] = made
            current = self._made[key]
        return current


def path(
    pricer: Pricer, type_: TensorType, before: Spec, after: Spec, bucketed: bool = False
) -> list[tuple[Step, Spec]]:
    """The cheapest conversion; bucketed: of a value that travels in one message with others."""
    if before == after:
        return []
    ops = tuple(sorted({"sum", *(op for _, op in before.partial), *(op for _, op in after.partial)}))
    return pricer.lattice(type_, ops, bucketed).path(before, after)


def _arguments(step: Step) -> tuple[object, ...]:
    if step.kind == "all_to_all":
        return step.axis, step.to_dim, step.dim
    if step.kind in ("all_gather", "slice"):
        return step.axis, step.dim
    if step.kind == "reduce_scatter":
        return step.axis, step.dim, step.op
    return (step.axis, step.op) if step.kind == "all_reduce" else (step.axis,)


def runtime_steps(steps: list[tuple[Step, Spec]]) -> tuple[RuntimeStep, ...] | None:
    """Steps in the runtime's tables, or None when one of them has no table form."""
    found: list[RuntimeStep] = []
    for step, _ in steps:
        if step.kind == "slice":
            found.append(("shard", (step.axis,), step.dim))
        elif step.kind == "all_reduce":
            if found and found[-1][0] == "all_reduce":
                found[-1] = ("all_reduce", (*found[-1][1], step.axis))
            else:
                found.append(("all_reduce", (step.axis,)))
        elif step.kind in ("all_gather", "reduce_scatter"):
            found.append((step.kind, (step.axis,), step.dim))
        elif step.kind == "all_to_all":
            found.append(("all_to_all", (step.axis,), step.to_dim, step.dim))
        else:
            return None
    return tuple(found)
