"""program.json of an emitted directory: what `autopar-dump` shows, as plain data."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from autopar.capture.examples.trees import shapes_text
from autopar.compiled import Compiled
from autopar.costmodel.bill import hidden_seconds
from autopar.ir.actions import show_row
from autopar.ir.lines import Compute, Convert, Function, Line, Start, label
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.report.long_run import long_run_facts
from autopar.report.machines import machine_facts


def facts(program: Compiled) -> dict[str, Any]:
    """Everything about a program that its plan does not say."""
    counted = program.account
    return {
        "autopar_program": 2,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "training": program.training,
        "ranks": program.plan.ranks,
        "origin": program.plan.origin,
        "solver": asdict(program.solver),
        "predicted": program.plan.predicted,
        "timings": program.timings,
        "memory": program.peak_kinds,
        "peak_bytes": program.account.peak_bytes,
        "alternatives": [
            {"name": a.name, "step_time_s": a.predicted.step_time_s, "peak_bytes": a.predicted.peak_bytes}
            for a in program.alternatives
        ],
        "microbatches": program.plan.microbatches,
        "model": type(program.model).__name__,
        "cluster": program.cluster.name,
        "cluster_described": program.cluster.to_dict(),
        "long_run": long_run_facts(program),
        "machines": machine_facts(program),
        "calls": [{"template": c.template, "path": c.path} for c in program.ir.calls],
        "schedule": {
            "name": program.plan.schedule,
            "peaks": list(counted.peaks),
            "groups": [list(g) for g in counted.graph.groups],
            "edges": counted.graph.edges,
            "gradients": counted.graph.gradients,
            "table": [show_row(row) for row in counted.table],
            "seconds": [[stage, kind, s] for (stage, kind), s in counted.seconds.items()],
            "hand_over": [[u, v, s] for (u, v), s in counted.hand_over.items()],
            "exposed": [sum(by_purpose.values()) for by_purpose in counted.step.exposed_s],
            "hidden": [
                [stage, kind, s]
                for stage, one in enumerate(counted.stages)
                for kind, s in hidden_seconds(one.bill).items()
                if s > 0
            ],
        },
        "transfers": [
            {
                "name": t.name,
                "kind": t.kind,
                "source": t.source,
                "target": t.target,
                "bytes": t.type.nbytes,
                "from": t.source_spec.show(t.type),
                "to": t.target_spec.show(t.type),
            }
            for t in program.lowered.transfers
        ],
        "recompute": program.recompute_curves(),
        "by_node": [asdict(one) for one in program.emitted.by_node.axes],
        "shared": {name: list(stages) for name, stages in program.lowered.shared.items()},
        "stages": [_stage(stage, program) for stage in program.stages],
        "buckets": [
            {
                "inputs": shapes_text(one.request.inputs),
                "plan": one.plan.show_meshes(),
                "step_time_s": one.decision.predicted.step_time_s,
                "peak_bytes": one.decision.predicted.peak_bytes,
            }
            for one in (program.of_buckets if program.buckets else ())
        ],
    }


def _stage(stage: LoweredStage, program: Compiled) -> dict[str, Any]:
    counted = program.account.stages[stage.index]
    return {
        "mesh": dict(stage.mesh.axes),
        "first_rank": stage.mesh.offset,
        "seconds": counted.seconds,
        "step_s": counted.step_s,
        "resting": counted.memory.resting,
        "held_bytes": counted.memory.actions["F"].after,
        "inputs": {r.name: r.spec.show(r.type) for r in stage.inputs},
        "outputs": {r.name: r.spec.show(r.type) for r in stage.outputs},
        "templates": {name: _template(t) for name, t in stage.templates.items()},
        "functions": {f.name: _function(f) for f in stage.functions},
        "collectives": [vars(c) for c in counted.collectives],
        "parameters": {
            p.name: {
                "stored": p.storage.show(p.type),
                "gradient_and_optimizer": p.optimizer.show(p.type),
                "trained": p.contributions > 0,
                "local_bytes": p.storage.local_bytes(p.type, stage.mesh),
                "reduction": [list(step.row) for step in p.reduce],
                **({"compression": p.compression} if p.compression else {}),
            }
            for p in stage.parameters.values()
        },
    }


def _template(t: LoweredTemplate) -> dict[str, Any]:
    return {
        "saved": list(t.saved),
        "later": list(t.later),
        "functions": {
            kind: _function(f)
            for kind, f in (("forward", t.forward), ("backward", t.backward), ("weights", t.weights))
            if f is not None
        },
    }


def _function(f: Function) -> dict[str, Any]:
    return {
        "arguments": {name: spec.show(type_) for name, (type_, spec) in f.arg_types.items()},
        "lines": [_line(line) for line in f.lines],
        "results": [name for name in f.returns if name],
    }


def _line(line: Line) -> dict[str, Any]:
    begun = line.line if isinstance(line, Start) else line
    return {
        "out": list(line.outs),
        "op": label(line),
        "reads": list(line.reads()),
        "specs": [s.show(t) if t is not None and s is not None else "" for _, t, s in line.made()],
        "phase": line.phase,
        "source": line.source,
        "axis": begun.step.axis if isinstance(begun, Convert) else None,
        "sent": [vars(sent) for sent in begun.sent] if isinstance(begun, Compute) else [],
    }
