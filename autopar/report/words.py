"""The plan in words, for people."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from autopar.capture.examples.trees import shapes_text
from autopar.codegen.computed_alike import computed_alike
from autopar.compiled import Compiled
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.program import Program
from autopar.ir.spec import Spec
from autopar.ir.text import calls_text, size_text, time_text
from autopar.passes.account.spent import spent
from autopar.passes.place import PROVEN
from autopar.passes.search.placement import GAIN, placement_gain
from autopar.report.answer import energy_line, room_facts, spent_text, why_not, work_facts, work_text
from autopar.report.long_run import DAYS, long_run
from autopar.runtime.comm.mesh import Shares


def no_faster(step_s: Mapping[int, float]) -> list[str]:
    """A line for every number of ranks whose steps are predicted to be no shorter than on fewer. step_s: by ranks."""
    lines = []
    for ranks in sorted(step_s)[1:]:
        best = min((fewer for fewer in step_s if fewer < ranks), key=lambda fewer: (step_s[fewer], fewer))
        if step_s[ranks] >= step_s[best]:
            lines.append(
                f"a step on {ranks} ranks is predicted to take {time_text(step_s[ranks])}, no less than the "
                f"{time_text(step_s[best])} on {best}; a run that is given {ranks} would gain nothing by them"
            )
    return lines


def report(program: Compiled) -> str:
    """Text of `ParallelProgram.report()`."""
    plan, ir = program.plan, program.ir
    predicted, solver = program.predicted, program.solver
    where = f"mesh {program.stages[0].mesh}" if len(program.stages) == 1 else plan.show_meshes()
    lines = [
        f"{'training' if program.training else 'inference'} on {plan.ranks} ranks, {where}, chosen by "
        f"{plan.origin} ({solver.method}, gap {solver.gap:.2%}, {solver.variables_before} variables reduced to "
        f"{solver.variables_after})",
        f"{len(ir.calls)} calls of {len(ir.templates)} templates: "
        + ", ".join(f"{name}×{ir.multiplicity[name]}" for name in ir.templates),
        f"predicted: step {time_text(predicted.step_time_s)}, of which communication {time_text(predicted.comm_time_s)}; "
        f"peak {size_text(predicted.peak_bytes)} per rank ("
        + ", ".join(f"{k} {size_text(v)}" for k, v in program.peak_kinds.items() if v >= 0.5)
        + ")",
        *_room(program),
        f"rate: {work_text(work_facts(program))}",
        *filter(None, [energy_line(program)]),
        f"a step is {spent_text(spent(program.account))}",
        *_idle(program),
        *_shares(program),
    ]
    if plan.precision:
        lines.append(
            f"computed in {plan.precision} with {_masters(ir)} parameters, gradient sums and optimizer state; norms, softmax and "
            "losses in float32"
        )
    if plan.gradient_compression:
        trained = [p for stage in program.stages for p in stage.parameters.values() if p.contributions]
        lines.append(
            f"{sum(bool(p.compression) for p in trained)} of {len(trained)} gradients travel as {plan.gradient_compression}, as "
            "was asked for; verify leaves that out"
        )
    on_gpus = program.cluster.device(0).runs_as.type != "cpu" and not program.options.cuda_graphs
    if program.options.compiler == "inductor" or (program.options.compiler == "auto" and on_gpus):
        lines.append(
            "what is between messages is compiled by inductor when the program starts; predictions are for the program as it is "
            "written"
        )
    if program.options.matmul_precision != "highest":
        lines.append(
            f"products of float32 in {program.options.matmul_precision!r} precision (torch.set_float32_matmul_precision), priced "
            "as TF32 on devices that have it"
        )
    if any(p.narrow for stage in program.stages for p in stage.parameters.values()):
        lines.append("parameters are cast once a step: their copies in lower precision rest beside them")
    if program.options.cuda_graphs:
        lines.append(
            "on a GPU forward and backward are captured as a CUDA graph where they can be, which the program says when it "
            "starts; predictions are for the program as it is written"
        )
    if plan.order:
        lines.append(
            f"causal sequences in zigzag order of {2 * plan.order} chunks: each of {plan.order} blocks has one from the "
            "front and one from the back, so all do as much"
        )
    if plan.microbatches > 1:
        lines.append(f"{plan.microbatches} microbatches, {_synchronised(program)}" + _coupled(ir))
    if len(program.stages) > 1:
        lines += _pipeline(program)
    for stage in program.stages[:1] if len({s.mesh.axes for s in program.stages}) == 1 else program.stages:
        lines += _storage(stage)
    lines += _tiers(program)
    lines += _failures(program)
    lines += _communication(program)
    lines += _placement(program)
    lines += _drift(program)
    lines += _forms(program)
    if program.alternatives:
        lines.append("alternatives:")
        for a in program.alternatives:
            step, held = time_text(a.predicted.step_time_s), size_text(a.predicted.peak_bytes)
            lines.append(f"  {a.name}: step {step}, {held} held; {why_not(a, program)}")
    if solver.left_out:
        lines.append(f"the search was ended before it had looked at all {', '.join(solver.left_out)}")
    if solver.unknown_ops:
        lines.append(f"ops without a rule, run whole on every rank: {', '.join(solver.unknown_ops)}")
    if path := program.captured.exported.loss_path:
        lines.append(f"trained on {path}, the only scalar with a gradient that the model returns")
    for known in program.captured.exported.known_blocks:
        lines.append(f"{known}: traced by a forward that was proven to give its values and gradients in float64")
    if program.captured.exported.selects:
        lines.append("rows that a mask selects are computed in their places, beside the rows that it leaves out")
    for line in program.captured.exported.followed:
        lines.append(f"goes the way of the example batch, and checks that every batch does: {line}")
    for op, rule in solver.discovered_rules.items():
        lines.append(f"rule of {op} found by experiment: {rule}")
    timings = program.timings
    lines.append("compiled in " + ", ".join(f"{k.removesuffix('_s')} {v:.2f} s" for k, v in timings.items()))
    return "\n".join(lines)


def _idle(program: Compiled) -> list[str]:
    """The line about ranks that the plan has no place for."""
    ranks, used = program.cluster.size, program.plan.ranks
    if used == ranks:
        return []
    on_all = [a.predicted.step_time_s for a in program.alternatives if a.plan.ranks == ranks]
    why = f": the best plan found for all of them takes {time_text(min(on_all))} a step" if on_all else ""
    which = f"rank {used}" if ranks - used == 1 else f"ranks {used} to {ranks - 1}"
    return [f"idle: {which} of {ranks}{why}"]


def _shares(program: Compiled) -> list[str]:
    """The lines about axes along which ranks hold blocks of unequal size."""
    lines: dict[str, None] = {}
    for stage in program.stages:
        for axis, size in stage.mesh.axes:
            for units in size.units if isinstance(size, Shares) else ():
                runs = [(n, len(list(alike))) for n, alike in groupby(units)]
                held = ", ".join(str(n) if times == 1 else f"{n} (×{times})" for n, times in runs[:8])
                more = ", …" if len(runs) > 8 else ""
                lines[f"shares: of every {sum(units)} indices along {axis} ranks hold {held}{more}"] = None
    return [*lines]


def _drift(program: Compiled) -> list[str]:
    """The lines about what ranks compute alike, of which GPUs would get other bits."""
    alike = computed_alike(program.lowered)
    lines = []
    for always in (False, True):
        if ops := sorted(
            {f"{one.op.removesuffix('.default')} along {one.axis}" for one in alike if one.always is always}
        ):
            what = (
                "GPUs have no kernels in a fixed order for that, so copies of parameters may drift apart (--recheck N says so)"
                if always
                else "on GPUs by kernels in a fixed order (torch.use_deterministic_algorithms), which is not priced"
            )
            lines.append(f"ranks compute alike: {', '.join(ops)}: {what}")
    return lines


def _forms(program: Compiled) -> list[str]:
    """The lines about a step for batches of every shape, and about every other step."""
    lines = []
    if program.buckets:
        lines += ["buckets, with the same parameters:", *map(_form, program.of_buckets)]
    for name, entry in program.entries.items():
        lines += [f"entry {name}, with the same parameters:", *map(_form, entry.of_buckets)]
    return lines


def _form(one: Compiled) -> str:
    """The line about a step for batches of one shape."""
    own = one.decision.predicted
    return (
        f"  {shapes_text(one.request.inputs)}: {one.plan.show_meshes()}; step {time_text(own.step_time_s)}, peak "
        f"{size_text(own.peak_bytes)}"
    )


def _masters(ir: Program) -> str:
    """Dtypes that parameters are stored in."""
    return " and ".join(dict.fromkeys(str(p.type.dtype).removeprefix("torch.") for p in ir.parameters.values()))


def _synchronised(program: Compiled) -> str:
    """How often gradients are reduced in a step."""
    trained = [p for stage in program.stages for p in stage.parameters.values() if p.contributions]
    often = sum(p.by_microbatch for p in trained)
    if not often:
        return "gradients synchronised once per step"
    which = "gradients" if often == len(trained) else f"{often} of {len(trained)} gradients"
    rest = "" if often == len(trained) else ", the others once per step"
    return f"{which} reduced after each, so that shards of them rest in between{rest}"


def _coupled(ir: Program) -> str:
    if ir.microbatched is None or not ir.microbatched.separate:
        return ""
    return " (the model's statistics couple the batch: each microbatch counts as a batch of its own)"


def _pipeline(program: Compiled) -> list[str]:
    """Stages, what they take and hold, and what the schedule loses."""
    timeline, lowered = program.account.timeline, program.lowered
    lines = [
        f"schedule {program.plan.schedule}: {time_text(timeline.makespan_s)} for {program.plan.microbatches} microbatches, "
        f"{timeline.bubble_fraction:.1%} idle"
    ]
    for g, (stages, peak) in enumerate(zip(lowered.graph.groups, program.account.peaks, strict=True)):
        for s in stages:
            plan, counted = program.plan.stages[s], program.account.stages[s]
            first, last = plan.calls
            paths = [c.path for c in program.ir.calls[first:last] if c.path]
            span = f" ({paths[0]} … {paths[-1]})" if paths else ""
            times = ", ".join(f"{k} {time_text(v)}" for k, v in counted.seconds.items() if v)
            ranks = f"ranks {plan.mesh.offset} to {plan.mesh.offset + plan.mesh.size - 1}, {plan.mesh}"
            line = f"  stage {s} on {ranks}: calls {calls_text(first, last)}{span}"
            lines.append(f"{line}; {times}" if times else line)
        lines.append(f"    group {g}: peak {size_text(peak)} per rank")
    sent = sum(t.type.nbytes for t in lowered.transfers)
    lines.append(f"  between stages: {len(lowered.transfers)} transfers, {size_text(sent)} per microbatch")
    return lines


def _placement(program: Compiled) -> list[str]:
    """The lines about nodes that ranks are moved to, where they are not in order."""
    placement = program.plan.placement
    if not placement:
        proof = _proof_of_placement(program)
        return [f"placement: ranks in order{proof}"] if program.solver.placement_gap > GAIN else []
    listed = program.request.cluster
    level = listed.levels[0]
    nodes: dict[int, list[int]] = {}
    for physical, logical in enumerate(placement):
        nodes.setdefault(level.group_of(physical), []).append(logical)
    shown = " | ".join(", ".join(map(str, sorted(ranks))) for ranks in list(nodes.values())[:8])
    line = f"placement: {level.name}s run ranks {shown}{' | …' if len(nodes) > 8 else ''}; "
    if not listed.homogeneous_devices:
        kinds = ", then ".join(device.name for _, device in program.cluster.devices)
        return [f"{line}ranks count through {kinds}" + _proof_of_placement(program)]
    gain = placement_gain(program.plan, program.lowered, program.account, listed)
    return [
        f"{line}what is sent takes {gain:.0%} less of the links, each byte weighed by how slow its link is, than with ranks in "
        "order" + _proof_of_placement(program)
    ]


def _proof_of_placement(program: Compiled) -> str:
    """How near the placement is to the best one, where this compilation looked for it."""
    gap = program.solver.placement_gap
    if not program.solver.placed_by:
        return ""
    return " (no placement is cheaper)" if gap <= PROVEN else f" (at most {gap:.1%} above the cheapest)"


def _storage(stage: LoweredStage) -> list[str]:
    kinds: dict[tuple[Spec, Spec], list[StoredParameter]] = {}
    for p in stage.parameters.values():
        kinds.setdefault((p.storage, p.optimizer), []).append(p)
    lines = ["parameters:"]
    for (storage, optimizer), members in sorted(kinds.items(), key=lambda kv: -sum(p.type.nbytes for p in kv[1])):
        total = sum(p.type.nbytes for p in members)
        first = members[0].name + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        state = "" if optimizer == storage else f", gradient and optimizer state {optimizer}"
        lines.append(f"  {storage}{state}: {size_text(total)} in {first}")
    return lines


def _failures(program: Compiled) -> list[str]:
    """The lines about failures: what they take of a long run, and how often to save."""
    known = long_run(program)
    if known is None:
        return []
    return [
        f"failures: one every {time_text(known.failures.mtbf_s)} on these {program.plan.ranks} devices; saving every "
        f"{known.save_every} steps ({time_text(known.interval_s)}), {known.goodput:.1%} of the time of {DAYS} days of work is "
        f"work that stays ({known.outcome.failures} failures, {time_text(known.outcome.lost_s)} of work done again)"
    ]


def _room(program: Compiled) -> list[str]:
    """The line about what a process takes of its device beside tensors, on the rank that takes most; none on CPUs."""
    room = room_facts(program)
    causes = ", ".join(f"{cause} {size_text(n)}" for cause, n in room.causes.items() if n >= 0.5)
    return [f"  with {causes}: {size_text(room.needed_bytes)} of {size_text(room.device_bytes)}"] if causes else []


def _tiers(program: Compiled) -> list[str]:
    """The lines about memory tiers: what rests there, and what moving it costs."""
    counted, lines = program.account, []
    for tier in sorted({tier for peaks in counted.tier_peaks for tier in peaks}):
        peak = max(peaks.get(tier, 0.0) for peaks in counted.tier_peaks)
        had = program.cluster.pace(0, program.cluster.size).tier(tier).capacity_bytes
        lines.append(f"memory tier {tier}: {size_text(peak)} per rank, of {size_text(had)}")
    for kind, tier in sorted({(move.kind, move.tier) for move in counted.moves}):
        moves = [m for m in counted.moves if (m.kind, m.tier) == (kind, tier)]
        worst = max(moves, key=lambda m: m.time_s)
        lines.append(
            f"  {kind}: {size_text(worst.nbytes)} moved per step in {time_text(worst.time_s)}, of which "
            f"{time_text(worst.non_overlapped_s)} add to the step"
        )
    return lines


def _communication(program: Compiled) -> list[str]:
    totals: dict[tuple[str, str], list[float]] = {}
    for c in program.account.collectives:
        row = totals.setdefault((c.kind, c.axis), [0, 0.0, 0.0])
        row[0] += c.times
        row[1] += c.times * c.nbytes
        row[2] += c.time_s
    if not totals:
        return ["no communication"]
    lines = ["communication per step:"] + [
        f"  {kind} over {axis}: {int(n)} times, {size_text(nbytes)} in all, {time_text(seconds)}"
        for (kind, axis), (n, nbytes, seconds) in sorted(totals.items(), key=lambda kv: -kv[1][2])
    ]
    return lines + [f"  inside nodes, then between them: {one.show()}" for one in program.emitted.by_node.axes]
