"""Pipelines that cannot be, and plans whose stages or action tables somebody broke, are refused before anything runs."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autopar
from autopar import Options
from autopar.errors import CheckError, ConstraintError, InfeasibleError, InputError, NoRoomError, PlanError
from autopar.ir.actions import show_row
from tests.test_errors import X, Y, build, message


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))


def piped(cluster: int = 4, **options: Any) -> autopar.Program:
    return build(deep(), cluster=cluster, options=Options(**options))


@pytest.mark.parametrize(
    ("cluster", "options", "says"),
    [
        (
            32,
            {"pp": 30},
            "Options ask for 30 stages; this model can be cut into 8 at most (its blocks: 0, 1, 2, 3, 4, 5)",
        ),
        (4, {"pp": 5}, "Options ask for 5 stages; .* and the cluster has 4 ranks; ask for fewer"),
        (
            4,
            {"pp": 2, "chunks": 20},
            r"Options ask for 40 stages \(20 on each of 2 groups of ranks: Options.chunks\); this",
        ),
        (
            8,
            {"pp": 8, "schedule": "zb-v"},
            r"Options ask for 16 stages \(2 on each of 8 groups of ranks: the schedule zb-v\); this model can be cut into 8 at",
        ),
        (4, {"stage_boundaries": ["7.1"]}, "no stage can start at '7.1'; the places are 1, 2, 3, 4, 5"),
        (4, {"stage_boundaries": ["4", "2"]}, "must be in the model's order and differ; they are ['4', '2']"),
        (4, {"stage_boundaries": ["2", "2"]}, "must be in the model's order and differ; they are ['2', '2']"),
        (4, {"stage_boundaries": ["3"], "pp": 3}, "['3'] make 2 stages, Options.pp is 3; leave one of them out"),
        (
            4,
            {"stage_boundaries": ["2", "4"], "chunks": 2},
            "make 3 stages, of which every group of ranks runs 2 .*; name pp x 2 stages in the model's order",
        ),
        (4, {"stage_boundaries": ["2", "3", "4"], "chunks": 2, "pp": 3}, "make 4 stages, .*; name 3 x 2 stages in"),
        (4, {"stage_boundaries": ["4"], "schedule": "interleaved"}, "make 2 stages, .* for two groups or more"),
        (2, {"stage_boundaries": ["2", "4"]}, "make 3 stages on 3 groups of ranks, the cluster has 2 ranks"),
        (4, {"pp": 2, "schedule": "2f2b"}, "'2f2b' is unknown; choose auto or one of none, forward, gpipe, 1f1b,"),
        (4, {"schedule": "2f2b"}, "'2f2b' is unknown; choose auto or one of none, forward, gpipe, 1f1b,"),
        (
            4,
            {"pp": 2, "schedule": "1f1b", "chunks": 2},
            "schedule 1f1b runs 1 stage per group of ranks, Options.chunks is 2",
        ),
        (4, {"pp": 2, "schedule": "interleaved", "chunks": 1}, "interleaved runs 2 or more stages per group"),
        (4, {"pp": 2, "schedule": "zb-v", "chunks": 3}, "schedule zb-v runs 2 stages per group"),
        (
            3,
            {"pp": 2, "schedule": "interleaved"},
            "2 stages on each of 2 groups of ranks, .*; 3 ranks are no 2 equal groups; choose 3 groups, 1f1b",
        ),
        (5, {"stage_boundaries": ["1", "2", "4"], "chunks": 2}, "no 2 equal groups; choose another number of ranks"),
        (
            4,
            {"pp": 2, "mesh": {"dp": 4}},
            "has 4 ranks, a stage of the pipeline has 2; make the axis sizes multiply to 2",
        ),
        (
            4,
            {"pp": 2, "microbatches": 3},
            "batch of 8 (input 0) is not divisible by microbatches=3; choose a divisor of 8",
        ),
        (
            8,
            {"pp": 3, "mesh": {"dp": 2}},
            "that of every group of ranks of a pipeline, and has 2; the options ask for 3 groups .* has 8 ranks; choose a number",
        ),
        (
            6,
            {"stage_boundaries": ["3"], "mesh": {"dp": 2}},
            "the options ask for 2 groups of ranks, the cluster has 6 ranks; make the axis sizes multiply to 3",
        ),
        (
            4,
            {"chunks": 5},
            r"Options ask for 10 stages \(5 on each of 2 groups of ranks: Options.chunks\); this .* 8 at most",
        ),
        (2, {"chunks": 2, "mesh": {"dp": 2}}, "ask for two or more groups of ranks, the cluster has 2 ranks"),
        (4, {"pp": 2, "schedule": "forward"}, "'forward' is for inference, and this is a training step; choose auto"),
        (4, {"pp": 2, "microbatches": 8, "strategy": "zero3"}, "has fewer rows than dp=2 times microbatches=8"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_pipelines_that_cannot_be(cluster: int, options: dict, says: str) -> None:
    text = message(InputError, lambda: piped(cluster, **options))
    assert says in text or re.search(says, text), text


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"pp": 2, "mesh": {"ep": 2}, "strategy": "zero1"},
            InfeasibleError,
            "strategy 'zero1' on mesh ep=2: this model has no experts to shard along ep=2; leave it out",
        ),
        (
            {"pp": 2, "constraints": {"0.0.weight": "[@ep, .]"}, "mesh": {"dp": 2}},
            ConstraintError,
            "constraint '0.0.weight' uses axis ep, the mesh is dp=2; name its axes",
        ),
        (
            {"pp": 2, "mesh": {"dp": 2}, "strategy": "dp", "constraints": {"0.0.weight": "[@dp, .]"}},
            ConstraintError,
            "no choice is left for param 0.0.weight on mesh dp=2, which may rest as .*: strategy 'dp' and constraints "
            r"{'0.0.weight': '\[@dp, .\]'} cannot be met there; take another strategy, looser constraints, or another mesh",
        ),
    ],
    ids=str,
)
def test_stages_without_a_choice_say_what_leaves_none(options: dict, error: type[Exception], says: str) -> None:
    text = message(error, lambda: piped(4, **options))
    assert re.search(says, text), text
    assert "fits in" not in text


def test_a_mesh_of_stages_goes_with_stages_that_are_named() -> None:
    program = piped(4, stage_boundaries=["3"], mesh={"dp": 2})
    assert [(str(stage.mesh), stage.mesh.offset) for stage in program.plan.stages] == [("dp=2", 0), ("dp=2", 2)]


def test_several_stages_per_group_are_not_looked_for_on_one_rank() -> None:
    assert len(piped(3, chunks=2).plan.stages) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pp": 0}, "Options.pp must be a whole number from 1 to 1048576, got 0"),
        ({"chunks": 1.5}, "Options.chunks must be a whole number from 1 to 1048576, got 1.5"),
        ({"stage_boundaries": "layers.8"}, "must be a list of module paths, such as ['layers.8'], got 'layers.8'"),
        ({"stage_boundaries": [8]}, "must be a list of module paths"),
    ],
    ids=str,
)
def test_options_of_a_pipeline_that_cannot_be(options: dict, says: str) -> None:
    assert says in message(InputError, lambda: Options(**options))


def test_a_schedule_for_one_group_is_refused_for_two() -> None:
    text = message(PlanError, lambda: piped(pp=2, schedule="none"))
    assert "is for one group of ranks, this pipeline has 2; use 1f1b" in text


def test_a_forced_strategy_counts_the_ranks_of_a_stage() -> None:
    assert piped(pp=2, microbatches=4, strategy="zero3").pp == 2


@pytest.mark.slow
def test_memory_that_no_cut_can_meet_says_what_would() -> None:
    text = message(NoRoomError, lambda: piped(pp=2, memory_bytes=500))
    short = re.search(
        r"no pipeline with pp=2 fits in 500 B per rank.*; use (\d+) ranks or more, or as much memory", text
    )
    assert short, text
    assert int(short[1]) > 4
    assert piped(pp=2, memory_bytes=20_000).pp == 2


@functools.cache
def cut_in_two() -> autopar.Program:
    """A pipeline of two stages, and its table in the plan."""
    free = build(deep(), options=Options(microbatches=4, pp=1))
    made = free.with_plan(autopar.random_plan(free, 0, 2, "zb-h1"))
    rows = tuple(map(show_row, made.lowered.table))
    return free.with_plan(replace(made.plan, table=rows))


def hand_edited(change: Callable[[dict], Any], path: Path) -> autopar.Program:
    """The two stages from a plan.json that somebody edited."""
    data = copy.deepcopy(cut_in_two().plan.to_dict())
    change(data)
    path.write_text(json.dumps(data))
    return build(deep(), plan=path)


def _row(group: int, change: Callable[[list[str]], list[str]]) -> Callable[[dict], None]:
    def edit(data: dict) -> None:
        data["table"][group] = " ".join(change(data["table"][group].split()))

    return edit


def _swapped(a: str, b: str) -> Callable[[list[str]], list[str]]:
    return lambda row: [{a: b, b: a}.get(word, word) for word in row]


def _other(word: str) -> str:
    """The same action of microbatch 1 instead of 0, and the other way round."""
    return word[0] + {"0": "1", "1": "0"}.get(word[1], word[1]) + word[2:]


def _without(word: str) -> Callable[[list[str]], list[str]]:
    return lambda row: [w for w in row if w != word]


def test_a_table_written_out_in_the_plan_replays(tmp_path: Path) -> None:
    again = hand_edited(lambda data: None, tmp_path / "plan.json")
    assert again.lowered.table == cut_in_two().lowered.table
    batch = X, Y
    assert autopar.verify(again, again.model, batch).ok


def test_another_order_that_is_possible_replays_too(tmp_path: Path) -> None:
    again = hand_edited(
        _row(1, lambda row: [w for w in row if w[0] != "W"] + [w for w in row if w[0] == "W"]), tmp_path / "plan.json"
    )
    assert autopar.verify(again, again.model, (X, Y)).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_row(0, _without("F2.0")), "group 0.*2"),
        (_row(1, _without("W3.1")), "group 1.*"),
        (_row(1, _swapped("F0.1", "B0.1")), "group 1, action 0 .*B0.1"),
        (_row(0, _swapped("F0.0", "B3.0")), "group 0"),
        (_row(1, _swapped("F0.1", "F1.1")), "B0.1.*comes before F0.1"),
        (_row(1, lambda row: [_other(w) for w in row]), "order"),
        (_row(0, lambda row: [*row, "F0.0"]), "group 0"),
        (_row(0, lambda row: [*row, "F4.0"]), "group 0"),
        (_row(0, lambda row: [*row, "F0.1"]), "stage 1 runs on group 1"),
        (_row(0, lambda row: [*row, "X0.0"]), "'X0.0' is no action; write F, B or W"),
        (_row(0, lambda row: [*row, "F0"]), "'F0' is no action"),
        (lambda data: data["table"].pop(), "the action table has 1 rows for 2 groups"),
        (lambda data: data["table"].append("F0.0"), "the action table has 3 rows for 2 groups"),
    ],
    ids=[
        "dropped F",
        "dropped W",
        "B before F",
        "B3 before F3",
        "F0 and F1",
        "microbatches 0 and 1",
        "twice",
        "no microbatch",
        "other's stage",
        "no kind",
        "no stage",
        "a row less",
        "a row more",
    ],
)
def test_a_broken_table_is_rejected_before_anything_runs(
    change: Callable[[dict], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, CheckError), match=says):
        hand_edited(change, tmp_path / "plan.json")


def _stages(change: Callable[[list[dict]], Any]) -> Callable[[dict], None]:
    return lambda data: change(data["stages"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_stages(lambda s: s[1].update(first_rank=0)), "ranks"),
        (
            _stages(lambda s: s[0].update(calls=[0, s[0]["calls"][1] + 1])),
            "in order they must hold each of the program's",
        ),
        (_stages(lambda s: s.reverse()), "in order they must hold each of the program's"),
        (_stages(lambda s: s.pop()), "its meshes have 1 ranks in all, it says 2"),
        (lambda data: data.update(schedule="2f2b", table=[]), "unknown schedule '2f2b'; known: none, forward, gpipe"),
        (
            lambda data: data.update(schedule="interleaved", table=[]),
            "needs at least 2 stages on every group, group 0 has 1",
        ),
    ],
    ids=["ranks", "calls", "order", "missing", "unknown schedule", "other stages"],
)
def test_broken_stages_are_rejected_before_anything_runs(
    change: Callable[[dict], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=says):
        hand_edited(change, tmp_path / "plan.json")
