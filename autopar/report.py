"""The plan in words, for people."""

from __future__ import annotations

from typing import Any

from autopar.ir.spec import Spec


def size_text(nbytes: float) -> str:
    """`1.5 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def time_text(seconds: float) -> str:
    """`12.3 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def report(program: Any) -> str:
    """Text of `ParallelProgram.report()`."""
    plan, ir, stage = program.plan, program.ir, program.stages[0]
    predicted, solver = program.predicted, program.solver
    lines = [
        f"{'training' if program.training else 'inference'} on {plan.ranks} ranks, mesh {stage.mesh}, chosen by "
        f"{plan.origin} ({solver['method']}, gap {solver['gap']:.2%}, {solver['variables_before']} variables reduced to "
        f"{solver['variables_after']})",
        f"{len(ir.calls)} calls of {len(ir.templates)} templates: "
        + ", ".join(f"{name}×{ir.multiplicity[name]}" for name in ir.templates),
        f"predicted: step {time_text(predicted.step_time_s)}, of which communication {time_text(predicted.comm_time_s)}; "
        f"peak {size_text(predicted.peak_bytes)} per rank ("
        + ", ".join(f"{k} {size_text(v)}" for k, v in program.account.resting_bytes.items())
        + ")",
    ]
    if plan.microbatches > 1:
        lines.append(f"{plan.microbatches} microbatches, gradients synchronised once per step")
    lines += _storage(stage)
    lines += _communication(program)
    if program.alternatives:
        lines.append("alternatives:")
        lines += [
            f"  {a.name}: step {time_text(a.predicted.step_time_s)}, {size_text(a.predicted.peak_bytes)} held"
            for a in program.alternatives
        ]
    if solver["unknown_ops"]:
        lines.append(f"ops without a rule, run whole on every rank: {', '.join(solver['unknown_ops'])}")
    for op, rule in solver["discovered_rules"].items():
        lines.append(f"rule of {op} found by experiment: {rule}")
    timings = program.timings
    lines.append("compiled in " + ", ".join(f"{k.removesuffix('_s')} {v:.2f} s" for k, v in timings.items()))
    return "\n".join(lines)


def _storage(stage: Any) -> list[str]:
    kinds: dict[tuple[Spec, Spec], list[Any]] = {}
    for p in stage.parameters.values():
        kinds.setdefault((p.storage, p.optimizer), []).append(p)
    lines = ["parameters:"]
    for (storage, optimizer), members in sorted(kinds.items(), key=lambda kv: -sum(p.type.nbytes for p in kv[1])):
        total = sum(p.type.nbytes for p in members)
        first = members[0].name + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        state = "" if optimizer == storage else f", gradient and optimizer state {optimizer}"
        lines.append(f"  {storage}{state}: {size_text(total)} in {first}")
    return lines


def _communication(program: Any) -> list[str]:
    totals: dict[tuple[str, str], list[float]] = {}
    for c in program.account.collectives:
        row = totals.setdefault((c.kind, c.axis), [0, 0.0, 0.0])
        row[0] += c.times
        row[1] += c.times * c.nbytes
        row[2] += c.time_s
    if not totals:
        return ["no communication"]
    return ["communication per step:"] + [
        f"  {kind} over {axis}: {int(n)} times, {size_text(nbytes)} in all, {time_text(seconds)}"
        for (kind, axis), (n, nbytes, seconds) in sorted(totals.items(), key=lambda kv: -kv[1][2])
    ]
