"""Pipelines for tests: random chains and DAGs of stages with a schedule, and the zero-bubble paper's measurements.

`schedule_bubbles.json`: Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024), Tables 5 and 9: seconds of F, B, W and
of sending, and the bubble rates the paper computes from them; layers, hidden and heads are those of its models.
"""

import json
from pathlib import Path

from hypothesis import strategies as st

from autopar.costmodel import simulate as sim
from autopar.ir.actions import StageGraph
from autopar.passes.schedule import ActionCosts

chain = StageGraph.chain
PAPER = json.loads((Path(__file__).parent / "schedule_bubbles.json").read_text())

ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", "forward")
IN_A_LOOP = ("interleaved", "interleaved-zb")
IN_A_V = ("zb-v", "dualpipev")


def graph_of(name, p, V=2):
    """A chain that a schedule can run."""
    if name == "none":
        return StageGraph.chain(1, V)
    if name in IN_A_V:
        return StageGraph.chain(p, 2, "v")
    return StageGraph.chain(p, V if name in IN_A_LOOP else 1)


@st.composite
def chains(draw, names=(*ONE_STAGE, *IN_A_LOOP, *IN_A_V, "none"), groups=5, microbatches=9):
    """(graph, schedule, microbatches) of a chain."""
    name = draw(st.sampled_from(names))
    return (
        graph_of(name, draw(st.integers(1, groups)), draw(st.integers(2, 3))),
        name,
        draw(st.integers(1, microbatches)),
    )


@st.composite
def dags(draw, names=ONE_STAGE, groups=6, microbatches=8):
    """(graph, schedule, microbatches) of any DAG, with several ends and edges that bring no gradient back."""
    n = draw(st.integers(1, groups))
    pairs = [(u, v) for v in range(n) for u in range(v)]
    edges = tuple(e for e in pairs if draw(st.booleans()))
    back = None if draw(st.booleans()) else tuple(e for e in edges if draw(st.booleans()))
    graph = StageGraph(tuple((s,) for s in range(n)), edges, back)
    return graph, draw(st.sampled_from(names)), draw(st.integers(1, microbatches))


def cost(table, graph, costs):
    """The zero-bubble paper's cost of a table: the longest span of a group."""
    return max(sim.bubble_spans(table, graph, costs.seconds, costs.comm_s)[0])


def random_costs(draw, graph):
    seconds = st.floats(0.2, 3)
    comm = st.one_of(st.floats(0, 1), st.fixed_dictionaries({e: st.floats(0, 1) for e in graph.edges}))
    return ActionCosts({(s, k): draw(seconds) for s in range(graph.stages) for k in "FBW"}, draw(comm))
