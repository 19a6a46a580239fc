"""`autopar-dump` shows a saved program: plan, mesh, sharded graph, collectives, storage, the code of a rank."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import jsonschema
import networkx as nx
import pytest
import torch
from torch import nn

import autopar
from autopar.cli.dump import main
from autopar.cli.dump_sections import SECTIONS
from autopar.cli.pictures.drawn import clusters, repeats
from autopar.cli.pictures.svg import MOST, graph_svg
from autopar.cli.saved import read
from autopar.ir.text import size_text
from autopar.report.program_facts import FunctionFacts, LineFacts, TemplateFacts
from tests.ops.rings import Transformer, with_attention
from tests.report.page.pages import Block
from tests.test_house import ROOT


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = torch.zeros(8, 4, dtype=torch.long)
    program = autopar.compile(
        Blocks(),
        autopar.ClusterSpec.local(4),
        (ids, ids),
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(mesh={"dp": 2, "tp": 2}, strategy="zero3", constraints={"*.up.weight": "[@dp.tp, .]"}),
    )
    return program.save(tmp_path_factory.mktemp("dump") / "program")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages of two ranks, the head tied to the embedding."""
    model = Blocks()
    model.head.weight = model.embed.weight
    ids = torch.zeros(8, 4, dtype=torch.long)
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(4),
        (ids, ids),
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(pp=2, microbatches=4, schedule="zb-h1", mesh={"dp": 2}),
    )
    return program.save(tmp_path_factory.mktemp("dump") / "pipeline")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_the_default_is_a_screenful_of_what_matters_most(saved, pipeline, capsys):
    for directory, facts in (
        (
            saved,
            ("plan        dp=2×tp=2, chosen by zero3", "0–3    dp=2×tp=2", "blocks ×3", "dp=2: ranks 0 2, and so on"),
        ),
        (pipeline, ("zb-h1 of 4 microbatches", "2–3    dp=2", "between stages: 2 transfers", "embed.weight and ")),
    ):
        text = said(capsys, str(directory))
        assert len(text.splitlines()) <= 40
        for part in (*facts, "Blocks, training on 4 ranks", "messages of a step", "all_gather", "more: --section"):
            assert part in text, part
        assert all(section in text for section in SECTIONS)


def test_the_screenful_adds_up_as_the_sections_do(saved, capsys):
    """The messages of a kind and axis are those of its collectives; shards are bytes of parameters on a rank."""
    data = json.loads(said(capsys, str(saved), "--json"))
    text = said(capsys, str(saved))
    (row,) = (line.split() for line in text.splitlines() if line.split()[:2] == ["all_gather", "dp"])
    own = [one for one in data["collectives"] if (one["kind"], one["axis"]) == ("all_gather", "dp")]
    assert int(row[2]) == sum(one["times"] for one in own)
    assert " ".join(row[3:5]) == size_text(sum(one["times"] * one["nbytes"] for one in own))
    (row,) = (line for line in text.splitlines() if line.startswith("  [@dp.tp, .]"))
    held = [one["local_bytes"] for one in data["parameters"].values() if one["stored"].count(",")]
    assert size_text(sum(held)) in row
    assert f"and {len(held) - 1} more" in row


def test_text_has_every_section(saved, capsys):
    text = said(capsys, str(saved), "--all")
    for part in ("Blocks, training on 4 ranks", "mesh dp=2×tp=2", "dp=2: ranks 0 2 | 1 3", "tp=2: ranks 0 1 | 2 3"):
        assert part in text
    for section in ("plan", "calls", "graph", "collectives", "parameters"):
        assert f"\n{section}\n" in "\n" + text
    assert "gap 0.00%" in text


def test_the_graph_shows_specs_with_their_axes_and_what_is_owed(saved, capsys):
    text = said(capsys, str(saved), "--section", "graph")
    assert "f32[8@dp.tp, 4, 16]" in text
    assert "~sum(dp,tp)" in text
    assert "# blocks.0.up" in text


def test_repeated_calls_share_a_line(saved, capsys):
    text = said(capsys, str(saved), "--section", "calls")
    assert "blocks.0 … blocks.2" in text


def test_collectives_come_with_times_axis_and_bytes(saved, capsys):
    rows = json.loads(said(capsys, str(saved), "--section", "collectives", "--format", "json"))["collectives"]
    assert rows
    assert all(row["nbytes"] > 0 and row["times"] > 0 and row["axis"] in ("dp", "tp") for row in rows)
    text = said(capsys, str(saved), "--section", "collectives")
    assert f"{sum(row['times'] for row in rows)} per step" in text
    assert "gradient blocks.0.up.weight" in text


def test_storage_of_a_pinned_parameter_is_shown(saved, capsys):
    rows = json.loads(said(capsys, str(saved), "--section", "parameters", "--format", "json"))["parameters"]
    assert rows["blocks.1.up.weight"]["stored"] == "f32[64@dp.tp, 16]"
    assert rows["blocks.1.up.weight"]["local_bytes"] == 64 * 16 * 4 // 4
    assert "f32[64@dp.tp, 16]" in said(capsys, str(saved), "--section", "parameters")


def test_json_of_everything_holds_the_plan(saved, capsys):
    data = json.loads(said(capsys, str(saved), "--format", "json"))
    assert autopar.Plan.from_dict(data["plan"]["plan"]) == autopar.Plan.load(saved / "plan.json")
    shown = [set(stage["templates"]) for stage in data["graph"]]
    assert shown == [{call["template"] for call in data["calls"]["calls"]}]
    assert [set(stage["functions"]) for stage in data["graph"]] == [{"forward", "backward"}]


def test_dot_is_balanced_and_has_edges(saved, capsys):
    text = said(capsys, str(saved), "--format", "dot")
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    assert "fillcolor" in text
    assert " -> " in text


def test_the_graph_is_drawn_with_repeated_layers_once(saved, capsys):
    root = ElementTree.fromstring(said(capsys, str(saved), "--section", "graph", "--format", "svg"))
    texts = [element.text for element in root.findall(".//{*}text")]
    groups = {group.get("id"): group for group in root.findall(".//{*}g") if group.get("id")}
    assert {"calls", "embed_forward", "blocks_forward", "blocks_backward", "head_backward"} <= groups.keys()
    calls = [element.text for element in groups["calls"].findall(".//{*}text")]
    assert calls.count("blocks ×3") == 1
    assert "blocks" not in calls
    assert "f32[8@dp.tp, 4, 16]" in calls
    assert "comm.all_reduce over tp" in texts
    kinds = {box.get("class"): box.get("fill") for box in root.findall(".//{*}rect")}
    assert kinds["node all_reduce"] not in (kinds["node op"], None)


@pytest.mark.parametrize(
    ("labels", "parts"),
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("abbbc", [(0, 1, 1), (1, 1, 3), (4, 1, 1)]),
        ("abcbcd", [(0, 1, 1), (1, 2, 2), (5, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("aabaab", [(0, 3, 2)]),
    ],
)
def test_repeated_parts_are_found(labels, parts):
    assert [*repeats(labels)] == parts


def test_boxes_of_the_graph_do_not_lie_on_each_other_and_edges_go_down(saved):
    root = ElementTree.fromstring(graph_svg(read(saved)))
    for group in (one for one in root.findall(".//{*}g") if one.get("id")):
        sizes = [
            [float(box.get(key, "nan")) for key in ("x", "y", "width", "height")]
            for box in group.findall(".//{*}rect")
            if "node" in box.get("class", "")
        ]
        for n, (x, y, width, height) in enumerate(sizes):
            for other_x, other_y, other_width, other_height in sizes[:n]:
                beside = x >= other_x + other_width or other_x >= x + width
                assert beside or y >= other_y + other_height or other_y >= y + height
        paths = [path.get("d", "") for path in group.findall(".//{*}path")]
        assert paths
        assert sizes
        for path in paths:
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
            assert numbers[1] < numbers[-1]


def test_calls_are_named_by_their_templates_and_slices_send_nothing(pipeline):
    """The second stage has a call that is no line of its forward, and a step that cuts what every rank has."""
    program = read(pipeline)
    drawn = {cluster.name: [node for node in cluster.nodes if node.kind != "argument"] for cluster in clusters(program)}
    lines = program.stages[1].functions["forward"].lines
    named = [program.program.calls[line.call].template for line in lines if line.call is not None]
    assert [node.label for node in drawn["stage_1_calls"] if node.kind == "call"] == named
    assert {"blocks", "head", "part_1", "part_2"} <= set(named)
    assert {node.kind for node in drawn["stage_1_calls"] if "shard" in node.label} == {"op"}


def test_long_functions_are_drawn_in_blocks_of_consecutive_lines(saved):
    """Every value that a block reads of another arrives by an edge, every message is counted, and nothing goes round."""
    for cluster, whole in zip(clusters(read(saved), 4), clusters(read(saved)), strict=True):
        boxes = [node for node in cluster.nodes if node.kind not in ("argument", "saved")]
        assert len(boxes) <= 6 or cluster.name == "calls"
        assert any(node.sends for node in cluster.nodes) == any(node.sends for node in whole.nodes)
        assert nx.is_directed_acyclic_graph(nx.DiGraph([(edge.source, edge.target) for edge in cluster.edges]))
        merged = {node.name: node for node in cluster.nodes}
        assert all(edge.source in merged and edge.target in merged for edge in cluster.edges)


def test_a_graph_of_thousands_of_ops_is_sixty_boxes_that_count_all_of_them(saved):
    def line(i: int) -> LineFacts:
        reads = tuple(f"v{j}" for j in (i - 1, i - 7) if j >= 0) or ("x",)
        op, axis = ("comm.all_reduce", "tp") if i % 11 == 10 else ("aten.mul.Tensor", None)
        return LineFacts(
            out=(f"v{i}",), op=op, reads=reads, specs=("f32[8]",), phase="F", source="", axis=axis, sent=()
        )

    program = read(saved)
    big = TemplateFacts((), (), {"forward": FunctionFacts({"x": "f32[8]"}, tuple(map(line, range(6000))), ("v5999",))})
    stages = tuple(replace(stage, templates={"big": big}) for stage in program.stages)
    program = replace(program, program=replace(program.program, stages=stages))
    (own,) = (cluster for cluster in clusters(program, MOST) if cluster.name == "big_forward")
    blocks = [node for node in own.nodes if node.kind != "argument"]
    counted = [re.match(r"(\d+) ops, (\d+) messages", node.label) for node in blocks]
    assert len(blocks) <= MOST
    assert [sum(int(found[n]) for found in counted) for n in (1, 2)] == [6000, 6000 // 11]
    assert all(node.kind == "all_reduce" for node in blocks)
    ElementTree.fromstring(graph_svg(program))


def test_the_code_of_a_rank(saved, capsys):
    text = said(capsys, str(saved), "--rank", "3")
    assert "RANK = 3" in text
    assert "'dp': 1, 'tp': 1" in text
    assert (saved / "stages" / "stage_0.py").read_text() in text


def test_a_wrong_rank_or_directory_is_named(saved, tmp_path, capsys):
    for argv, message in (
        ([str(saved), "--rank", "4"], "ranks 0 to 3"),
        ([str(tmp_path / "none")], "is no directory"),
        ([str(tmp_path)], "not an autopar directory: it has no program.json"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "program.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert "program.json is damaged" in capsys.readouterr().err
    (tmp_path / "program.json").write_text("{}")
    (tmp_path / "plan.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "another version" in capsys.readouterr().err


# --- pipelines ----------------------------------------------------------------------------------------------------------


def test_the_schedule_section_shows_groups_transfers_and_who_owns_what_is_shared(pipeline, capsys):
    text = said(capsys, str(pipeline), "--section", "schedule")
    assert "zb-h1, 4 microbatches, 2 stages" in text
    for group, ranks in ((0, "ranks 0 to 1"), (1, "ranks 2 to 3")):
        assert f"group {group}: stages {group} (calls " in text
        assert ranks in text
    assert "-> stage 1 f32[2@dp, 4, 16]" in text
    assert "gradient d_" in text
    assert "embed.weight lives in stages 0, 1, owned by 0" in text


def test_the_chart_has_a_row_per_group_and_every_action(pipeline, capsys):
    text = said(capsys, str(pipeline), "--section", "schedule")
    program = json.loads((pipeline / "program.json").read_text())
    assert len(program["schedule"]["table"]) == 2
    for group in range(2):
        (row,) = (line for line in text.splitlines() if line.strip().startswith(f"{group} │"))
        assert [sum(row.count(f"{kind}{m}") for m in range(4)) for kind in "FBW"] == [4, 4, 4], row


def test_all_sections_of_a_pipeline(pipeline, capsys):
    text = said(capsys, str(pipeline), "--all")
    for part in ("stage 1: ", "dp=2: ranks 2 3", "4 microbatches"):
        assert part in text, part


def test_svg_is_xml_with_an_element_per_action(pipeline, capsys):
    root = ElementTree.fromstring(said(capsys, str(pipeline), "--format", "svg"))
    assert root.tag.endswith("svg")
    program = json.loads((pipeline / "program.json").read_text())
    actions = {action for row in program["schedule"]["table"] for action in row.split()}
    assert len(actions) == 2 * 4 * 3
    assert {element.get("id") for element in root.iter()} >= actions


def test_chrome_trace_is_json_with_an_event_per_action(pipeline, capsys):
    trace = json.loads(said(capsys, str(pipeline), "--format", "chrome-trace"))
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    program = json.loads((pipeline / "program.json").read_text())
    lasting = [e for e in events if e.get("ph") == "X"]
    assert len(lasting) >= 2 * 4 * 3
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in lasting)
    end = max(e["ts"] + e["dur"] for e in lasting) / 1e6
    once = max(stage["step_s"] for stage in program["stages"])
    assert end + once == pytest.approx(program["predicted"]["step_time_s"], rel=0.01)


def test_one_stage_has_a_schedule_too(saved, capsys):
    assert "none, 1 microbatches, 1 stages" in said(capsys, str(saved), "--section", "schedule")
    ElementTree.fromstring(said(capsys, str(saved), "--format", "svg"))
    json.loads(said(capsys, str(saved), "--format", "chrome-trace"))


def test_json_and_dot_of_a_pipeline_name_its_stages(pipeline, capsys):
    data = json.loads(said(capsys, str(pipeline), "--format", "json"))
    jsonschema.validate(data, json.loads((ROOT / "docs/schemas/dump.json").read_text()))
    assert [t["kind"] for t in data["schedule"]["transfers"]] == ["value", "gradient"]
    assert data["schedule"]["shared"] == {"embed.weight": [0, 1]}
    assert autopar.Plan.from_dict(data["plan"]["plan"]) == autopar.Plan.load(pipeline / "plan.json")
    text = said(capsys, str(pipeline), "--format", "dot")
    assert text.count("{") == text.count("}")
    assert "cluster_stage_0_" in text
    assert "cluster_stage_1_" in text


def test_the_code_of_a_rank_is_that_of_its_stage(pipeline, capsys):
    text = said(capsys, str(pipeline), "--rank", "3")
    assert "RANK = 3" in text
    assert (pipeline / "stages" / "stage_1.py").read_text() in text
    assert (pipeline / "stages" / "stage_0.py").read_text() not in text


@pytest.mark.slow
def test_messages_inside_ops_are_shown_with_what_hides_them(tmp_path, capsys):
    """The links are so fast that work hides the messages."""
    cluster = autopar.ClusterSpec.preset("dgx-h100", 1)
    with torch.device("meta"):
        model, ids = Transformer(), torch.zeros(1, 1 << 16, dtype=torch.long)
    options = autopar.Options(mesh={"cp": 8}, pp=1)
    program = autopar.compile(model, cluster, (ids, ids), optimizer=functools.partial(torch.optim.SGD), options=options)
    with_attention(program, cp="+s+t").save(tmp_path)
    graph = said(capsys, str(tmp_path), "--section", "graph")
    assert re.search(r"sends \d+ × shift of 262 kB over cp, each behind \d+% of the op's own work", graph)
    schedule = said(capsys, str(tmp_path), "--section", "schedule")
    assert "│~" in schedule
    assert "~ messages hidden behind work" in schedule
    assert "of messages hidden behind work" in schedule
    trace = json.loads(said(capsys, str(tmp_path), "--format", "chrome-trace"))
    inside = [e for e in trace["traceEvents"] if e.get("cat") == "inside"]
    assert {e["name"] for e in inside} == {"messages in F0.0", "messages in B0.0"}
    assert "shift" in said(capsys, str(tmp_path), "--section", "collectives")


def test_html_is_the_page(pipeline, capsys):
    html = said(capsys, str(pipeline), "--format", "html")
    assert html.startswith("<!DOCTYPE html>")
    assert "Blocks, training on 4 ranks of local-4: zb-h1 of 2 stages on dp=2, 4 microbatches" in html
    assert "What limits the step" in html
