"""The chart of letters and the SVG show what the timeline says."""

import re
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel import simulate as sim
from autopar.errors import InputError
from autopar.ir.actions import StageGraph
from autopar.passes.schedule import build
from autopar.report.gantt import seconds_text, svg, text_gantt
from tests.passes.schedule.pipelines import chains, dags

SPACE = "{http://www.w3.org/2000/svg}"


def timeline_of(graph, name, m, seconds=(1.0, 1.0, 1.0), comm=0.0):
    return sim.simulate(build(name, graph, m), graph, sim.uniform(graph.stages, *seconds), comm)


def test_a_chart_at_two_columns_a_second_names_every_action():
    chart = text_gantt(timeline_of(StageGraph.chain(2), "zb-h1", 3), width=20).splitlines()
    assert chart[0] == "0 │F0F1  B0W0F2B1W1B2W2"
    assert chart[1] == "1 │  F0B0F1B1W0F2B2W1W2"
    assert chart[3] == "F forward, B backward, W weight gradients; a digit is the microbatch mod 10, blank is idle"
    assert chart[4] == "makespan 10 s, bubble 10.0%"


def test_wide_actions_are_filled_and_unsplit_ones_have_no_w_in_the_legend():
    chart = text_gantt(timeline_of(StageGraph.chain(2), "1f1b", 1, (1.0, 1.0, 0.0)), width=16)
    assert chart.splitlines()[:2] == ["0 │F0--        B0--", "1 │    F0--B0--"]
    assert "weight" not in chart


@given(case=st.one_of(chains(microbatches=6), dags(microbatches=5)), width=st.integers(1, 160))
def test_charts_of_any_schedule_have_a_row_per_group_and_fit(case, width):
    timeline = timeline_of(*case)
    rows = text_gantt(timeline, width).splitlines()
    assert len(rows) == len(case[0].groups) + 3
    assert all(len(row.split("│")[1]) <= width for row in rows[:-3])


def extent(group):
    """(left, right) of what a group of the picture draws, in pixels."""
    xs = [float(x) for x in re.findall(r"[ML] (\S+) \S+", group.find(f"{SPACE}path").get("d"))]
    return min(xs), max(xs)


@settings(max_examples=10)
@given(case=st.one_of(chains(microbatches=6), dags(microbatches=5)))
def test_the_svg_has_a_bar_for_every_action_where_and_as_long_as_it_runs(case):
    timeline = timeline_of(*case, comm=0.1)
    root = ElementTree.fromstring(svg(timeline, "<a & b>", width=1000))
    hinted = [(g, g.find(f"{SPACE}title")) for g in root.iter(f"{SPACE}g")]
    bars = {title.text.split(":")[0]: extent(group) for group, title in hinted if title is not None}
    events = [e for e in timeline.events if e.stream == "compute"]
    assert set(bars) == {e.name for e in events}
    scale = (1000 - 74 - 16) / timeline.makespan_s
    for e in events:
        assert bars[e.name][0] == pytest.approx(74 + e.start_s * scale, abs=0.01)
        assert bars[e.name][1] - bars[e.name][0] == pytest.approx((e.end_s - e.start_s) * scale, abs=0.01)
    texts = [t.text for t in root.iter(f"{SPACE}text")]
    assert "<a & b>" in texts
    assert f"group {len(timeline.busy_s) - 1}" in texts
    assert any(t.startswith("makespan") for t in texts)


def test_labels_of_the_svg_stay_inside_their_bars():
    timeline = timeline_of(StageGraph.chain(4), "1f1b", 20)
    groups = {g.get("id"): g for g in ElementTree.fromstring(svg(timeline, width=600)).iter(f"{SPACE}g")}
    names = [e.name for e in timeline.events if e.stream == "compute"]
    labelled = [(extent(groups[name]), groups.get(f"label of {name}")) for name in names]
    assert any(label is not None for _, label in labelled)
    for (left, right), label in labelled:
        if label is not None:
            assert 6 * len(label.find(f"{SPACE}text").text) <= right - left
    assert any(label is None for _, label in labelled)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'autopar\[plots\]'"):
        svg(timeline_of(StageGraph.chain(2), "1f1b", 2))


def test_an_empty_timeline_has_its_views():
    nothing = sim.simulate(((),), StageGraph(((),), ()), {})
    assert "nothing runs" in text_gantt(nothing)
    ElementTree.fromstring(svg(nothing))


def test_seconds_are_told_in_the_unit_that_fits():
    assert [seconds_text(s) for s in (0, 2.5, 0.0123, 4.2e-5, 3e-9)] == ["0 s", "2.5 s", "12.3 ms", "42 µs", "3 ns"]
