"""A problem in which other values are made again is that of the first with other weights, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.ir.mesh import Mesh
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.recomputation import made_forward
from autopar.passes.shard.baselines import Baseline
from autopar.passes.shard.solve_mesh import OnMesh, build_problem
from tests.passes.shard.test_restricted import assert_alike, on
from tests.zoo.pipelined import on_ranks

Sets = dict[str, tuple[str, ...]]


def sets_of(mesh: OnMesh) -> list[Sets]:
    """The named policies, the values of one template alone, and every other value."""
    templates = mesh.program.templates
    named: list[Sets] = [{n: policy_set(t, policy) for n, t in templates.items()} for policy in ("full", "selective")]
    one = max(templates, key=lambda name: len(made_forward(templates[name])))
    some: Sets = {n: tuple(sorted(made_forward(t))[::2]) for n, t in templates.items()}
    return [named[0], {one: named[0][one]}, {}, some, named[1]]


def with_biases() -> OnMesh:
    """A model whose last norm has a bias, which backward reads for nothing but what it makes again."""
    base = on_ranks("gpt2", 4, 4)
    return OnMesh(base.ir, Pricers(base.cluster)[Mesh.of(dp=4)], base.rules, base.setting, autopar.Options())


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "zero3"), ("moe", "auto"), ("gpt2", "auto")])
def test_other_sets_of_recomputed_values_are_as_if_built_so(kind: str, strategy: str) -> None:
    mesh = with_biases() if kind == "gpt2" else on(kind, dp=4)
    mesh = replace(mesh, setting=replace(mesh.setting, microbatches=2, in_flight=3))
    first = problem = build_problem(mesh, strategy)
    for sets in sets_of(mesh):
        problem = problem.recomputing(sets)
        built = build_problem(mesh, strategy, sets)
        assert_alike(problem, built)
        assert problem.recomputations == built.recomputations
    assert_alike(first, build_problem(mesh, strategy))
    if kind == "gpt2":
        again = first.recomputing(sets_of(mesh)[0])
        slots = [slot for group in again.groups.values() for slot in group.slots]
        assert any(again._gathered_again(mesh.program.templates[name], slot) for name, slot in slots)


def test_a_problem_with_fewer_states_says_that_it_is_no_start() -> None:
    mesh = on("llama", dp=4)
    fewer = build_problem(mesh, "auto").restricted(Baseline("dp", mesh.program, mesh.pricer.mesh, mesh.rules).allows)
    with pytest.raises(AssertionError, match="all states"):
        fewer.recomputing({})
