"""Programs for machines of several ranks each: their collectives go by node, and compute what eager does."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import dump
from tests.measure import measure_peak

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
BATCH = (torch.randn(16, 20, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 12)


def nodes(count: int, places: int, device: str = "cpu") -> autopar.ClusterSpec:
    """Machines whose links have no latency, so that even small messages go by node."""
    return autopar.ClusterSpec.homogeneous(
        devices=count * places,
        device=device,
        devices_per_node=places,
        intra_bandwidth_Bps=1e10,
        inter_bandwidth_Bps=1e7,
        intra_latency_s=0.0,
        inter_latency_s=0.0,
    )


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)) for _ in range(2)]
    return nn.Sequential(nn.Linear(20, 24), *blocks, nn.Linear(24, 12))


def compiled(cluster: autopar.ClusterSpec, **options: object) -> autopar.ParallelProgram:
    return autopar.compile(
        model(),
        cluster,
        BATCH,
        loss_fn=nn.functional.cross_entropy,
        optimizer=ADAMW,
        options=autopar.Options(**options),  # type: ignore[arg-type]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize(("count", "places"), [(2, 2), (4, 2), (2, 4)])
def test_data_parallel_steps_are_eagers(strategy: str, count: int, places: int) -> None:
    program = compiled(nodes(count, places), mesh={"dp": count * places}, strategy=strategy)
    (row,) = program.emitted.by_node.axes
    assert (row.axis, row.nodes, row.places) == ("dp", count, places)
    assert set(row.least) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert autopar.verify(program, model(), BATCH, steps=3).ok
    for peak in measure_peak(program, BATCH):
        assert peak == pytest.approx(program.predicted.peak_bytes, rel=0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"mesh": {"tp": 8}, "strategy": "megatron"}, {"tp"}),
        ({"mesh": {"dp": 4, "tp": 2}, "strategy": "megatron"}, {"dp"}),
        ({"mesh": {"dp": 2, "tp": 4}, "strategy": "megatron"}, set()),
        ({"pp": 2, "microbatches": 2, "mesh": {"dp": 4}}, set()),
    ],
)
def test_axes_that_span_nodes_evenly_go_by_node(options: dict[str, object], axes: set[str]) -> None:
    program = compiled(nodes(2, 4), **options)
    program = program.with_plan(replace(program.plan, placement=()))
    assert {row.axis for row in program.emitted.by_node.axes} == axes
    assert autopar.verify(program, model(), BATCH).ok


def test_stages_of_a_pipeline_go_by_node() -> None:
    program = compiled(nodes(4, 2), pp=2, microbatches=2, mesh={"dp": 4})
    assert {row.stage for row in program.emitted.by_node.axes} == {0, 1}
    assert autopar.verify(program, model(), BATCH).ok


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 16), marks=pytest.mark.slow)])
def test_random_plans_are_eagers(seeds: range) -> None:
    program, by_node = compiled(nodes(4, 2)), 0
    for seed in seeds:
        other = program.with_plan(autopar.random_plan(program, seed))
        by_node += bool(other.emitted.by_node.axes)
        assert autopar.verify(other, model(), BATCH).ok, seed
    assert by_node >= len(seeds) // 4


def test_a_placement_says_who_is_on_a_node() -> None:
    program = compiled(nodes(2, 2), mesh={"dp": 4}, strategy="zero1")
    for placement, on_nodes in (((0, 2, 1, 3), ((0, 2), (1, 3))), ((0, 3, 1, 2), None)):
        placed = program.with_plan(replace(program.plan, placement=placement))
        if on_nodes is None:
            assert not placed.emitted.by_node.axes
        else:
            assert placed.emitted.by_node.nodes == on_nodes
        assert autopar.verify(placed, model(), BATCH).ok


def test_nothing_is_said_where_nodes_do_not_matter() -> None:
    for cluster in (autopar.ClusterSpec.local(4), nodes(2, 2, "h100"), nodes(4, 1)):
        program = compiled(cluster, mesh={"dp": 4}, strategy="dp")
        assert not program.emitted.by_node.axes
        assert "BY_NODE" not in program.pipeline


def test_another_number_of_ranks_has_nodes_of_its_own(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that steps on more ranks are no shorter
        compiled(nodes(4, 2), mesh={"dp": 8}, strategy="dp").save(tmp_path, also=[2, 4])
    said = {ranks: (tmp_path / "worlds" / str(ranks) / "pipeline.py").read_text() for ranks in (2, 4)}
    assert "BY_NODE" not in said[2]
    assert "BY_NODE" not in said[4] or "NODES = [\n    [0, 1],\n    [2, 3],\n]" in said[4]
    assert "NODES = [" in (tmp_path / "pipeline.py").read_text()


def test_report_and_dump_say_what_goes_by_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled(nodes(2, 2), mesh={"dp": 4}, strategy="zero1")
    said = "inside nodes, then between them: over dp of stage 0, on 2 nodes of 2 ranks: all_reduce from "
    assert said in program.report()
    program.save(tmp_path)
    assert dump.main([str(tmp_path), "--section", "collectives"]) == 0
    assert said in capsys.readouterr().out
