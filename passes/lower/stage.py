"""Lower a stage: the functions that its actions run, which call its templates, and everything between the calls.

Between calls values are converted from the spec the producer leaves to the spec the reader wants; gradients that reach
one value from several calls are converted to one spec and added; parameters are gathered just before use (started one
call ahead); gradients go to the store with the steps that bring them to their optimizer spec. What comes from another
stage arrives in the spec that is cheapest to arrive in, what leaves owes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.lowered import LoweredStage
from autopar.ir.program import Program
from autopar.passes.lower.backward import Backward
from autopar.passes.lower.context import StageContext
from autopar.passes.lower.first_calls import first_calls_apart
from autopar.passes.lower.forward import Forward
from autopar.passes.lower.rows import row_axes
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan


def lower_stage(
    program: Program,
    stage: StagePlan,
    pricers: Pricers,
    rules: RuleBook,
    microbatches: int,
    split: bool,
    compression: str = "",
) -> LoweredStage:
    """One stage's program (`autopar.passes.lower.cut`) as local lines. split: B and W apart. compression: of gradients, as the
    plan says. Raises PlanError."""
    program, stage = first_calls_apart(program, stage)
    context = StageContext(program, stage, pricers[stage.mesh], rules, split, compression)
    prologue = [i for i, call in enumerate(program.calls) if call.prologue] if microbatches > 1 else []
    prepare = tuple(
        Forward(context, f"prepare_{k}" if k else "prepare", [call]).prepare(prologue[:k])
        for k, call in enumerate(prologue)
    )
    front = Forward(context, "forward", [i for i in range(len(program.calls)) if i not in prologue])
    forward = front.forward(prologue)
    back = Backward(context, front.saved) if program.training else None
    backward, weights = back.functions() if back is not None else (None, None)
    shared = row_axes(front.rows, forward, context.templates, stage.mesh)
    return LoweredStage(
        program.boundary.stage if program.boundary else 0,
        stage.mesh,
        context.templates,
        forward,
        backward,
        weights,
        prepare,
        context.stored(),
        {name: b.type for name, b in program.buffers.items()},
        tuple(replace(row, row_axes=shared.get(row.index, ())) for row in front.rows),
        front.output_rows(),
        tuple(front.received),
        tuple(front.sent),
        tuple(back.received) if back is not None else (),
        tuple(back.sent) if back is not None else (),
        program.training,
        microbatches,
        program.microbatched.prologue if prepare and program.microbatched is not None else (),
    )
