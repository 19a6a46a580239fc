"""The sharded graph of a saved program as a self-contained SVG.

Clusters stand side by side in rows. Inside one, a node's layer is the length of the longest way to it, arguments stand just above
what reads them first, and inside a layer nodes are ordered by where what they read stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import networkx as nx

from autopar.cli.pictures.drawn import MESSAGES, Cluster, Node, clusters
from autopar.cli.saved import Saved

MOST = 60
"""Nodes of a function that are drawn one by one; functions of more lines are drawn in blocks."""
ROW_WIDTH = 1800.0
CHARACTER, LINE = 6.7, 15.0
"""Pixels of a character of the font, and of a line."""
PAD, GAP, LAYER_GAP, TITLE = 10.0, 22.0, 44.0, 26.0
SPEC_CHARACTER = 5.5
BYPASS = 80.0
"""Pixels to the side by which an edge over several layers goes round what lies between."""
FILLS = {
    **dict(zip(MESSAGES, ("#ffd8a8", "#b2f2bb", "#a5d8ff", "#eebefa"), strict=True)),
    "message": "#ffc9c9",
    "op": "#ffffff",
    "block": "#f1f3f5",
    "call": "#e7f5ff",
    "argument": "#fffbe6",
    "saved": "#fffbe6",
}
STYLE = (
    "text{font:11px ui-monospace,monospace;fill:#222}.title{font-weight:bold;font-size:13px}.spec{font-size:9px;fill:#495057;"
    "paint-order:stroke;stroke:#fff;stroke-width:3px}path{fill:none;stroke:#adb5bd}.cluster{fill:#fcfcfd;stroke:#ced4da}"
    ".node{stroke:#868e96}.saved{stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Box:
    """The place of a node: its middle and its size in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Laid:
    """A cluster with the places of its nodes, from its own corner."""

    cluster: Cluster
    boxes: Mapping[str, Box]
    width: float
    height: float


def graph_svg(saved: Saved, most: int = MOST) -> str:
    """The picture. most: as `drawn.clusters` takes it."""
    laid = [_laid(cluster) for cluster in clusters(saved, most)]
    width = max([ROW_WIDTH, *(one.width + 2 * GAP for one in laid)])
    root = Element("svg", xmlns="http://www.w3.org/2000/svg")
    SubElement(root, "style").text = STYLE
    _legend(root)
    x, y, highest = GAP, 2 * GAP + LINE, 0.0
    for one in laid:
        if x > GAP and x + one.width > width - GAP:
            x, y, highest = GAP, y + highest + GAP, 0.0
        root.append(_drawn(one, x, y))
        x, highest = x + one.width + GAP, max(highest, one.height)
    height = y + highest + GAP
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"0 0 {width:.0f} {height:.0f}"}
    return ElementTree.tostring(root, encoding="unicode")


def _size(node: Node) -> tuple[float, float]:
    lines = node.label.split("\n")
    return CHARACTER * max(map(len, lines)) + 2 * PAD, LINE * len(lines) + PAD


def _layers(cluster: Cluster) -> list[list[str]]:
    """The names of the nodes by layer, in the order of their places."""
    graph = nx.DiGraph([(edge.source, edge.target) for edge in cluster.edges])
    graph.add_nodes_from(node.name for node in cluster.nodes)
    depth = {name: n for n, layer in enumerate(nx.topological_generations(graph)) for name in layer}
    given = {node.name for node in cluster.nodes if node.kind in ("argument", "saved")}
    for name in given:
        depth[name] = min((depth[reader] for reader in graph.successors(name)), default=1) - 1
    layers: dict[int, list[str]] = defaultdict(list)
    for node in cluster.nodes:
        layers[depth[node.name]].append(node.name)
    place: dict[str, float] = {}
    ordered = []
    for _, names in sorted(layers.items()):
        above = {name: [place[p] for p in graph.predecessors(name) if p in place] for name in names}
        middle = {name: sum(at) / len(at) if at else float(n) for n, (name, at) in enumerate(above.items())}
        names.sort(key=middle.__getitem__)
        place |= {name: float(n) for n, name in enumerate(names)}
        ordered.append(names)
    return ordered


def _laid(cluster: Cluster) -> Laid:
    sizes = {node.name: _size(node) for node in cluster.nodes}
    room = {name: wide for name, (wide, _) in sizes.items()}
    for edge in cluster.edges:
        room[edge.target] = max(room[edge.target], SPEC_CHARACTER * len(edge.spec))
    layers = _layers(cluster)
    widths = [sum(room[name] for name in names) + GAP * (len(names) - 1) for names in layers]
    width = max([CHARACTER * len(cluster.name) * 1.2, *widths]) + 2 * GAP
    boxes: dict[str, Box] = {}
    y = TITLE + PAD
    for names, own in zip(layers, widths, strict=True):
        x, tallest = (width - own) / 2, max(sizes[name][1] for name in names)
        for name in names:
            wide, high = sizes[name]
            boxes[name] = Box(x + room[name] / 2, y + tallest / 2, wide, high)
            x += room[name] + GAP
        y += tallest + LAYER_GAP
    return Laid(cluster, boxes, width, (y - LAYER_GAP if layers else y) + PAD)


def _drawn(one: Laid, x: float, y: float) -> Element:
    """The group of a cluster whose corner is there."""
    group = Element("g", transform=f"translate({x:.1f} {y:.1f})", id=one.cluster.name)
    SubElement(
        group, "rect", {"class": "cluster", "width": f"{one.width:.1f}", "height": f"{one.height:.1f}", "rx": "6"}
    )
    SubElement(group, "text", {"class": "title", "x": f"{PAD}", "y": f"{TITLE - PAD / 2}"}).text = one.cluster.name
    specs: list[tuple[float, float, str]] = []
    for edge in one.cluster.edges:
        a, b = one.boxes[edge.source], one.boxes[edge.target]
        top, bottom = a.y + a.height / 2, b.y - b.height / 2
        bend = max(12.0, (bottom - top) / 2)
        aside = BYPASS if bottom - top > 2 * LAYER_GAP and abs(a.x - b.x) < BYPASS else 0.0
        points = ((a.x, top), (a.x + aside, top + bend), (b.x + aside, bottom - bend), (b.x, bottom))
        start, *others = (f"{x:.1f} {y:.1f}" for x, y in points)
        SubElement(group, "path", d=f"M{start}C{' '.join(others)}")
        specs.append((b.x + (a.x - b.x) / 4, bottom - LAYER_GAP / 3, edge.spec))
    for node in one.cluster.nodes:
        group.append(_box(node, one.boxes[node.name]))
    for at_x, at_y, spec in _apart(specs):
        middle = {"class": "spec", "x": f"{at_x:.1f}", "y": f"{at_y:.1f}", "text-anchor": "middle"}
        SubElement(group, "text", middle).text = spec
    return group


def _apart(specs: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The texts on edges, moved up where one would lie on another."""
    placed: list[tuple[float, float, str]] = []
    for x, y, spec in sorted(one for one in specs if one[2]):
        half = SPEC_CHARACTER * len(spec) / 2
        near = [p for p in placed[-12:] if abs(p[0] - x) < half + SPEC_CHARACTER * len(p[2]) / 2]
        if any(p[2] == spec and abs(p[1] - y) < LINE for p in near):
            continue
        for shift in (0.0, -10.0, 10.0, -20.0):
            if not any(abs(p[1] - y - shift) < 9 for p in near):
                placed.append((x, y + shift, spec))
                break
    return placed


def _box(node: Node, box: Box) -> Element:
    group = Element("g")
    SubElement(group, "title").text = f"{node.label}\n{node.hint}"
    shape = {
        "class": f"node {node.kind}",
        "x": f"{box.x - box.width / 2:.1f}",
        "y": f"{box.y - box.height / 2:.1f}",
        "width": f"{box.width:.1f}",
        "height": f"{box.height:.1f}",
        "rx": f"{box.height / 2:.1f}" if node.kind in ("argument", "saved") else "3",
        "fill": FILLS[node.kind],
    }
    SubElement(group, "rect", shape)
    lines = node.label.split("\n")
    for n, line in enumerate(lines):
        y = box.y + LINE * (n - (len(lines) - 1) / 2) + 4
        SubElement(group, "text", {"x": f"{box.x:.1f}", "y": f"{y:.1f}", "text-anchor": "middle"}).text = line
    return group


def _legend(root: Element) -> None:
    """The colours of messages, in the first row."""
    x = GAP
    for kind in (*MESSAGES, "message"):
        said = "other messages" if kind == "message" else kind
        SubElement(
            root, "rect", {"class": "node", "x": f"{x}", "y": "12", "width": "14", "height": "14", "fill": FILLS[kind]}
        )
        SubElement(root, "text", {"x": f"{x + 20}", "y": "23"}).text = said
        x += CHARACTER * len(said) + 50
