"""The cost of every call of a program on one mesh: the arrays that stages are cut by.

A program is planned and lowered once for a submesh, as if it all ran there; every line then belongs to the call that it
prepares, runs or follows, so an interval of calls costs the sum of its calls and no interval is ever profiled. A
template is priced once whatever its multiplicity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autopar.ir.lowered import LoweredStage
from autopar.ir.program import Program
from autopar.ir.resting import on_rank
from autopar.ir.setting import Setting
from autopar.passes.account.call_bytes import most_inside
from autopar.passes.account.stage import probe_of
from autopar.passes.memory.walk import held_by_call
from autopar.passes.price.bills import template_seconds
from autopar.passes.price.lines import gradient_work, line_costs
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.once import once
from autopar.plan import StagePlan


@dataclass(frozen=True, eq=False)
class Units:
    """(calls,) arrays: seconds of F, B and W for one microbatch, seconds once per step; bytes at rest, held for a
    microbatch in flight, and the most inside. boundary_s: to hand over what is alive before each call, both ways."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    weights_s: np.ndarray
    step_s: np.ndarray
    resting_bytes: np.ndarray
    held_bytes: np.ndarray
    peak_bytes: np.ndarray
    boundary_s: np.ndarray

    def at(self, calls: Sequence[int]) -> Units:
        """Call costs restricted to `calls`."""
        return Units(*(getattr(self, field.name)[list(calls)] for field in fields(Units)))


def measure(
    program: Program, stage: LoweredStage, plan: StagePlan, pricer: Pricer, rules: RuleBook, setting: Setting
) -> Units:
    """Units of a whole program lowered (with B and W apart) on one mesh."""
    n = len(program.calls)
    per_call = {
        name: template_seconds(t, plan.templates[t.planned_as], program.templates[t.planned_as], pricer, rules)
        for name, t in stage.templates.items()
    }
    seconds = {action: np.zeros(n) for action in "FBW"}
    prologue = (("F", function) for function in stage.prepare)
    functions = (*zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True), *prologue)
    for action, function in functions:
        numbers = [call.number for call in function.calls] if function is not None else []
        for cost in line_costs(function, stage, pricer, per_call) if numbers else ():  # to the call before or after it
            seconds[action][numbers[min(cost.when, len(numbers) - 1)]] += cost.non_overlapped_s
    peaks = {name: max(most_inside(f, stage.mesh) for f in t.functions) for name, t in stage.templates.items()}
    resting, held, step = np.zeros(n), np.zeros(n), np.zeros(n)
    readers: dict[str, list[int]] = {}
    for i, call in enumerate(program.calls):
        for name in call.params:
            readers.setdefault(name, []).append(i)
    work = gradient_work(stage, pricer, setting)
    for name, p in stage.parameters.items():
        i, *others = readers.get(name, [0])
        tiers = p.tiers | ({"parameters": ""} if others else {})  # shared by stages it stays (lower/pipeline.py)
        resting[i] += on_rank(p, stage.mesh, setting.kept).on_device(
            setting, [moves for moves, tier in tiers.items() if tier]
        )
        step[i] += work.get(name, 0.0)
    for i, nbytes in held_by_call(stage, probe_of(pricer)).items():
        held[i] = nbytes
    peak = np.array([peaks[call.template] for call in program.calls])
    return Units(seconds["F"], seconds["B"], seconds["W"], step, resting, held, peak, boundaries(program, pricer))


def boundaries(program: Program, pricer: Pricer) -> np.ndarray:
    """Seconds to send what is alive between calls l-1 and l, and the gradients back; ranks share the bytes."""
    return np.array([pricer.hand_over_s(b) if b else 0.0 for b in _alive_bytes(program) / pricer.mesh.size])


@once
def _alive_bytes(program: Program) -> np.ndarray:
    """(calls,) bytes of what is alive before each call, and of the gradients that come back."""
    alive = np.zeros(len(program.calls) + 1)
    for ref, readers in program.readers.items():
        if ref.kind != "call":
            continue
        last = max(i for i, _ in readers)
        type_ = program.type_of(ref)
        owner = program.template_of(program.calls[ref.index])
        directions = 2 if owner.tangents[ref.output] is not None and ref.index in program.backward_calls else 1
        alive[ref.index + 1 : last + 1] += directions * type_.nbytes
    return alive[:-1]
