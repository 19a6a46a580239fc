"""The sharded graph of a saved program in Graphviz's language."""

from __future__ import annotations

import json

from autopar.cli.saved import Saved
from autopar.ir.text import short_op
from autopar.report.program_facts import FunctionFacts, TemplateFacts


def as_dot(saved: Saved) -> str:
    """Graphviz: a cluster per function, a node per line (collectives filled), edges labelled with specs."""
    lines = ["digraph program {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    seen: list[tuple[str, TemplateFacts]] = []
    for number, stage in enumerate(saved.stages):
        for name, template in stage.templates.items():
            if (name, template) in seen:
                continue
            seen.append((name, template))
            prefix = f"stage_{number}_{name}" if len(saved.stages) > 1 else name
            for kind, function in template.functions.items():
                lines += _cluster(f"{prefix}_{kind}", function)
    return "\n".join([*lines, "}"])


def _cluster(name: str, function: FunctionFacts) -> list[str]:
    lines = [f"  subgraph {_quoted('cluster_' + name)} {{", f"    label={_quoted(name)};"]
    origin: dict[str, tuple[str, str]] = {}
    for argument, spec in function.arguments.items():
        origin[argument] = (f"{name}/{argument}", spec)
        lines.append(f"    {_quoted(origin[argument][0])} [label={_quoted(argument)}, shape=ellipse];")
    edges = []
    for i, row in enumerate(function.lines):
        node = f"{name}/{i}"
        filled = ", style=filled, fillcolor=lightsalmon" if row.axis else ""
        label = short_op(row.op) + (f" over {row.axis}" if row.axis else "")
        lines.append(f"    {_quoted(node)} [label={_quoted(label)}{filled}];")
        for read in row.reads:
            if read not in origin:
                origin[read] = (f"{name}/{read}", "saved by forward")
                lines.append(f"    {_quoted(origin[read][0])} [label={_quoted(read)}, shape=ellipse, style=dashed];")
            edges.append(
                f"    {_quoted(origin[read][0])} -> {_quoted(node)} [label={_quoted(origin[read][1])}, fontsize=8];"
            )
        for k, out in enumerate(row.out):
            origin[out] = (node, row.specs[k] if k < len(row.specs) else "")
    return [*lines, *edges, "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
