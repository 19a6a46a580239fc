"""The answer to "what if": the program solved again, and the difference; or by how much what was asked for does not fit.

Nothing is captured or priced twice: a program is compiled again with what is known of it (`autopar.compiled.Known`), by the
compiler's own search, so the answer is the program that `autopar.compile` gives under the changed request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from autopar.cluster import ClusterSpec
from autopar.cluster.process import tensor_room
from autopar.compiled import Compiled
from autopar.errors import InfeasibleError
from autopar.ir.text import size_text, time_text
from autopar.options import Options
from autopar.plan import Plan
from autopar.request import Request
from autopar.what_if.changes import changed, changes_of, words_of
from autopar.what_if.difference import Difference, difference

P = TypeVar("P", bound=Compiled)
BEST = "best"
"""The program itself, beside others."""


@dataclass(frozen=True)
class NoFit:
    """A request that does not fit. short_bytes: missing on a device; limit_bytes: its memory, or that of tensors where the
    options say it; least_bytes: about as much as would do (is_bound: no less would). changes: the nearest ones that would do.
    error: all that the compiler says of it."""

    short_bytes: float
    limit_bytes: float
    least_bytes: float
    is_bound: bool
    changes: tuple[str, ...]
    error: InfeasibleError

    @property
    def sentence(self) -> str:
        """`does not fit: short by 3.1 GB of 24 GB; devices of 27.4 GB would do`."""
        would = "at least {} are needed" if self.is_bound else "devices of about {} would do"
        nearest = f"; or {self.changes[0]}" if self.changes else ""
        return (
            f"does not fit: short by {size_text(self.short_bytes)} of {size_text(self.limit_bytes)}; "
            f"{would.format(size_text(self.least_bytes))}{nearest}"
        )

    def facts(self) -> dict[str, Any]:
        """The answer as data."""
        return {
            "short_bytes": self.short_bytes,
            "limit_bytes": self.limit_bytes,
            "least_bytes": self.least_bytes,
            "is_bound": self.is_bound,
            "changes": list(self.changes),
        }


def no_fit(error: InfeasibleError, cluster: ClusterSpec, options: Options) -> NoFit:
    """The answer that an error of the search holds. Raises it where what is short is not memory."""
    shortage = error.shortage
    if shortage is None or shortage.short_bytes <= 0:
        raise error
    limit, per_byte = options.memory_bytes, 1.0
    if limit is None:
        device = min((device for _, device in cluster.devices), key=lambda device: device.memory_bytes)
        limit = device.memory_bytes
        per_byte = options.memory_fraction * (
            tensor_room(cluster, None, device, 1.0) - tensor_room(cluster, None, device, 0.0)
        )
    least = limit + shortage.short_bytes / per_byte
    return NoFit(least - limit, limit, least, not shortage.plan, tuple(map(str, error.alternatives)), error)


@dataclass(frozen=True, eq=False)
class WhatIf(Generic[P]):
    """An answer. change: in words. before: the program that it is compared with; program: the one under the change (None: nothing
    fits, and `refused` says what is short). solved_s: seconds that it took."""

    change: str
    before: P
    program: P | None
    refused: NoFit | None = None
    solved_s: float = 0.0

    @property
    def difference(self) -> Difference | None:
        """The difference from the program before; None where nothing fits."""
        return None if self.program is None else difference(self.before, self.program)

    @property
    def sentence(self) -> str:
        """`strategy=fsdp: 12 % slower, 8.1 GB less: +400 ms messages of parameters (most of all all_gather over dp)`."""
        found = self.difference
        said = found.sentence if found is not None else self.refused.sentence if self.refused is not None else ""
        return f"{self.change}: {said}"

    def report(self) -> str:
        """The answer in words: the sentence, seconds and bytes by cause, and what changed in the plan."""
        found = self.difference
        if found is None:
            return "\n".join([self.sentence, *(str(self.refused.error).splitlines() if self.refused else ())])
        steps = " → ".join(map(time_text, found.step_time_s))
        peaks = " → ".join(map(size_text, found.peak_bytes))
        lines = [self.sentence, f"step {steps}, of which"]
        lines += [f"  {_signed(s, time_text)} {cause}" for cause, s in found.seconds.items() if abs(s) >= 5e-7]
        lines += [f"peak {peaks} per rank, of which"]
        lines += [f"  {_signed(n, size_text)} {kind}" for kind, n in found.nbytes.items() if abs(n) >= 0.5]
        lines += ["plan:" if found.plan else "plan: the same"]
        return "\n".join([*lines, *(f"  {what}: {a} → {b}" if a else f"  {what}: {b}" for what, a, b in found.plan)])

    def facts(self) -> dict[str, Any]:
        """The answer as data, for JSON: change, sentence, and by name [before, after]; seconds and bytes are differences by
        cause. Where nothing fits what comes after is None, and no_fit says what is short."""
        before, found = self.before, self.difference
        own = before.decision.predicted.step_time_s, before.predicted.peak_bytes
        return {
            "change": self.change,
            "sentence": self.sentence,
            "fits": found is not None,
            "step_time_s": [*found.step_time_s] if found is not None else [own[0], None],
            "peak_bytes": [*found.peak_bytes] if found is not None else [own[1], None],
            "seconds": found.seconds if found is not None else {},
            "bytes": found.nbytes if found is not None else {},
            "plan": [{"what": what, "before": a, "after": b} for what, a, b in found.plan] if found is not None else [],
            "no_fit": self.refused.facts() if self.refused is not None else None,
            "solved_s": self.solved_s,
        }


def what_if(program: P, changes: Mapping[str, Any], compile_again: Callable[[Request], P]) -> WhatIf[P]:
    """The program with something changed. compile_again: meets a request. Raises InputError for what is no change, ClusterError,
    ConstraintError for pins that cannot be, and what else `compile` raises."""
    started, request = time.perf_counter(), changed(program.request, changes)
    words = words_of(changes)
    try:
        other = compile_again(request)
    except InfeasibleError as error:
        refused = no_fit(error, request.cluster, request.options)
        return WhatIf(words, program, None, refused, time.perf_counter() - started)
    return WhatIf(words, program, other, None, time.perf_counter() - started)


def compared(
    program: P, first: str, second: str, compile_again: Callable[[Request], P], with_plan: Callable[[Plan], P]
) -> WhatIf[P]:
    """The second of two programs beside the first, each `best`, a saved plan's path, or changes in words. with_plan: gives the
    program under a plan. Raises as `what_if` does, PlanError; InfeasibleError where the first does not fit."""

    def beside(words: str, before: P) -> WhatIf[P]:
        if words == BEST:
            return WhatIf(BEST, before, program)
        if Path(words).suffix == ".json":
            return WhatIf(Path(words).name, before, with_plan(Plan.load(words)))
        answer = what_if(program, changes_of(words), compile_again)
        return WhatIf(answer.change, before, answer.program, answer.refused, answer.solved_s)

    one = beside(first, program)
    if one.program is None:
        assert one.refused is not None
        raise one.refused.error
    other = beside(second, one.program)
    return (
        other
        if first == BEST
        else WhatIf(
            f"{other.change} instead of {one.change}", other.before, other.program, other.refused, other.solved_s
        )
    )


def _signed(amount: float, text: Callable[[float], str]) -> str:
    return f"{'+' if amount > 0 else '-'}{text(abs(amount))}"
