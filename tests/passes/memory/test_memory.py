"""Bytes of a pipeline over its schedule: what is in flight, or waits, is held (measured: test_memory_measured)."""

from __future__ import annotations

import pytest

import autopar
from autopar.ir.actions import StageGraph, Table
from autopar.ir.lines import label
from autopar.passes.memory.peak import Moment, StageMemory
from autopar.passes.memory.step_peaks import group_peaks
from autopar.passes.schedule import build
from autopar.passes.search.by_microbatch import reduced_by_microbatch
from autopar.runtime.step.pipeline import most_sends
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.pipelined import on_ranks


def random_pipeline(
    zoo: ZooModel, seed: int, pp: int | None = None, schedule: str | None = None, m: int = 4
) -> autopar.Program:
    program = on_ranks(zoo.name, 4, m)
    return program.with_plan(autopar.random_plan(program, seed, pp, schedule))


def under(program: autopar.Program, table: Table) -> tuple[float, ...]:
    return group_peaks(program.lowered.graph, table, [s.memory for s in program.account.stages])


def test_more_microbatches_in_flight_hold_more() -> None:
    """GPipe holds all m, 1F1B as many as there are stages below, whatever m is. Gradients rest whole, so that the messages that
    are under way do not change with m."""
    peaks = {}
    for m in (4, 8):
        program = random_pipeline(BY_NAME["mlp"], 2, 2, "1f1b", m)
        program = program.with_plan(reduced_by_microbatch(program.plan, ()))
        graph = program.lowered.graph
        peaks[m] = {name: under(program, build(name, graph, m)) for name in ("gpipe", "1f1b")}
        held = [s.memory.actions["F"].after for s in program.account.stages]
        assert min(held) > 0
        for g, stage in enumerate(program.account.stages):
            least = stage.memory.resting_bytes + (m - 1) * held[g]
            assert peaks[m]["gpipe"][g] >= least
            assert peaks[m]["gpipe"][g] > peaks[m]["1f1b"][g]
    growth = [b - a for a, b in zip(peaks[4]["gpipe"], peaks[8]["gpipe"], strict=True)]
    held = [s.memory.actions["F"].after for s in program.account.stages]
    assert growth == pytest.approx([4 * h for h in held])
    assert peaks[4]["1f1b"] == peaks[8]["1f1b"]


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_what_waits_for_w_is_held_until_w(zoo: ZooModel) -> None:
    """A split schedule holds after B at least what W reads, and nothing after W."""
    program = random_pipeline(zoo, 3, 2, "zb-h1")
    for stage, counted in zip(program.stages, program.account.stages, strict=True):
        actions = counted.memory.actions
        assert actions["W"].after == 0
        learns = any(
            t.weights is not None and any(label(line).startswith("autopar.") for line in t.weights.lines)
            for t in stage.templates.values()
        )
        assert not learns or actions["B"].after > 0


@pytest.mark.slow
def test_delaying_w_costs_memory() -> None:
    program = random_pipeline(BY_NAME["llama"], 2, 2, "zb-h1", 8)
    graph = program.lowered.graph
    late = build("gpipe", graph, 8)
    delayed = tuple(row + tuple(a._replace(kind="W") for a in row if a.kind == "B") for row in late)
    at_once = tuple(
        tuple(x for a in row for x in ((a, a._replace(kind="W")) if a.kind == "B" else (a,))) for row in late
    )
    for slow, quick in zip(under(program, delayed), under(program, at_once), strict=True):
        assert slow >= quick
    assert sum(under(program, delayed)) > sum(under(program, at_once))


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
def test_inference_holds_nothing_between_microbatches(zoo: ZooModel) -> None:
    program = on_ranks(zoo.name, 4, 3, training=False)
    made = program.with_plan(autopar.random_plan(program, 1, 2))
    for stage in made.account.stages:
        assert stage.memory.actions["F"].after == 0
        assert stage.memory.resting["gradients"] == stage.memory.resting["optimizer"] == 0


def test_what_was_sent_stays_while_the_host_runs_ahead() -> None:
    """The host starts actions before the device has run those before them, so up to `most_sends` actions' sends are there
    beside the action with the peak."""
    graph = StageGraph.chain(2)
    table = build("gpipe", graph, 8)
    actions = {"F": Moment(5.0, 2.0, sent=1.0), "B": Moment(6.0, 0.0, sent=0.5)}
    waits, runs = (StageMemory({"parameters": 10.0}, actions, runs_ahead=ahead) for ahead in (False, True))
    assert most_sends(2) == 4
    assert group_peaks(graph, table, [waits] * 2)[0] == 10 + 7 * 2 + 6
    assert group_peaks(graph, table, [runs] * 2)[0] == 10 + 7 * 2 + 6 + 4 * 1.0


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(zoo.name, marks=pytest.mark.slow) for zoo in MODELS if zoo.name != "mlp")]
)
def test_what_a_peak_is_at_least_is_known_before_gradients_are_played(name: str, m: int) -> None:
    """The bound of one stage holds whichever of its gradients are reduced after every microbatch. It is more than what rests, and
    close where all sums stay as they were made."""
    base = on_ranks(name, 4, m)
    for seed in range(2):
        plan = autopar.random_plan(base, seed, pp=1, pieces=1)
        for names in ((), tuple(base.ir.trained)[::2], tuple(base.ir.trained)):
            counted = base.with_plan(reduced_by_microbatch(plan, names)).account
            rests = counted.stages[0].memory.resting_bytes
            assert rests < counted.least_peak_bytes <= counted.peak_bytes
            if m > 2 and not names and not plan.stages[0].mesh.uneven:
                assert counted.least_peak_bytes - rests > 0.9 * (counted.peak_bytes - rests)
