"""The estimator and the compiler say the same of a layout: whether it is allowed, whether it fits, and about what it takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from autopar.costmodel.estimator.search import search
from autopar.costmodel.estimator.shape import ParallelConfig
from autopar.costmodel.estimator.step import estimate_workload
from autopar.costmodel.estimator.workload import Workload, not_emitted
from autopar.costmodel.software import Software
from autopar.errors import ConstraintError
from benchmarks import agree, agree_cases
from benchmarks.published_compiled import forced_options, inexpressible

SMALL = agree_cases.SMALL
SAMPLE = Path(__file__).parent / "published_sample.json"


def shallow(w: Workload) -> Workload:
    """The case with as few layers as its stages need."""
    layers = min(w.model.layers, max(2, 2 * w.parallel.pp * w.parallel.V))
    return replace(
        w, model=replace(w.model, layers=layers, first_dense_layers=min(w.model.first_dense_layers, layers - 1))
    )


def check(cases: Iterable[Workload]) -> None:
    """Every case is answered alike."""
    asked = [w for w in cases if not inexpressible(w)]
    differ = [agree.report(a) for a in map(agree.agreement, asked) if a.differ]
    assert asked
    assert not differ, "\n".join(differ)


LAYOUTS = [
    agree_cases.case(SMALL, 3, 2, dp=3, zero=3),
    agree_cases.case(SMALL, 4, 4, dp=4, zero=2),
    agree_cases.case(SMALL, 8, 1, dp=2, tp=4, zero=1, recompute="selective"),
    agree_cases.case(replace(SMALL, layers=4), 2, 4, pp=2, recompute="full"),
    agree_cases.case(replace(agree_cases.MIXTURE, layers=2), 4, 2, dp=4, ep=4),
    agree_cases.case(replace(SMALL, seq_len=1 << 18), 1),
    agree_cases.case(agree_cases.SMALL_GPT, 2, 2, cp=2),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("at", range(len(LAYOUTS)))
def test_layouts_of_every_kind_are_answered_alike(at: int) -> None:
    check([LAYOUTS[at]])


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(list(agree_cases.refusable()))))
def test_what_cannot_be_cut_is_refused_by_both(at: int) -> None:
    check(islice(agree_cases.refusable(), at, at + 1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("kinds", ["unequal", "kinds", "stages", "presets"])
def test_the_long_list_is_answered_alike(kinds: str, part: int) -> None:
    check(list(agree_cases.CASES[kinds]())[part::8])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_published_layouts_are_answered_alike(part: int, tmp_path: Path) -> None:
    check(map(shallow, list(agree_cases.published(str(SAMPLE)))[part::4]))


UNEQUAL = [
    agree_cases.rows(agree_cases.case(SMALL, 5, micro_batch=4, dp=5, zero=3), 17),
    agree_cases.case(replace(agree_cases.SMALL_GPT, vocab=50257), 8, tp=8),
    agree_cases.case(agree_cases.SMALL_GPT, 8, dp=2, tp=4, zero=3),
    agree_cases.case(replace(agree_cases.SMALL_MIXTURE, experts=7), 8, 2, dp=2, tp=4, zero=1),
    agree_cases.case(SMALL, 5, tp=5),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("at", range(len(UNEQUAL)))
def test_unequal_parts_are_answered_alike(at: int) -> None:
    check([UNEQUAL[at]])


@pytest.mark.slow
def test_a_mesh_that_leaves_no_choice_hides_none_with_shares() -> None:
    w = agree_cases.case(replace(agree_cases.SMALL_MIXTURE, ffn=1026), 8, dp=2, ep=2, tp=4)
    program = agree._compiled(w, forced_options(w))
    assert program.plan.stages[0].mesh.uneven
    assert not agree.uncut(program, w)


def test_the_longest_part_decides() -> None:
    """25 heads over 8 ranks are four of some, and so are the 256 · 25 features of an MLP."""
    w = agree_cases.case(replace(agree_cases.SMALL_GPT, vocab=50257), 8, tp=8)
    parts = w.parallel.parts(w.model, unequal=True)
    assert (25 / parts.heads, 6400 / parts.mlp, 50257 / parts.vocabulary) == (4, 4 * 256, 6283)
    assert w.parallel.parts(w.model, unequal=False).heads == 8
    uneven = agree_cases.rows(agree_cases.case(SMALL, 5, micro_batch=4, dp=5), 17)
    assert (uneven.microbatches, uneven.sequences) == (1, 4)
    assert agree_cases.rows(agree_cases.case(SMALL, 4, micro_batch=2, dp=4), 30).microbatches == 5
    as_framework = replace(w, software=Software("bf16"))
    with pytest.raises(ConstraintError, match="25 heads cannot be split over tp=8"):
        estimate_workload(as_framework)


def test_the_sizes_that_must_divide_stand_in_one_table() -> None:
    plan = ParallelConfig(dp=2, tp=8, cp=2, ep=2, sequence_parallel=True)
    cuts = {cut.what: (cut.units, cut.ranks) for cut in plan.cuts(agree_cases.DEEPSEEK)}
    assert cuts == {
        "heads": (16, 8),
        "heads of keys": (16, 8),
        "entries of the vocabulary": (32000, 8),
        "features of an MLP": (8192, 8),
        "experts": (16, 2),
        "features of an expert": (1408, 8),
        "positions": (4096, 16),
    }
    assert not plan.impossible(agree_cases.DEEPSEEK)


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (agree_cases.case(SMALL, 8, dp=8, precision="fp8"), "float8"),
        (agree_cases.case(agree_cases.MIXTURE, 8, dp=4, tp=2, ep=8), "experts apart over ep=8 of dp=4"),
        (agree_cases.case(SMALL, 8, dp=8, recompute="mlp"), "recompute 'mlp'"),
    ],
)
def test_what_no_emitted_program_has_is_refused_of_one(w: Workload, reason: str) -> None:
    assert reason in inexpressible(w)
    with pytest.raises(ConstraintError, match=reason):
        estimate_workload(w)


def test_a_search_for_emitted_programs_finds_what_they_have() -> None:
    w = agree_cases.case(replace(agree_cases.MIXTURE, layers=8), 8, 16, dp=8)
    found = search(w.model, w.cluster, batch=w.batch, software=w.software, top=3)
    assert found.best
    for one in found.best:
        assert one.estimate.fits
        assert not not_emitted(w.at(one.plan))


def test_a_search_for_emitted_programs_takes_any_number_of_ranks() -> None:
    w = agree_cases.rows(agree_cases.case(SMALL, 5, dp=5), 17)
    found = search(w.model, w.cluster, batch=w.batch, software=w.software, top=2)
    assert found.best[0].plan.parallel.dp == 5
    for one in found.best:
        assert one.estimate == estimate_workload(w.at(one.plan))
    frameworks = search(w.model, w.cluster, batch=w.batch, software=Software("bf16"))
    assert {one.plan.parallel.dp for one in frameworks.best} == {1}


def test_the_answers_are_counted_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        agree_cases.case(SMALL, 2, dp=2),
        agree_cases.case(SMALL, 2, dp=2, microbatches=1.5),
        agree_cases.case(SMALL, 2, dp=2, precision="fp8"),
    ]
    monkeypatch.setattr(agree, "CASES", {"few": lambda: iter(cases)})
    assert agree.main(["--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "agree.json").read_text())
    assert (written["cases"], written["refused_by_both"], written["fit_by_both"]) == (2, 1, 1)
    assert list(written["left_out"].values()) == [1]
