"""pipeline.py of an emitted directory: stages, transfers and the action table as plain data."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.capture.examples.trees import Leaf
from autopar.codegen.computed_alike import computed_alike
from autopar.codegen.marks import number, quoted
from autopar.codegen.printer import Dtypes, Printer, home_of
from autopar.codegen.stage import computed, render
from autopar.codegen.table import table_lines
from autopar.codegen.text import comment
from autopar.ir.actions import show_row, splits_backward
from autopar.ir.by_node import ALL_FLAT, ByNode
from autopar.ir.lowered import LoweredProgram
from autopar.ir.program import Conditions, Program
from autopar.ops.integers import is_condition
from autopar.runtime.comm.mesh import told_sizes


@dataclass(frozen=True)
class MovingRows:
    """Facts that a program whose rows move between ranks has of itself. most_units: of each group of ranks the units that
    one has room for, none where rows do not move; busy_s: predicted seconds of a step for which the rank of a group with the most
    units computes; step_s: of a step; actions_s: of F, B and W of every stage; sends_s: from a stage to another."""

    most_units: tuple[int, ...] = ()
    busy_s: tuple[float, ...] = ()
    step_s: float = 0.0
    actions_s: tuple[tuple[float, float, float], ...] = ()
    sends_s: Mapping[tuple[int, int], float] = field(default_factory=dict)


def pipeline_source(
    lowered: LoweredProgram,
    program: Program,
    title: str,
    dtypes: Dtypes | None = None,
    by_node: ByNode = ALL_FLAT,
    moving: MovingRows = MovingRows(),
) -> str:
    """The file. by_node: the collectives that go by node; moving: what is known of rows that move."""
    printer = Printer(dtypes)
    microbatches = lowered.stages[0].microbatches
    transfers = [
        f"dict(name={quoted(t.name)}, kind={t.kind!r}, source={number(t.source)}, target={number(t.target)}, "
        f"shape={t.type.shape!r}, dtype={printer.dtype(t.type.dtype)!r}, "
        f"source_spec={t.source_spec.dims!r}, target_spec={t.target_spec.dims!r})"
        for t in lowered.transfers
    ]
    return render(
        "pipeline.py.j2",
        title=title,
        world=sum(lowered.stages[g[0]].mesh.size for g in lowered.graph.groups),
        microbatches=microbatches,
        moving=moving,
        training=program.training,
        transfers=table_lines(transfers),
        inputs=[
            f"dict(name={name!r}, shape={shape!r}, dtype={printer.dtype(type_.dtype)!r}, batch_dim={dim!r})"
            for (name, type_), dim, shape in zip(
                program.inputs, program.batch_dims, batch_shapes(program, microbatches), strict=True
            )
        ],
        ranges=[
            f"dict(input={one.input}, low={one.allowed.low}, high={one.allowed.high}, also={tuple(sorted(one.also))!r}, "
            f"source={comment(one.source, 110)!r})"
            for one in program.guards
        ],
        stages=table_lines(
            [
                f"dict(file={quoted(f'stages/stage_{s.index}.py')}, mesh={told_sizes(s.mesh.sizes)!r}, "
                f"first_rank={number(s.mesh.offset)})"
                for s in lowered.stages
            ]
        ),
        alike=any(not one.always for one in computed_alike(lowered)),
        nodes=table_lines([_ranks(ranks) for ranks in by_node.nodes]),
        by_node=[f"dict(stage={one.stage}, axis={one.axis!r}, least={dict(one.least)!r})" for one in by_node.axes],
        conditions=table_lines([f"{quoted(n)}: {_ways(ways)}" for n, ways in program.conditions.items()], named=True),
        extras=_nested(program.structure) if program.extras else "",
        tells_all=tells_all(lowered),
        shared={name: list(held) for name, held in lowered.shared.items()},
        trained=table_lines(list(map(quoted, _trained_out_of_order(lowered, program)))),
        groups=[list(g) for g in lowered.graph.groups],
        table=[_wrapped(show_row(row)) for row in lowered.table],
        split=splits_backward(lowered.table),
    )


def pipeline_module(source: str) -> types.ModuleType:
    """The file's tables as a module of this process."""
    module = types.ModuleType("autopar_pipeline")
    exec(compile(source, "<pipeline>", "exec"), module.__dict__)
    return module


def _trained_out_of_order(lowered: LoweredProgram, program: Program) -> tuple[str, ...]:
    """The trained parameters in the model's order, where the stages, one after another, own them in another one."""
    trained = program.trained if program.training else ()
    by_stage = tuple(
        name
        for stage in lowered.stages
        for name in stage.parameters
        if name in program.gradient_places and lowered.shared.get(name, (stage.index,))[0] == stage.index
    )
    return () if by_stage == trained else trained


def tells_all(lowered: LoweredProgram) -> bool:
    """Whether rows of a mixture go to ranks of other experts with room for so many alone, or some rank's data has conditions."""
    lines = [line for s in lowered.stages for line in computed(s)]
    mixtures = (line for line in lines if home_of(line) == "experts")
    return any(is_condition(line.op) for line in lines) or any(
        o.kwargs["on_overflow"] != "chunk" and bool(o.carried or "parts" in o.kwargs) for o in mixtures
    )


def batch_shapes(program: Program, microbatches: int) -> list[tuple[int, ...]]:
    """The shapes of a whole batch of so many microbatches, input by input."""
    return [
        tuple(n * microbatches if i == dim else n for i, n in enumerate(type_.shape))
        for (_, type_), dim in zip(program.inputs, program.batch_dims, strict=True)
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    first, after = ranks[0], ranks[-1] + 1
    if ranks == tuple(range(first, after)) and len(ranks) > 2:
        return f"range({number(first)}, {number(after)})"
    return f"[{', '.join(map(number, ranks))}]"


def _nested(structure: Any) -> str:
    """The extras as loss_fn nested them, with the numbers of outputs in the place of tensors."""
    if isinstance(structure, Leaf):
        return str(1 + structure.index)
    if isinstance(structure, dict):
        return f"{{{', '.join(f'{key!r}: {_nested(item)}' for key, item in structure.items())}}}"
    items = [_nested(item) for item in structure]
    return f"[{', '.join(items)}]" if isinstance(structure, list) else f"({''.join(f'{item}, ' for item in items)})"


def _ways(ways: Conditions) -> str:
    """Outputs, and the numbers that they are to count."""
    lists = (
        ", ".join(f"({number(output)}, [{', '.join(map(number, numbers))}])" for output, numbers in way) for way in ways
    )
    return f"[{', '.join(f'[{one}]' for one in lists)}]"


def _wrapped(row: str) -> Any:
    """A long row as adjacent string literals, a line each."""
    lines = textwrap.wrap(row, 108)
    if len(lines) <= 1:
        return repr(row)
    return "(\n" + "\n".join(f"        {part + ' '!r}" for part in lines) + "\n    )"
