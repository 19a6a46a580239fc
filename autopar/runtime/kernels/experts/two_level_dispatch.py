"""Rows that go to a node first, and then inside it to the experts that they chose.

Of two axes the first leads from node to node, between ranks of the same number in theirs, the second is inside a node:

    out     a token goes once to every node that has any of its experts, with what it chose and with what weights
    inside  the rank that it comes to sends it on to its experts there (dispatch.py), and adds up what they give back
    back    one row a token and node, added node after node

So across nodes a token takes as many rows as there are nodes that it visits, not as many as it has choices. With n nodes,
c choices and t tokens a rank that is passed 1 / n of the tokens of n ranks gets at most n · t of them, and on average no more
than c · t. Memory is promised for

    room = ceil(imbalance · t · min(c, n)), at most n · t

tokens that come to a rank, and for as many rows that it passes on as any rank computes at once. Every rank knows what all
others send, so that all find the same: a step beyond that stops, or its tokens travel in turns of so few that the most that come
to any rank have room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...comm.axis_comm import Along
from ...comm.calls import Handle
from ...errors import ExpertOverflow
from .dispatch import Promise, Spread, in_equal_parts, overflow

Tensor = torch.Tensor


@dataclass(frozen=True)
class Leg:
    """Tokens that travel to nodes and back at once.

    tokens: (rows sent,) their numbers, node by node. inside: where the experts are that rows are sent on to. real: (rows sent,)
    False for those that only fill a message, which choose no expert there, so that zeros come back.
    """

    along: Along
    tokens: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    inside: Spread
    real: Tensor | None = None

    def out(self, rows: Tensor) -> Handle[Tensor]:
        """The rows of tokens to the nodes that these visit."""
        return self.along.start_exchange(rows[self.tokens], self.sent, self.received)

    def choices_out(self, choices: Tensor) -> Handle[Tensor]:
        """The choices of the tokens to the same nodes."""
        if self.real is None:
            return self.out(choices)
        own = choices[self.tokens].masked_fill_(~self.real.unsqueeze(1), -1)
        return self.along.start_exchange(own, self.sent, self.received)

    def back(self, rows: Tensor) -> Handle[Tensor]:
        """One row for every one that came, to where it came from."""
        return self.along.start_exchange(rows, self.received, self.sent)

    def add_to(self, y: Tensor, rows: Tensor) -> None:
        """y[token] += its rows, node after node. rows: as they come back."""
        for tokens, part in zip(self.tokens.split(self.sent), rows.split(self.sent), strict=True):
            y.index_add_(0, tokens, part.to(y.dtype))


def legs(chosen: Tensor, experts: int, promise: Promise, spread: Spread) -> Iterator[Leg]:
    """None where one axis has all experts. chosen: (tokens, choices). experts: on this rank. Raises ExpertOverflow."""
    if spread.along is not None and spread.along.inner is not None:
        yield from _legs(chosen, experts, promise, spread.along, spread.along.inner)


def _legs(chosen: Tensor, experts: int, promise: Promise, along: Along, inner: Along) -> Iterator[Leg]:
    """along: from node to node; inner: inside one."""
    tokens, choices = chosen.shape
    nodes, of_node, mean = along.size, experts * inner.size, tokens * min(choices, along.size)
    inside = Spread(along.index * of_node, 1, inner, mean=chosen.numel())
    room = min(max(promise.most(mean), nodes), nodes * tokens)
    visited = visited_nodes(chosen, nodes, of_node)
    own = torch.cat([visited.sum(0), _counts(chosen, nodes * of_node)]).unsqueeze(0)
    inside_counting = inner.start_all_gather(own, 0)
    counting = along.start_all_gather(inside_counting.wait(), 0)
    if chosen.is_meta:
        leaving = visited.new_empty(mean, dtype=torch.long)
        yield Leg(along, leaving, in_equal_parts(mean, nodes), in_equal_parts(room, nodes), inside)
        return
    known = counting.wait().cpu().view(nodes, inner.size, -1)
    coming, pairs = known[..., :nodes], known[..., nodes:].view(nodes, inner.size, nodes, inner.size, experts)
    if promise.on_overflow != "chunk":
        _check(coming, pairs, promise, room, mean, chosen.numel(), f"{along.axis}, {inner.axis}")
    at_once = _tokens_at_once(coming, tokens, room)
    turns = torch.stack([part.sum(0) for part in visited.split(at_once)])
    if len(turns) == 1:
        received = coming[:, inner.index, along.index].unsqueeze(0)
    else:
        received = along.start_all_gather(turns.unsqueeze(0), 0).wait().cpu()[:, :, along.index].t()
    for turn, (part, leaving, arriving) in enumerate(zip(visited.split(at_once), turns, received, strict=True)):
        numbers = part.t().nonzero()[:, 1] + turn * at_once
        yield Leg(along, numbers, tuple(leaving.tolist()), tuple(arriving.tolist()), inside)


def visited_nodes(chosen: Tensor, nodes: int, of_node: int) -> Tensor:
    """(tokens, nodes): whether a node has an expert that the token chose."""
    exists = (chosen >= 0) & (chosen < nodes * of_node)
    node = torch.where(exists, chosen // of_node, nodes)
    return torch.zeros(len(chosen), nodes + 1, dtype=torch.bool, device=chosen.device).scatter_(1, node, True)[
        :, :nodes
    ]


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """(experts,): how many pairs chose each."""
    exists = (chosen >= 0) & (chosen < experts)
    expert = torch.where(exists, chosen, experts).flatten()
    return torch.zeros(experts + 1, dtype=torch.long, device=chosen.device).scatter_add_(
        0, expert, torch.ones_like(expert)
    )[:experts]


def _tokens_at_once(coming: Tensor, tokens: int, room: int) -> int:
    """The most tokens of every rank that may travel at once, so that those which come to any rank surely have room. coming:
    (node, number in it, node that is visited)."""
    for turns in range(1, tokens + 1):
        at_once = math.ceil(tokens / turns)
        if int(coming.clamp(max=at_once).sum(0).max()) <= room:
            return at_once
    return max(tokens, 1)


def _check(coming: Tensor, pairs: Tensor, promise: Promise, room: int, mean: int, mean_rows: int, axes: str) -> None:
    """Raises ExpertOverflow where any rank computes, or passes on, more rows than are promised. Ranks are counted node by node.
    pairs: (node, number in it, node and number of the rank that has the expert, expert of it)."""
    of_experts, most = pairs.sum((0, 1)).flatten(), promise.most(mean_rows)
    computed, passed_on = pairs.sum((0, 1, 4)).flatten(), pairs.sum((0, 3, 4)).t().flatten()
    arriving = coming.sum(0).t().flatten()
    for loads, what, least, of in (
        (computed, "compute", most, mean_rows),
        (passed_on, "pass on", most, mean_rows),
        (arriving, "take in", room, mean),
    ):
        if int(loads.max()) > least:
            raise ExpertOverflow(overflow(loads, of_experts, promise, least, of, axes, what))
