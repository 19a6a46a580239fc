"""Collectives by node: the values of flat ones, the same bits on all ranks, fewer bytes between nodes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.runtime import Comm, RuntimeProgramError, run_threads
from autopar.runtime.comm.calls import Call
from autopar.runtime.comm.hierarchical import grid_of
from autopar.runtime.comm.nodes import other_machines
from autopar.runtime.health.message_order import differing_group
from autopar.runtime.run.sdc_check import recompute
from tests.runtime import scenarios, stages, two_nodes
from tests.runtime.scenarios import value
from tests.warm import torchrun

NODES_OF_EIGHT = {
    "four nodes of two": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "two nodes of four": [(0, 1, 2, 3), (4, 5, 6, 7)],
    "ranks in turn": [(0, 2, 4, 6), (1, 3, 5, 7)],
}


def run(ranks: int, nodes: list[tuple[int, ...]] | None, body: Callable[[Comm], Any]) -> list[Any]:
    def rank(comm: Comm) -> Any:
        if nodes is not None:
            two_nodes.go_by_node(comm, nodes)
        return body(comm)

    return run_threads(ranks, {"dp": ranks}, rank, timeout_s=60)


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if "gather" in name or "max" in name or "min" in name or not tensor.is_floating_point():
            assert torch.equal(got[name], tensor), name
        else:
            near = {"rtol": 1e-12, "atol": 1e-12} if tensor.dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-1}
            torch.testing.assert_close(got[name], tensor, **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("nodes", NODES_OF_EIGHT.values(), ids=NODES_OF_EIGHT.keys())
def test_values_are_those_of_flat_collectives_and_sums_alike_on_all_ranks(nodes: list[tuple[int, ...]]) -> None:
    by_node, flat = (run(8, given, two_nodes.collectives) for given in (nodes, None))
    for got, want in zip(by_node, flat, strict=True):
        agree(got, want)
        for name in (name for name in got if "sum" in name):
            assert torch.equal(got[name], by_node[0][name]), name


def test_sums_are_taken_inside_nodes_first() -> None:
    values = [value(rank, 16) for rank in range(4)]
    want = (values[0] + values[1]) + (values[2] + values[3])
    assert not torch.equal(want, ((values[0] + values[1]) + values[2]) + values[3])
    for got in run(4, two_nodes.NODES, lambda comm: comm.all_reduce(value(comm.rank, 16), "dp")):
        assert torch.equal(got, want)
    for rank, got in enumerate(run(4, two_nodes.NODES, lambda c: c.reduce_scatter(value(c.rank, 16), 0, "dp"))):
        assert torch.equal(got, want.chunk(4)[rank])


def test_in_place_a_part_is_summed_from_where_it_lies() -> None:
    """The third of four ranks to a node begins with its own: 2, 0, 1, 3."""
    values = [value(rank, 8) for rank in range(8)]
    want = []
    for place in range(4):
        order = [place, *(b for b in range(4) if b != place)]
        of_nodes = [functools.reduce(torch.add, (values[4 * a + b].chunk(4)[place] for b in order)) for a in (0, 1)]
        want.append(of_nodes[0] + of_nodes[1])

    def in_place(comm: Comm) -> torch.Tensor:
        return comm.start_all_reduce_into(value(comm.rank, 8), "dp").wait()

    for got in run(8, NODES_OF_EIGHT["two nodes of four"], in_place):
        assert torch.equal(got, torch.cat(want))


def leaving(kind: str, nodes: list[tuple[int, ...]] | None, numel: int) -> float:
    """The bytes that leave the first of two nodes of four in a collective, in shares of the full array, as exchanges
    and rings send."""
    node_of = {rank: rank // 4 for rank in range(8)}

    def body(comm: Comm) -> float:
        sent, start = 0.0, comm._start

        def noted(call: Call) -> Callable[[], None]:
            nonlocal sent
            if comm.two_levels(call) is None:
                n, elsewhere = call.group.size, [r for r in call.group.ranks if node_of[r] != node_of[comm.rank]]
                full = max(call.inp.numel(), call.out.numel())
                if (
                    call.kind == "all_reduce"
                ):  # a ring, of which one link leaves a node for each of its ranks that are in it
                    here = sum(node_of[r] == node_of[comm.rank] for r in call.group.ranks)
                    sent += 2 * (n - 1) / n * full / here if elsewhere else 0.0
                else:
                    sent += len(elsewhere) / n * full
            return start(call)

        comm._start = noted  # type: ignore[method-assign]
        x = value(comm.rank, numel)
        part = {"all_gather": lambda: comm.all_gather(x[: numel // 8], 0, "dp")}
        part |= {"all_reduce": lambda: comm.all_reduce(x, "dp")}
        part |= {"reduce_scatter": lambda: comm.reduce_scatter(x, 0, "dp")}
        part[kind]()
        return sent / numel

    return sum(run(8, nodes, body)[:4])


def test_fewer_bytes_leave_a_node() -> None:
    two = NODES_OF_EIGHT["two nodes of four"]
    for kind, flat, by_node in (("all_reduce", 1.75, 1.0), ("all_gather", 2.0, 0.5), ("reduce_scatter", 2.0, 0.5)):
        assert leaving(kind, None, 800) == pytest.approx(flat)
        assert leaving(kind, two, 800) == pytest.approx(by_node)


def test_small_collectives_go_flat() -> None:
    def kinds(comm: Comm) -> Counter[str]:
        two_nodes.go_by_node(comm, least=256)
        seen: Counter[str] = Counter()
        start = comm._start

        def noted(call: Call) -> Callable[[], None]:
            seen[f"{call.inp.numel()} {'by node' if comm.two_levels(call) else 'flat'}"] += 1
            return start(call)

        comm._start = noted  # type: ignore[method-assign]
        for numel in (28, 32):
            comm.all_reduce(value(0, numel), "dp")
        return seen

    for seen in run_threads(4, two_nodes.MESH, kinds, timeout_s=60):
        assert seen["28 flat"] == seen["32 by node"] == 1
        assert not seen["28 by node"]


@pytest.mark.parametrize("nodes", ["aaab", "abca", "aabbcc"[:5], "ab", "aaaa", "abba"])
def test_uneven_nodes_are_no_grid(nodes: str) -> None:
    assert grid_of(nodes) is None


def test_rows_that_do_not_fit_the_nodes_are_refused() -> None:
    with pytest.raises(RuntimeProgramError, match="do not lie evenly"):
        run(4, [(0, 1, 2), (3,)], lambda comm: None)


def test_a_dropped_handle_is_found() -> None:
    with pytest.raises(RuntimeProgramError, match="never waited for"):
        run(4, two_nodes.NODES, lambda comm: comm.start_all_reduce(value(comm.rank, 8), "dp") and None)


def test_other_machines_are_named() -> None:
    assert other_machines(two_nodes.NODES, ["x", "x", "y", "y"]) == ""
    assert "0, 1 | 2, 3, and they have 0, 2 | 1, 3" in other_machines(two_nodes.NODES, ["x", "y", "x", "y"])


def processes(scenario: str, folder: Path) -> list[dict[str, Any]]:
    done = torchrun(4, (Path(__file__).parents[1] / "by_node_worker.py"), scenario, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{scenario}_{rank}.pt", weights_only=False) for rank in range(4)]


def test_processes_agree_with_the_threads(tmp_path: Path) -> None:
    results = processes("agree", tmp_path)
    for got, want in zip(results, run(4, two_nodes.NODES, two_nodes.collectives), strict=True):
        for name, tensor in want.items():
            assert torch.equal(got["collectives"][name], tensor), name
            assert torch.equal(got["checked"][name], tensor), name
    marks = [got["order"].marks for got in results]
    assert marks[0]
    assert not any(differing_group(marks[0], other) for other in marks[1:])


@pytest.mark.slow
def test_steps_of_processes_are_those_of_one_device(tmp_path: Path) -> None:
    want = stages.reference(3)
    for got in processes("train", tmp_path):
        for zero in ("0", "1", "3"):
            assert got[zero]["losses"] == pytest.approx(want["losses"], rel=1e-12)
            for part in ("grads", "weights"):
                for name, tensor in want[part].items():
                    torch.testing.assert_close(got[zero][part][name], tensor, rtol=1e-12, atol=1e-12)


def test_ranks_in_other_places_compute_the_same() -> None:
    program = stages.mlp(4, 1)

    def rank(comm: Comm) -> dict[str, str]:
        two_nodes.go_by_node(comm)
        session = scenarios.session_of(program, comm)
        session.load_weights(stages.weights())
        batch = stages.batches(1)[0]
        session.train_step(batch)
        recompute(session, batch, 2, ["m"] * 4)
        return {}

    run_threads(4, program.mesh, rank, timeout_s=60)


def test_on_other_machines_than_described_collectives_go_flat_and_say_so(tmp_path: Path) -> None:
    results = processes("elsewhere", tmp_path)
    (said,) = results[0]["said"]
    assert "machines with the ranks 0, 1 | 2, 3, and they have 0, 1, 2, 3" in said
    assert not any(got["said"] for got in results[1:])
    for got, want in zip(results, run(4, None, two_nodes.collectives), strict=True):
        agree(got["collectives"], want)


@pytest.mark.slow
def test_a_rank_that_stays_away_ends_the_others_by_name(tmp_path: Path) -> None:
    for got in processes("alone", tmp_path)[:3]:
        assert got["type"] == "CollectiveTimeout"
        assert "all_reduce[sum] of float32[64] at model.py:7" in got["message"]
        assert got["seconds"] < 8
