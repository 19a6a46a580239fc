"""Ranks as Gloo processes compute what ranks as threads compute; checkpoints move between meshes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.runtime import run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.health.message_order import differing_group, first_difference
from tests.runtime import pipelines, scenarios, stages
from tests.runtime.process_worker import PIPELINES, TRAININGS
from tests.runtime.step.test_pipeline import agree, made
from tests.warm import torchrun


def run(scenario: str, ranks: int, out: Path, worker: str = "process_worker.py") -> list[dict[str, Any]]:
    done = torchrun(ranks, (Path(__file__).parents[1] / worker), scenario, out)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(out / f"{scenario}_{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return run("agree", 4, folder)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        exact = {"rtol": 1e-12, "atol": 1e-12} if left[name].dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(left[name], right[name], **exact, msg=lambda text, name=name: f"{name}: {text}")


def test_collectives_agree_with_the_threads(four):
    for got, want in zip(four, run_threads(4, scenarios.MESH, scenarios.collectives, timeout_s=60), strict=True):
        same(got["collectives"], want)


def test_the_backends_own_collectives_are_the_same(four):
    for got in four:
        same(got["native"], {name: got["collectives"][name] for name in got["native"]})


def test_checked_collectives_are_the_same(four):
    for got in four:
        same(got["checked"], {name: got["collectives"][name] for name in got["checked"]})


def test_all_but_large_sums_are_bit_for_bit_those_of_the_threads(four):
    for got, want in zip(four, run_threads(4, scenarios.MESH, scenarios.collectives, timeout_s=60), strict=True):
        for name, value in want.items():
            if "256 sum" not in name and value.dtype != torch.bool:
                assert torch.equal(got["collectives"][name], value), name


def test_gradients_agree_with_the_threads(four):
    for got, want in zip(four, run_threads(4, scenarios.MESH, scenarios.gradients, timeout_s=60), strict=True):
        same(got["gradients"], want)


@pytest.mark.few(3)
@pytest.mark.parametrize(("dp", "tp", "zero"), TRAININGS)
def test_training_agrees_with_one_device_and_the_threads(four, dp, tp, zero):
    program, want = stages.mlp(dp, tp, zero), stages.reference(3)
    threads = run_threads(4, program.mesh, lambda comm: scenarios.train(comm, program, 3), timeout_s=60)
    for got, thread in zip((rank[f"train {dp} {tp} {zero}"] for rank in four), threads, strict=True):
        for part in ("grads", "weights"):
            same(got[part], want[part])
            same(got[part], thread[part])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)


def test_the_state_is_dtensors_laid_out_as_the_specs_say(four):
    placements = four[0]["placements"]
    assert placements["w1"] == "(Shard(dim=0), Replicate())"
    assert placements["w2"] == "(Shard(dim=1), Replicate())"
    assert placements["optim.w2.exp_avg"] == "(Shard(dim=1), Shard(dim=1))"
    assert placements["optim.b2.exp_avg"] == "(Shard(dim=0), Shard(dim=0))"
    want = stages.reference(3)["weights"]
    for got in four:
        same(got["reloaded"], {name: want[name] for name in got["reloaded"]})


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_continues_on_two_and_on_threads(four, folder):
    want = stages.reference(5)
    checkpoint.write_full(folder / "weights", stages.weights())
    for got in run("resume", 2, folder):
        full = got.pop("full")
        assert full["losses"] == pytest.approx(stages.reference(2)["losses"], rel=1e-12)
        for result in got.values():
            assert result["losses"] == pytest.approx(want["losses"][3:], rel=1e-12)
            same(result["weights"], {name: want["weights"][name] for name in result["weights"]})

    program = stages.mlp(2, 1, 1)

    def go_on(comm):
        session = scenarios.session_of(program, comm)
        checkpoint.load(folder / "checkpoint", session)
        return [session.train_step(batch).item() for batch in stages.batches(5)[3:]]

    for losses in run_threads(2, program.mesh, go_on, timeout_s=60):
        assert losses == pytest.approx(want["losses"][3:], rel=1e-12)


def test_ranks_that_disagree_or_stay_away_are_named(folder):
    first, second = run("disagree", 2, folder)
    for got, me, other in ((first, "A.py:1", "B.py:2"), (second, "B.py:2", "A.py:1")):
        assert got["checked"]["type"] == "CollectiveMismatch"
        assert me in got["checked"]["message"]
        assert other in got["checked"]["message"]
        assert got["late"]["type"] == "CollectiveTimeout"
        for word in (me, other, "#0 over a (ranks 0, 1)", "rank 0", "rank 1"):
            assert word in got["late"]["message"]
        assert got["late"]["seconds"] < 10
    for got in (first, second):  # the second finds the connection closed, because the first timed out
        assert got["closed"]["type"] == "CollectiveTimeout"
    assert "rank 0 timed out in #0" in second["closed"]["message"]
    assert "D.py:4" in second["closed"]["message"]
    assert first["alone"]["type"] == "CollectiveTimeout"
    assert "rank 1 said nothing" in first["alone"]["message"]
    assert "C.py:3" in first["alone"]["message"]


@pytest.fixture(scope="module")
def piped(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {ranks: run("pipeline", ranks, folder) for ranks in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True], ids=["tags", "in order"])
@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines_agree_with_one_device(piped, case, in_order):
    program, known = made(case)
    want = pipelines.reference(3, **known)
    for got in piped[program.ranks]:
        agree(got[f"{case} {in_order}"], want)


@pytest.mark.parametrize("in_order", [False, True], ids=["tags", "in order"])
@pytest.mark.parametrize("case", PIPELINES)
def test_both_ends_of_every_message_are_noted_alike(piped, case, in_order):
    beats = [got[f"{case} {in_order} order"] for got in piped[made(case)[0].ranks]]
    assert first_difference({b.rank: b.last for b in beats}, {b.rank: b.turn for b in beats}) is None
    assert [b.turn for b in beats] == [3] * len(beats)
    assert all(any(group.startswith("messages") for group in beat.marks["1"]) for beat in beats)
    for own, other in itertools.combinations(beats, 2):
        assert differing_group(own.marks, other.marks) == ""


def test_a_pipelines_state_is_by_stage_and_comes_back(piped):
    case = "interleaved on unlike meshes"
    for rank, got in enumerate(piped[3]):
        first, second = got[f"{case} again"]["losses"]
        assert first == second
        held = got[f"{case} held"]
        assert held.pop("step") == "Tensor"
        if rank < 2:
            assert held == {"w.tied": "DTensor", "b.0": "DTensor", "b.2": "DTensor", "gain": "Tensor"}
        else:
            assert held == dict.fromkeys(("w.1", "b.1", "w.3", "b.3"), "Tensor")


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_continues_in_another(piped, folder):
    want = pipelines.reference(5, 4, tied=(0, 2))
    for got in run("reload", 2, folder):
        assert got["losses"] == pytest.approx(want["losses"][3:], rel=1e-12)
        same(got["weights"], {name: want["weights"][name] for name in got["weights"]})


def test_a_late_message_names_rank_group_action_and_transfer(folder):
    got = run("stuck", 2, folder)[0]
    assert got["type"] == "CollectiveTimeout"
    for word in ("rank 0 of 2", "recv from rank 1", "gradient d10 (stage 1 to 0), microbatch 0"):
        assert word in got["message"]
    assert any("in action B0.0 of group 0" in note for note in got["notes"])
    assert got["seconds"] < 20
