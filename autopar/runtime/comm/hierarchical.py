"""Collectives of a group that spans nodes, by node: inside the nodes, and between them with a share of the bytes.

Gloo's ring among 2 nodes of 2 ranks sends 1.5 S bytes over each node's link for an all_reduce of S, and its exchanges send a part
to every rank that lacks it, so r times to a node of r ranks. Here member (a, b) is the b-th rank of node a:

    all_reduce       reduce_scatter inside   ·   all_reduce of a part, between (a, b) of all a   ·   all_gather inside
    all_gather       all_gather between      ·   all_gathers inside, one for each node's rows
    reduce_scatter   reduce_scatters inside, one for each node's rows   ·   reduce_scatter between

What does not divide by r goes beside it. Sums are taken inside a node, then over nodes: another order than flat, and the same
bits on all members, as each part is summed by one. An all_reduce is done where its result is, so that it needs no memory of its
own. From which size on all this is cheaper was decided when the program was compiled (`costmodel/by_node.py`), and pipeline.py
says it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import BufferPool
from .calls import Call
from .mesh import Group

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
Wait = Callable[[], None]


@dataclass(frozen=True)
class Grid:
    """How members lie on nodes: member a * places + b is (a, b), or b * nodes + a where not node_major."""

    nodes: int
    places: int
    node_major: bool

    def member(self, node: int, place: int) -> int:
        return node * self.places + place if self.node_major else place * self.nodes + node

    def on_node(self, ranks: Sequence[int], node: int) -> tuple[int, ...]:
        """The group's ranks on a node, in member order."""
        return tuple(ranks[self.member(node, b)] for b in range(self.places))

    def at_place(self, ranks: Sequence[int], place: int) -> tuple[int, ...]:
        """The one at a place of every node."""
        return tuple(ranks[self.member(a, place)] for a in range(self.nodes))

    def rows(self, table: Tensor) -> Tensor:
        """(n, …), a row for each member, as a view (nodes, places, …)."""
        if self.node_major:
            return table.unflatten(0, (self.nodes, self.places))
        return table.unflatten(0, (self.places, self.nodes)).transpose(0, 1)


def grid_of(nodes: Sequence[int]) -> Grid | None:
    """How members lie on nodes, given the node of each; None where that is no grid of at least two by two."""
    names, n = list(dict.fromkeys(nodes)), len(nodes)
    if not 1 < len(names) < n or n % len(names):
        return None
    for node_major in (True, False):
        grid = Grid(len(names), n // len(names), node_major)
        if all(nodes[grid.member(a, b)] == name for a, name in enumerate(names) for b in range(grid.places)):
            return grid
    return None


@dataclass(frozen=True)
class TwoLevels:
    """A group with those of its ranks that are inside a node, and between nodes. least: by kind, bytes of the full array from
    which on the collective goes by node."""

    group: Group
    grid: Grid
    least: Mapping[str, int]

    @property
    def place(self) -> tuple[int, int]:
        """This rank's (node, place)."""
        index, grid = self.group.index, self.grid
        if grid.node_major:
            return divmod(index, grid.places)
        place, node = divmod(index, grid.nodes)
        return node, place

    @property
    def inside(self) -> Group:
        """The members on this rank's node."""
        node, place = self.place
        return Group((f"{'×'.join(self.group.axes)} inside nodes",), self.grid.on_node(self.group.ranks, node), place)

    @property
    def between(self) -> Group:
        """The members with this rank's place on other nodes."""
        node, place = self.place
        return Group((f"{'×'.join(self.group.axes)} between nodes",), self.grid.at_place(self.group.ranks, place), node)

    def takes(self, call: Call) -> bool:
        """Whether the call goes by node. All members say the same."""
        nbytes = max(one.numel() * one.element_size() for one in (call.inp, call.out))
        return call.kind in self.least and nbytes >= self.least[call.kind] and call.group == self.group


@torch.no_grad()
def phases(call: Call, levels: TwoLevels, pool: BufferPool) -> Iterator[list[Call]]:
    """The collectives that a call consists of: lists of what is under way together, each to be waited for before the next."""
    grid, inside, between, (node, place) = levels.grid, levels.inside, levels.between, levels.place
    op, site = call.op, call.site
    if call.kind == "all_gather":
        rows = grid.rows(call.out)
        rows[node, place].copy_(call.inp)
        yield [Call("all_gather", between, rows[:, place], rows[node, place], site=site)]
        yield [Call("all_gather", inside, own, own[place], site=site) for own in rows.unbind(0)]
    elif call.kind == "reduce_scatter":
        rows = grid.rows(call.inp)
        scratch = pool.take(grid.nodes * call.out.numel(), call.out)
        parts = scratch.view(grid.nodes, *call.out.shape)
        yield [Call("reduce_scatter", inside, parts[a], rows[a], op, site=site) for a in range(grid.nodes)]
        yield [Call("reduce_scatter", between, call.out, parts, op, site=site)]
        pool.give(scratch)
    else:
        (terms, last), (sums, rest) = (_divided(one.view(-1), grid.places) for one in (call.inp, call.out))
        if call.out is not call.inp:
            rest.copy_(last)
        own = sums[place]
        ends = [Call("all_reduce", group, rest, rest, op, site=site) for group in (inside, between) if rest.numel()]
        yield [Call("reduce_scatter", inside, own, terms, op, site=site), *ends[:1]]
        yield [Call("all_reduce", between, own, own, op, site=site), *ends[1:]]
        yield [Call("all_gather", inside, sums, own, site=site)]


def _divided(flat: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The tensor as n rows, and the part that does not divide."""
    width = flat.numel() // n
    return flat[: width * n].view(n, width), flat[width * n :]


def in_turn(steps: Iterator[list[Call]], start: Callable[[Call], Wait]) -> Wait:
    """Start the first phase; the wait does all others."""
    under_way = [start(call) for call in next(steps)]

    def wait() -> None:
        for one in under_way:
            one()
        for together in steps:
            for one in [start(call) for call in together]:
                one()

    return wait


class Courier:
    """A thread that brings calls through their phases, one call after the other, while the rank computes. All members of a group
    give it their calls in the same order."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self._errands: queue.SimpleQueue[tuple[Iterator[list[Call]], Callable[[Call], Wait], Future[None]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def send(self, steps: Iterator[list[Call]], start: Callable[[Call], Wait]) -> Wait:
        """Have all phases done in their turn; the wait raises what they raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives by node", daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._errands.put((steps, start, done))
        return done.result

    def _run(self) -> None:
        while True:
            steps, start, done = self._errands.get()
            try:
                in_turn(steps, start)()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            del steps, start, done
