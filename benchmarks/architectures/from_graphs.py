"""Networks on graphs with their scatters written out, tiny: rows of messages are added up at the nodes that they go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case

NODES, EDGES, WIDTH, CLASSES = 24, 64, 16, 4
Made = tuple[nn.Module, Any]


def cases() -> list[Case]:
    """Node classifiers on one graph, by the layer that they are made of, and a regression of whole graphs."""
    layers: dict[str, Callable[[int, int], nn.Module]] = {
        "GCN": Convolution, "GraphSAGE": Sage, "GAT": Attention, "GIN": Isomorphism, "edge messages": Messages
    }  # fmt: skip
    nodes = [
        Case(name, "graphs", lambda layer=layer: _nodes(layer), F.cross_entropy)  # type: ignore[misc]
        for name, layer in layers.items()
    ]
    return [*nodes, Case("graph regression", "graphs", _graphs, F.mse_loss)]


def scatter(messages: Tensor, target: Tensor, nodes: int) -> Tensor:
    """Rows added up by target: (edges, …) and (edges,) to (nodes, …)."""
    return messages.new_zeros(nodes, *messages.shape[1:]).index_add(0, target, messages)


class Convolution(nn.Module):
    """The symmetric norm of degrees with self loops (Kipf and Welling)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(x.size(0), device=x.device)
        source, target = torch.cat([edges, loops.repeat(2, 1)], dim=1)
        degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        weight = degree.pow(-0.5)
        norm = weight[source] * weight[target]
        return scatter(self.linear(x)[source] * norm.unsqueeze(-1), target, x.size(0))


class Sage(nn.Module):
    """The mean of neighbours beside the node itself."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(before, after), nn.Linear(before, after, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        count = x.new_zeros(x.size(0)).index_add_(0, target, x.new_ones(target.size(0)))
        return self.own(x) + self.neighbours(total / count.clamp(min=1).unsqueeze(-1))


class Attention(nn.Module):
    """A softmax over the edges of each target, by the largest score of it."""

    def __init__(self, before: int, after: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.linear = heads, nn.Linear(before, after, bias=False)
        self.source_score = nn.Parameter(torch.randn(heads, after // heads) * 0.1)
        self.target_score = nn.Parameter(torch.randn(heads, after // heads) * 0.1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x).view(x.size(0), self.heads, -1)
        scores = (h * self.source_score).sum(-1)[source] + (h * self.target_score).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        index = target.unsqueeze(-1).expand_as(scores)
        most = scores.new_full((x.size(0), self.heads), float("-inf")).scatter_reduce(0, index, scores.detach(), "amax")
        weight = (scores - most[target]).exp()
        weight = weight / scatter(weight, target, x.size(0))[target].clamp(min=1e-16)
        return scatter(h[source] * weight.unsqueeze(-1), target, x.size(0)).flatten(1)


class Isomorphism(nn.Module):
    """The sum of neighbours and a multiple of the node, through an MLP with batch norm."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Linear(after, after))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.mlp((1 + self.eps) * x + scatter(x[edges[0]], edges[1], x.size(0)))


class Messages(nn.Module):
    """A message of both ends of each edge, and a recurrent update of the nodes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * before, after), nn.GRUCell(after, after)
        self.first = nn.Linear(before, after)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = F.relu(self.message(torch.cat([x[source], x[target]], dim=-1)))
        return self.update(scatter(messages, target, x.size(0)), self.first(x))


class Classifier(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(8, WIDTH), layer(WIDTH, CLASSES)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.layers[0](x, edges))
        return self.layers[1](x, edges)


def _nodes(layer: Callable[[int, int], nn.Module]) -> Made:
    return Classifier(layer), (
        torch.randn(NODES, 8), torch.randint(0, NODES, (2, EDGES)), torch.randint(0, CLASSES, (NODES,))
    )  # fmt: skip


class Regression(nn.Module):
    """Graphs of a batch, one after another: nodes are averaged by the graph that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(a, b) for a, b in ((8, WIDTH), (WIDTH, WIDTH)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int = 4) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, edges))
        sizes = scatter(x.new_ones(x.size(0), 1), graph, count)
        return self.head(scatter(x, graph, count) / sizes).squeeze(-1)


def _graphs() -> Made:
    x, edges = torch.randn(NODES, 8), torch.randint(0, NODES, (2, EDGES))
    graph = torch.arange(4).repeat_interleave(NODES // 4)
    return Regression(), (x, edges, graph, torch.randn(4))
