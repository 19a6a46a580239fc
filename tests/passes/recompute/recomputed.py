"""Programs and plans for the tests of recompute: a llama of useful size on described devices, random sets of values."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Options, ParallelProgram, Plan
from autopar.ir.program import Template
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.recomputation import made_forward
from tests.zoo.transformers import Llama, LlamaBlock

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def llama_on(
    devices: int = 4, layers: int = 4, d_model: int = 1024, seq: int = 1024, batch: int = 8, **options: object
) -> ParallelProgram:
    """A llama on described A100s; nothing is allocated."""
    with torch.device("meta"):
        model = Llama(vocab=8192, seq=seq, d_model=d_model, layers=layers)
        model.blocks = nn.ModuleList(LlamaBlock(d_model, 8, 4, 3 * d_model) for _ in range(layers))
        ids = torch.zeros(batch, seq, dtype=torch.long)
    cluster = ClusterSpec.homogeneous(devices=devices, device="a100", devices_per_node=max(devices, 1))
    return autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=Options(**options))  # type: ignore[arg-type]


def with_random_recompute(program: ParallelProgram, plan: Plan, seed: int, share: float) -> Plan:
    """The plan with a random share of all values of forward made again."""
    rng = random.Random(seed)
    return _with(program, plan, lambda t: tuple(v for v in sorted(made_forward(t)) if rng.random() < share))


def with_policy(program: ParallelProgram, plan: Plan, policy: str) -> Plan:
    """The plan with what a named policy makes again."""
    return _with(program, plan, lambda t: policy_set(t, policy))


def _with(program: ParallelProgram, plan: Plan, again: Callable[[Template], tuple[str, ...]]) -> Plan:
    stages = []
    for stage in plan.stages:
        templates = {n: replace(t, recompute=again(program.ir.templates[n])) for n, t in stage.templates.items()}
        stages.append(replace(stage, templates=templates))
    return replace(plan, stages=tuple(stages))
