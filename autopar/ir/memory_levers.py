"""The levers that trade memory for time: the one table that options, solvers, search and explanations read.

    recompute   backward makes values again that forward would have kept             a policy: which classes of ops
    offload     bytes rest in slower memory beside the device while they wait        an offload kind: which bytes
    precision   values are computed in a narrower dtype                              a dtype

A new one is a row here, and `Options` takes its name. A recompute policy says of which classes of ops
(`autopar.passes.rules.policies`) the values are made again; an offload kind says which bytes move. `tried`: whether the
search looks at it by itself where memory is short; `proposed`: whether an error about memory may propose it. Both go
through the rows in their order. What moves is placed most used first, each thing in the fastest tier that has room.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecomputePolicy:
    """again: classes of ops whose values backward makes again. tried: whether the search starts from it."""

    name: str
    again: frozenset[str]
    tried: bool = False


@dataclass(frozen=True)
class OffloadKind:
    """moves: which of MOVABLE rest in memory tiers. tried, proposed: by the search, by an error."""

    name: str
    moves: frozenset[str]
    tried: bool = False
    proposed: bool = False


OP_CLASSES = ("attention", "light", "dear")
"""Attention; what is pointwise or a reduction, little arithmetic for what it holds; all that is dear to make again."""

RECOMPUTE_POLICIES = {
    row.name: row
    for row in (
        RecomputePolicy("none", frozenset()),
        RecomputePolicy("selective", frozenset({"attention", "light"}), tried=True),
        RecomputePolicy("full", frozenset(OP_CLASSES), tried=True),
    )
}
"""Options.recompute, where it is not "auto"."""

MOVABLE = ("activations", "parameters", "optimizer")
"""The state that can rest in memory tiers, most used first. `autopar.ir.resting` says which bytes move with which."""

OFFLOAD_KINDS = {
    row.name: row
    for row in (
        OffloadKind("none", frozenset(), tried=True),
        OffloadKind("optimizer", frozenset({"optimizer"}), tried=True, proposed=True),
        OffloadKind("activations", frozenset({"activations"}), tried=True),
        OffloadKind("parameters", frozenset({"optimizer", "parameters"}), proposed=True),
        OffloadKind("all", frozenset(MOVABLE), tried=True, proposed=True),
    )
}
"""Options.offload, where it is not "auto"."""

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of mixed precision by the names of Options.precision."""


def forced_offload(name: str) -> frozenset[str]:
    """The state that `Options.offload` forces into memory tiers; nothing where the planner chooses."""
    return OFFLOAD_KINDS[name].moves if name != "auto" else frozenset()


def offload_name(moves: frozenset[str]) -> str:
    """The `Options.offload` that moves just this."""
    return next(kind.name for kind in OFFLOAD_KINDS.values() if kind.moves == moves)
