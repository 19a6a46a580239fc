"""Nodes that nobody reads leave a graph, unless they have an effect."""

from __future__ import annotations

from torch import fx

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.while_traced.repeat_ops import BEGIN


def test_nodes_that_nobody_reads_are_erased_with_what_they_alone_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    read = graph.call_method("sin", (x,))
    graph.call_method("exp", (graph.call_method("cos", (x,)),))
    effect = graph.call_function(BEGIN, (0, [x]))
    out = graph.output(read)
    remove_dead_code(graph)
    assert list(graph.nodes) == [x, read, effect, out]
