"""Programs whose ops of a kind take a given form: keys gathered or sent round, rows that travel to experts or stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.price.pricer import Pricer
from autopar.passes.shard.factors.graph import Key
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import spmd_plan
from autopar.passes.shard.solve import Solution, solve


class Layer(nn.Module):
    """Attention of several heads with its projections; a mask adds to the scores."""

    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.causal, self.dropout = causal, dropout
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, self.size * kv_heads, bias=False)
        self.v = nn.Linear(width, self.size * kv_heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        split = ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        q, k, v = (f(x).unflatten(-1, (n, self.size)).transpose(1, 2) for f, n in split)
        p = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, mask, p, self.causal and mask is None, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """A small one: causal, with a loss over tokens."""

    def __init__(self, dropout: float = 0.0, learned_mask: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.attention = nn.ModuleList(Layer(16, 4, 2, dropout=dropout) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.mask = nn.Parameter(torch.randn(1, 4, learned_mask, learned_mask)) if learned_mask else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(self.norm(x), self.mask)
            x = x + mlp(self.norm(x))
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), labels.flatten())


def with_attention(program: autopar.Program, **choices: str) -> autopar.Program:
    """The program under the best plan on its mesh whose attention makes these choices on the axes."""
    return with_choices(program, "attention", choices)


def with_choices(program: autopar.Program, op: str, choices: Mapping[str, str]) -> autopar.Program:
    """The same for ops that have `op` in their name."""
    mesh = program.plan.stages[0].mesh
    wanted = tuple(choices[axis] for axis in mesh.names)

    def allowed(key: Key, state: Any) -> bool:
        return key[0] != "op" or op not in key[2] or state == wanted

    pricer = Pricer(program.cluster, mesh)
    problem = Problem(program.ir, pricer, program.rules, program.setting, allowed)
    solution = solve(problem.graph, tie_price=1e-18)
    assert isinstance(solution, Solution)
    plan = spmd_plan(problem, list(solution.choice), program.cluster, program.options, "by hand")
    return program.with_plan(replace(plan, order=program.plan.order))


def carrying(program: autopar.Program, axis: str) -> autopar.Plan:
    """The plan with the rows of every mixture travelling along an axis."""

    def choices(stage: Any, choices: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("+t0+e" if name == axis else "" for name, _ in zip(stage.mesh.names, choices, strict=True))

    stages = []
    for stage in program.plan.stages:
        templates = {
            name: replace(
                template,
                strategies={
                    op: choices(stage, choice) if op.startswith("experts") else choice
                    for op, choice in template.strategies.items()
                },
            )
            for name, template in stage.templates.items()
        }
        stages.append(replace(stage, templates=templates))
    return replace(program.plan, stages=tuple(stages))
