"""The search against published plans, and its bounds against the estimates of random plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.costmodel import TransformerShape, estimate
from autopar.costmodel.estimator.branch_and_bound import BranchAndBound, Part
from autopar.costmodel.estimator.compare import Answers, compare, compare_all, describe, parts_s, row_space
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.schedules import schedule_name
from autopar.costmodel.estimator.search import search
from autopar.costmodel.estimator.space import PLAIN, Space, micro_batches, pipelines, sizes, storages
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.software import Software
from autopar.errors import ConstraintError, InfeasibleError
from benchmarks import published_plans

SAMPLE = json.loads((Path(__file__).parent / "published_sample.json").read_text())
OVER = {**SAMPLE[3], "id": "over", "batch": {"global": 48, "micro": 6, "grad_accum": 1}}
"""A row that is said not to fit and ran, of few plans."""
TINY = TransformerShape(layers=6, hidden=512, heads=8, ffn=2048, vocab=32000, seq_len=1024, gated_mlp=True)
TINY_MOE = replace(TINY, experts=4, topk=2, first_dense_layers=1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([*SAMPLE[3:35:8], OVER, SAMPLE[36]], id="a sixth"),
        pytest.param(SAMPLE, id="all", marks=pytest.mark.slow),
    ],
)
def rows(request):
    """Rows of the sample; of every kind some: runs that fit, that are said not to, and that ran out of memory."""
    return request.param


@pytest.fixture(scope="module")
def found(rows):
    """The rows, compared."""
    refused: list = []
    compared = list(compare_all(rows, refused=refused))
    assert not refused
    assert len(compared) == len(rows)
    return compared


def contains(space: Space, w: Workload) -> bool:
    """Whether a plan is in the space, equal names of one schedule and settings without effect aside."""
    parallel = w.parallel
    name = schedule_name(w.plan.schedule, parallel.vpp)
    name = "1f1b" if parallel.pp == 1 else "zb-h1" if name == "zb-1p" else name
    vpp = parallel.vpp if parallel.V > 1 else None
    data, b = parallel.data_ranks, w.plan.micro_batch
    group = None if parallel.shard_group == data or not parallel.zero else parallel.shard_group
    chosen_sizes = (parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep)
    return (
        chosen_sizes in sizes(w.model, w.cluster.size, w.batch, space)
        and b in micro_batches(w.batch, parallel.dp, space)
        and w.plan.recompute in space.recomputes
        and (name, vpp) in pipelines(w.model, parallel.pp, w.batch // (parallel.dp * b), space)
        and (data == 1 or (parallel.zero, group) in storages(data, space.zeros, parallel.zero == 3))
    )


@pytest.mark.parametrize("row", SAMPLE, ids=lambda r: r["id"])
def test_the_space_holds_every_published_plan(row):
    w = row_workload(row)
    for plain in (False, True):
        assert contains(row_space(w.parallel, w.plan.schedule, plain), w)


@pytest.mark.slow
def test_the_preferred_plan_is_never_slower_than_the_published_one(found):
    for c in found:
        if c.ran:
            assert c.gain >= -1e-9, (c.id, describe(c.published), describe(c.best))
        assert c.why
    assert any(c.gain > 0.1 for c in found)


def test_a_published_plan_over_the_predicted_memory_raises_the_limit_to_its_own_bytes(found):
    over = [c for c in found if not c.fits and c.ran]
    assert over
    for c in over:
        assert c.best.estimate.memory_bytes["reserved"] <= c.published.estimate.memory_bytes["reserved"] * (1 + 1e-9)
        assert c.strict is None or (
            c.strict.estimate.fits and c.best.estimate.step_time_s <= c.strict.estimate.step_time_s
        )


def test_a_run_that_ran_out_of_memory_gets_a_plan_that_fits(found):
    failed = [c for c in found if not c.ran]
    assert failed
    for c in failed:
        assert not c.fits
        assert c.best.estimate.fits


def test_the_parts_of_the_reason_add_up_to_the_step(rows, found):
    for row, c in zip(rows, found, strict=True):
        w = row_workload(row)
        for plan in (c.published, c.best):
            assert sum(parts_s(plan, w).values()) == pytest.approx(plan.estimate.step_time_s)
            assert parts_s(plan, w)["recompute"] >= 0


def test_rows_of_one_question_are_searched_once_and_smaller_spaces_reuse_the_answer():
    row = next(r for r in SAMPLE if r["parallel"]["pp"] == 1 and r["hardware"]["gpus"] == 8)
    answers = Answers()
    first = compare(row, answers)
    for other in (row, {**row, "id": "again"}):
        assert compare(other, answers).best == first.best
        assert compare(other, answers, plain=True).best == first.best
    (asked,) = answers.by_question.values()
    assert len(asked) == 1 + (first.best.plan.parallel.pp > 1 and first.best.plan.schedule not in PLAIN)


def test_a_plan_of_another_cluster_is_refused_by_name():
    row = {**SAMPLE[0], "id": "odd", "hardware": {**SAMPLE[0]["hardware"], "gpus": 24}}
    refused: list = []
    assert list(compare_all([row], refused=refused)) == []
    assert refused[0][0] == "odd"
    with pytest.raises(ConstraintError, match="ranks, but the cluster has 24"):
        compare(row)


def everything(model: TransformerShape, ranks: int, batch: int, space: Space):
    """Every plan of the space."""
    for dp, tp, pp, cp, ep in sizes(model, ranks, batch, space):
        for b in micro_batches(batch, dp, space):
            for sequence_parallel in {False, tp > 1}:
                for recompute in space.recomputes:
                    for zero3 in (False, True):
                        for schedule, vpp in pipelines(model, pp, batch // (dp * b), space):
                            for storage in storages(dp * cp, space.zeros, zero3):
                                expert_tp = tp if ep <= dp * cp else 1
                                yield Part(
                                    tp,
                                    cp,
                                    ep,
                                    expert_tp,
                                    sequence_parallel,
                                    b,
                                    ((dp, pp),),
                                    True,
                                    recompute,
                                    zero3,
                                    schedule,
                                    vpp,
                                    None,
                                    storage,
                                )


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [TINY, TINY_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("room", [2.3e9, 4e9])
def test_the_search_finds_the_best_of_a_space_tried_out_whole(model, room):
    cluster = ClusterSpec.homogeneous(devices=8, device="h100", devices_per_node=4)
    space = Space(schedules=("1f1b", "interleaved", "zb-h1", "zb-v"), recomputes=("none", "full"), max_cp=2)
    q = BranchAndBound(model, cluster, 8, Software(), space, room)
    fitting = [e for e in map(q.time, everything(model, 8, 8, space)) if e.memory_bytes["reserved"] <= room]
    if not fitting:
        with pytest.raises(InfeasibleError):
            search(model, cluster, batch=8, space=space, room_bytes=room)
        return
    found = search(model, cluster, batch=8, space=space, room_bytes=room, top=1).best[0].estimate
    assert found.step_time_s == pytest.approx(min(e.step_time_s for e in fitting), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_bound_on_the_way_to_a_plan_exceeds_its_estimate(data):
    model = data.draw(st.sampled_from([TINY, TINY_MOE, replace(TINY, layers=30, attention="materialised")]))
    ranks, batch = data.draw(st.sampled_from([4, 16, 64])), data.draw(st.sampled_from([16, 48, 64]))
    links = {
        "intra_bandwidth_Bps": data.draw(st.floats(1e9, 5e11)),
        "inter_bandwidth_Bps": data.draw(st.floats(1e9, 5e10)),
    }
    cluster = ClusterSpec.homogeneous(devices=ranks, device="a100", devices_per_node=min(ranks, 8), **links)
    q = BranchAndBound(
        model, cluster, batch, Software(kernels=data.draw(st.sampled_from(["fused", "eager"]))), Space(), 1e15
    )
    level, bounds = list(q.start()), []
    assume(level)
    while True:
        bound, part = data.draw(st.sampled_from(level))
        bounds.append(bound)
        if part.storage:
            break
        level = list(q.open(part))
        assume(level)
    exact = q.time(part).step_time_s
    assert max(bounds) <= exact
    again = estimate(model, cluster, part.plan(), batch=batch, software=Software(kernels=q.software.kernels))
    assert again.step_time_s == exact


def test_plain_spaces_have_no_zero_bubble_schedule_but_the_rows_own():
    assert row_space(row_workload(SAMPLE[0]).parallel, "none", plain=True).schedules == PLAIN
    zb = next(r for r in SAMPLE if r["schedule"] == "zb-2p")
    assert row_space(row_workload(zb).parallel, "zb-2p", plain=True).schedules == (*PLAIN, "zb-2p")


@pytest.mark.slow
def test_the_benchmark_prints_tables_and_writes_every_row(tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(SAMPLE[:4]))
    assert published_plans.main(["--file", str(path), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no published plan is predicted to be faster" in out
    assert "| rows compared | 4 | 4 |" in out
    written = json.loads((tmp_path / "published_plans.json").read_text())
    assert len(written["any schedule"]["rows"]) == 4
    assert published_plans.main(["--file", str(tmp_path / "none.json")]) == 2


def test_the_largest_saving_is_read_from_the_reason():
    assert published_plans.first_saving("saves 10.9% bubble, 2.0% recompute; pays 1.0% dp communication") == "bubble"
    words = "saves 1.0% kernels and launches; memory 10 to 20 GB"
    assert published_plans.first_saving(words) == "kernels and launches"


@pytest.mark.slow
def test_without_zero_bubble_schedules_no_published_plan_is_faster_either(rows, found):
    for every, common in zip(found, compare_all(rows, plain=True), strict=True):
        assert common.gain >= -1e-9 or not common.ran
        assert common.gain <= every.gain + 1e-9
