"""What every call of a program costs on one mesh: the arrays that stages are cut by.

A program is planned and lowered once for a submesh, as if it all ran there; every line then belongs to the call that it
prepares, runs or follows, so an interval of calls costs the sum of its calls and no interval is ever profiled. A
template is priced once whatever its multiplicity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.lowered import Function, LoweredStage
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.passes.account.program import gradient_work, line_seconds, template_seconds
from autopar.passes.memory.sizes import inside, pinned_values, value_bytes
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
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


def measure(
    program: Program, stage: LoweredStage, plan: StagePlan, pricer: Pricer, rules: RuleBook, setting: Setting
) -> Units:
    """Units of a whole program lowered (with B and W apart) on one mesh."""
    n = len(program.calls)
    seconds = {
        name: template_seconds(t, plan.templates[name], program.templates[name], pricer, rules)
        for name, t in stage.templates.items()
    }
    rows = {kind: np.zeros(n) for kind in "FBW"}
    for kind, function in zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True):
        if function is not None:
            _spread(function, kind, rows[kind], seconds, stage, pricer)
    if stage.prepare is not None:
        _spread(stage.prepare, "F", rows["F"], seconds, stage, pricer)
    resting, held, peak = np.zeros(n), np.zeros(n), np.zeros(n)
    step = np.zeros(n)
    first: dict[str, int] = {}
    for i, call in enumerate(program.calls):
        for name in call.params:
            first.setdefault(name, i)
        t = stage.templates[call.template]
        peak[i] = max(inside(f, stage.mesh).peak for f in t.functions)
    work = gradient_work(stage, pricer, setting)
    for name, p in stage.parameters.items():
        i = first.get(name, 0)
        resting[i] += p.storage.local_bytes(p.type, stage.mesh)
        if p.contributions:
            shard = p.optimizer.local_bytes(p.type, stage.mesh)
            resting[i] += shard
            if not p.optimizer_tier:
                resting[i] += setting.optimizer.shard_bytes(p.type, shard, name)
            step[i] += work[name]
    for i, nbytes in _held(program, stage).items():
        held[i] = nbytes
    return Units(rows["F"], rows["B"], rows["W"], step, resting, held, peak, _boundaries(program, pricer))


def _spread(
    function: Function,
    kind: str,
    row: np.ndarray,
    seconds: dict[str, tuple[float, float, float]],
    stage: LoweredStage,
    pricer: Pricer,
) -> None:
    """Every line's seconds to the call it comes before (forward) or after (backward)."""
    known = {n: value_bytes(*ts, stage.mesh) for n, ts in function.arg_types.items()}
    numbers = [line.args[1] for line in function.lines if line.op.startswith("call.")]
    if not numbers:
        return
    position = 0
    for line in function.lines:
        if line.op.startswith("call."):
            row[line.args[1]] += seconds[line.args[0]]["FBW".index(kind)]
            position += 1
        else:
            row[numbers[min(position, len(numbers) - 1)]] += line_seconds(line, known, stage, pricer)
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            known[name] = value_bytes(type_, spec, stage.mesh)


def _held(program: Program, stage: LoweredStage) -> dict[int, float]:
    """Bytes that each call keeps for its backward; a value of the stage counts where it is first kept."""
    kept = {name: inside(t.forward, stage.mesh, t.stays) for name, t in stage.templates.items()}
    pinned = pinned_values(stage)
    sizes = {n: value_bytes(t, s, stage.mesh) for n, (t, s) in stage.forward.arg_types.items()}
    found: dict[int, float] = {}
    seen: set[str] = set()
    for line in stage.forward.lines:
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            sizes[name] = value_bytes(type_, spec, stage.mesh)
        if line.op == "call.forward" and line.kwargs["keep"]:
            names = pinned[line.outs[-1]] - seen
            seen |= names
            found[line.args[1]] = kept[line.args[0]].kept_bytes + sum(sizes.get(n, 0.0) for n in names)
    return found


def _boundaries(program: Program, pricer: Pricer) -> np.ndarray:
    """Seconds to send what is alive between calls l-1 and l, and the gradients back; ranks share the bytes."""
    alive = np.zeros(len(program.calls) + 1)
    for ref, readers in program.readers.items():
        if ref.kind != "call":
            continue
        last = max(i for i, _ in readers)
        type_ = program.type_of(ref)
        owner = program.template_of(program.calls[ref.index])
        ways = 2 if owner.tangents[ref.output] is not None and ref.index in program.backward_calls else 1
        alive[ref.index + 1 : last + 1] += ways * type_.nbytes / pricer.mesh.size
    return np.array([pricer.hand_over_s(b) if b else 0.0 for b in alive[:-1]])
