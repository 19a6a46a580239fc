"""Every zoo model in a pipeline computes what it computes on one device: any cut, any schedule, any inner mesh.

Stages are cut at random places onto random groups of ranks with random meshes and random plans inside; forced are the
number of groups P, the schedule, and microbatch counts around the corners of the schedules: 1, P - 1, P, 2P, 4P + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import autopar
from autopar.passes.lower.cut import cut_points
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.pipelined import SAMPLES, assert_right, on_ranks

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", "interleaved", "zb-v", "interleaved-zb", "dualpipev")
TWO_STAGES = ("interleaved", "zb-v", "interleaved-zb", "dualpipev")
RANDOM_PLANS = 50

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)


def counts(pp: int) -> list[int]:
    """Microbatches around the corners of a schedule."""
    return sorted({1, pp - 1, pp, 2 * pp, 4 * pp + 1})


def check(zoo: ZooModel, pp: int, schedule: str, m: int, seed: int, ranks: int = 4, samples: int = SAMPLES) -> None:
    """One random pipeline of a training program."""
    program = on_ranks(zoo.name, ranks, m, samples)
    if pp * (2 if schedule in TWO_STAGES else 1) > len(cut_points(program.ir)) + 1:
        pytest.skip(f"{zoo.name} has too few places to cut")
    plan = autopar.random_plan(program, seed, pp, schedule)
    made = program.with_plan(plan)
    assert made.pp == pp
    assert plan.schedule == schedule
    assert_right(made, zoo.name)


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        *[(2, "1f1b"), (2, "zb-v"), (2, "interleaved"), (3, "zb-h2"), (3, "gpipe"), (4, "zb-h1"), (4, "zb-auto")],
        *[(2, "interleaved-zb"), (2, "dualpipev")],
    ],
)
def test_a_pipeline_equals_one_device(zoo: ZooModel, pp: int, schedule: str) -> None:
    check(zoo, pp, schedule, 4, seed=pp)


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", counts(3))
def test_every_schedule_runs_any_number_of_microbatches(schedule: str, m: int) -> None:
    check(BY_NAME["mlp"], 3, schedule, m, seed=m)


def sweep() -> Iterator[tuple[ZooModel, str, int, int]]:
    """Every model under every schedule at a third of the corners, in turn, so that all pairs occur."""
    corners = [(pp, m) for pp in (2, 3, 4) for m in counts(pp)]
    for (i, zoo), (j, schedule) in itertools.product(enumerate(MODELS), enumerate(SCHEDULES)):
        for pp, m in corners[(i + j) % 3 :: 3]:
            yield zoo, schedule, pp, m


@pytest.mark.slow
@pytest.mark.parametrize(("zoo", "schedule", "pp", "m"), list(sweep()), ids=str)
def test_every_schedule_at_every_corner_equals_one_device(zoo: ZooModel, schedule: str, pp: int, m: int) -> None:
    check(zoo, pp, schedule, m, seed=SCHEDULES.index(schedule) + m)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("seed", range(RANDOM_PLANS))
def test_many_random_pipelines_equal_one_device(zoo: ZooModel, seed: int) -> None:
    m = (1, 2, 3, 5)[seed % 4]
    ranks = (4, 8, 2)[seed % 3]
    program = on_ranks(zoo.name, ranks, m, samples=4 if seed % 2 else SAMPLES)
    plan = autopar.random_plan(program, 100 + seed, pp=2 + seed % 3)
    assert_right(program.with_plan(plan), zoo.name)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_on_meshes_of_several_axes_equal_one_device(zoo: ZooModel, schedule: str, pp: int) -> None:
    check(zoo, pp, schedule, 4, seed=10 * pp, ranks=8, samples=4)


@pytest.mark.few(1)
@every_model
def test_inference_in_a_pipeline_equals_one_device(zoo: ZooModel) -> None:
    for pp, seed in itertools.product((2, 3), range(2)):
        program = on_ranks(zoo.name, 4, 3, training=False)
        plan = autopar.random_plan(program, seed, pp)
        assert_right(program.with_plan(plan), zoo.name)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp in (2, 3, 4) for m in counts(pp)])
def test_inference_at_every_corner_equals_one_device(zoo: ZooModel, pp: int, m: int) -> None:
    program = on_ranks(zoo.name, 4, m, training=False)
    for seed in range(3):
        assert_right(program.with_plan(autopar.random_plan(program, seed, pp)), zoo.name)
