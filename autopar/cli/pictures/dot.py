"""The sharded graph of a saved program in Graphviz's language."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.cli.pictures.drawn import Cluster, Node, clusters
from autopar.cli.saved import Saved


def as_dot(saved: Saved) -> str:
    """Graphviz: a cluster per function, a node per line (messages filled), edges labelled with specs."""
    lines = ["digraph program {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    for cluster in clusters(saved):
        lines += _cluster(cluster)
    return "\n".join([*lines, "}"])


def _cluster(cluster: Cluster) -> Iterator[str]:
    yield f"  subgraph {_quoted('cluster_' + cluster.name)} {{"
    yield f"    label={_quoted(cluster.name)};"
    for node in cluster.nodes:
        yield f"    {_quoted(node.name)} [label={_quoted(node.label)}{_style(node)}];"
    for edge in cluster.edges:
        yield f"    {_quoted(edge.source)} -> {_quoted(edge.target)} [label={_quoted(edge.spec)}, fontsize=8];"
    yield "  }"


def _style(node: Node) -> str:
    if node.sends:
        return ", style=filled, fillcolor=lightsalmon"
    return {"argument": ", shape=ellipse", "saved": ", shape=ellipse, style=dashed", "call": ", penwidth=2"}.get(
        node.kind, ""
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
