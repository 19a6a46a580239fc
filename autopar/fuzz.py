"""`random_plan`: a valid random Plan, the fuzzer of lowering and emission."""

from __future__ import annotations

import random

from autopar.compiled import ParallelProgram
from autopar.passes.costs import Pricer
from autopar.passes.shard.planner import extract, random_choice, random_mesh
from autopar.passes.shard.problem import Problem
from autopar.plan import Plan


def random_plan(program: ParallelProgram, seed: int) -> Plan:
    """A random mesh of the program's ranks, and a random state for every op, decision point and parameter."""
    rng = random.Random(seed)
    mesh = random_mesh(program.cluster.size, rng)
    pricer = Pricer(program.cluster, mesh)
    problem = Problem(program.ir, pricer, program.rules, program.setting)
    return extract(problem, random_choice(problem.graph, rng), program.cluster, program.options, f"random {seed}")
