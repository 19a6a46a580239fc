"""Searching with several processes: the answers, errors and plans of one process, and no process is left."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec, Options
from autopar.errors import InputError, NoRoomError
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.price.pricer import OutOfTime
from autopar.passes.search import workers as workers_module
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.one_mesh.within_memory import joint_on
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.search.workers import Workers
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.solve import Solution, solve
from tests.passes.shard.test_solver import random_graph

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other processes are forked on Linux alone")

BATCH = 16
HERE = os.getpid()


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every search may fork at once, the test runner's threads notwithstanding; the processes that were forked, of which none
    may be left."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(workers_module, "SMALL_S", 0.0)
    processes: list[int] = []
    fork = os.fork

    def noted() -> int:
        process = fork()
        processes.append(process)
        return process

    monkeypatch.setattr(os, "fork", noted)
    yield processes
    assert not [process for process in processes if alive(process)]


def alive(process: int) -> bool:
    """Whether a process runs: one that has ended may still wait to be noticed by whoever adopted it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def answers(question: Callable[[int], Any], count: int = 2, items: int = 8) -> list[Any]:
    with Workers(count).answers(question, range(items)) as asked:
        return list(asked)


def slowly(i: int) -> tuple[int, int]:
    time.sleep(0.02)
    return i, os.getpid()


def shared_out() -> Callable[[], None]:
    """A function to call in every question, in which a process goes on when another one has begun a question too; others wait
    for this one no longer than ten seconds, as it may have none to begin."""
    begun = mmap.mmap(-1, 2)

    def wait() -> None:
        here, until = os.getpid() == HERE, time.monotonic() + 10.0
        begun[here] = 1
        while not begun[not here] and (here or time.monotonic() < until):
            time.sleep(0.001)

    return wait


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_answers_stand_in_the_order_of_their_items(count: int, forked: list[int]) -> None:
    found = answers(slowly, count)
    assert [i for i, _ in found] == list(range(8))
    assert {process for _, process in found} <= {os.getpid(), *forked}
    assert len(forked) == count - 1


def test_processes_share_the_work() -> None:
    wait = shared_out()
    assert len(set(answers(lambda _: (wait(), os.getpid()), 2, 16))) == 2


@pytest.mark.timeout(120)
def test_processes_solve_where_this_one_has_solved_before() -> None:
    """State that a solver keeps for its next answer, threads say, may not be missing there."""
    graph = random_graph(1, nodes=12, states=4, density=0.6)
    budget = 0.4 * sum(float(m.min() + m.max()) for m in graph.memory)

    def cost() -> float:
        solution = solve(graph, budget)
        assert isinstance(solution, Solution)
        return solution.cost

    alone, wait = cost(), shared_out()
    found = answers(lambda _: (wait(), (cost(), os.getpid()))[1], 2)
    assert {one for one, _ in found} == {alone}
    assert len({process for _, process in found}) == 2


def test_one_process_answers_only_what_is_asked_for() -> None:
    asked: list[int] = []
    with Workers(1).answers(asked.append, range(5)) as found:
        assert found[3] is None
        assert found[1] is None
        assert found[3] is None
    assert asked == [3, 1]


class Refused(Exception):
    """An error that cannot be pickled."""

    def __init__(self, i: int, _: object) -> None:
        super().__init__(lambda: i)
        self.i = i


@pytest.mark.few(3)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("wrong", [{0}, {5, 3}, {7}])
def test_the_first_error_by_order_is_raised_after_the_answers_before_it(count: int, wrong: set[int]) -> None:
    def question(i: int) -> int:
        time.sleep(0.01 * (8 - i))  # later ones are done first
        if i in wrong:
            raise Refused(i, None)
        return i

    heard: list[int] = []
    with pytest.raises(Refused) as error, Workers(count).answers(question, range(8)) as asked:
        heard.extend(asked)
    assert error.value.i == min(wrong)
    assert heard == list(range(min(wrong)))


def test_what_cannot_be_pickled_is_answered_here() -> None:
    assert [answer() for answer in answers(lambda i: lambda: i)] == list(range(8))


def test_what_a_process_leaves_when_it_dies_is_answered_here() -> None:
    def question(i: int) -> int:
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    assert answers(question, 4) == list(range(8))


def test_what_this_process_has_too_is_named_and_not_copied() -> None:
    items, beside = [object() for _ in range(8)], object()

    def question(item: object) -> Any:
        time.sleep(0.01)
        return item, beside, ["new"]

    with Workers(2).answers(question, items, [beside]) as asked:
        for item, (itself, same, new) in zip(items, asked, strict=True):
            assert itself is item
            assert same is beside
            assert new == ["new"]


def test_large_answers_hinder_nobody() -> None:
    assert [len(answer) for answer in answers(lambda i: bytes(i << 20))] == [i << 20 for i in range(8)]


def test_questions_of_questions_stay_in_their_process(forked: list[int]) -> None:
    workers = Workers(2)

    def question(_: int) -> set[int]:
        with workers.answers(slowly, range(3)) as inner:
            return {process for _, process in inner} - {os.getpid()}

    with workers.answers(question, range(6)) as asked:
        assert list(asked) == [set()] * 6
    assert len(forked) == 1


def test_a_process_with_threads_stays_alone(monkeypatch: pytest.MonkeyPatch, forked: list[int]) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert {process for _, process in answers(slowly)} == {os.getpid()}
    assert forked == []


def test_a_small_search_stays_alone(monkeypatch: pytest.MonkeyPatch, forked: list[int]) -> None:
    monkeypatch.setattr(workers_module, "SMALL_S", 60.0)
    assert {process for _, process in answers(slowly)} == {os.getpid()}
    assert forked == []


def test_nobody_works_on_after_the_asker_left(forked: list[int]) -> None:
    def question(i: int) -> int:
        if i and os.getpid() != HERE:
            time.sleep(60)
        return i

    with Workers(2).answers(question, range(8)) as asked:
        assert asked[0] == 0
        assert alive(forked[0])
    assert not alive(forked[0])


# --- ends -------------------------------------------------------------------------------------------------------------

_SLEEPERS = """
import os, signal, sys, time
from autopar.passes.search import workers

signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
workers.SMALL_S = 0.0

def question(i):
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: print may write the end of the line apart
    time.sleep(600)

try:
    with workers.Workers(3).answers(question, range(3)) as asked:
        list(asked)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_forked_them(end: signal.Signals) -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEPERS], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        processes = [int(parent.stdout.readline()) for _ in range(3)]
        assert parent.pid in processes
        if end == signal.SIGINT:
            os.killpg(parent.pid, end)  # as a terminal does
        else:
            os.kill(parent.pid, end)
        assert parent.stdout.read() == ("interrupted\n" if end == signal.SIGINT else "")
    for _ in range(3000):
        if not any(map(alive, processes)):
            break
        time.sleep(0.02)
    assert not any(map(alive, processes))


# --- searches ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, width: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def compiled(ranks: int) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, x = Transformer(), torch.empty(BATCH, 256, 512)
    cluster = ClusterSpec.homogeneous(
        devices=ranks, device="a100", devices_per_node=2, inter_bandwidth_Bps=2e9, intra_bandwidth_Bps=3e11
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    return autopar.compile(
        model, cluster, (x,), optimizer=optimizer, options=Options(pp=1, workers=1, mesh={"dp": ranks})
    )


def task(ranks: int, **options: Any) -> Task:
    """The transformer to be planned, on prices of its own."""
    program = compiled(ranks)
    batches = Microbatches(program.captured, program.rules)
    return Task(program.ir, program.cluster, program.rules, program.setting, Options(**options), batches)


def told(plans: RankedPlans) -> list[tuple[str, float, tuple[str, ...]]]:
    return [(candidate.plan.to_json(), candidate.step_s, candidate.left_out) for _, candidate in plans]


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16))])
def test_the_plans_are_the_same_for_every_number_of_processes(ranks: int, forked: list[int]) -> None:
    alone = told(search_plans(task(ranks, workers=1), BATCH))
    assert forked == []
    assert any('"microbatches": 1,' not in plan for plan, _, _ in alone), "pipelines were planned"
    for count in (2, 4) if ranks > 4 else (3,):
        assert told(search_plans(task(ranks, workers=count), BATCH)) == alone
        assert len(forked) >= count - 1


@pytest.mark.slow
def test_the_plans_are_the_same_where_memory_is_short() -> None:
    limit = 0.5 * compiled(8).predicted.peak_bytes
    alone = told(search_plans(task(8, workers=1, memory_bytes=limit), BATCH))
    assert any("recompute" in plan for plan, _, _ in alone)
    assert told(search_plans(task(8, workers=2, memory_bytes=limit), BATCH)) == alone


@pytest.mark.slow
def test_what_is_short_is_told_alike() -> None:
    texts = set()
    for count in (1, 3):
        with pytest.raises(NoRoomError) as error:
            search_plans(task(4, workers=count, pp=2, memory_bytes=2.8e7), BATCH)
        texts.add(str(error.value))
    assert len(texts) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2])
def test_a_search_ends_after_its_seconds(count: int) -> None:
    clock = functools.partial(next, itertools.count())
    (_, best), *_ = search_plans(task(4, workers=count, search_s=0), BATCH, clock)
    on_all = ("pipelines", "branches side by side", "plans in zigzag order")
    assert best.left_out == (*on_all, "plans that leave ranks idle")


def test_time_that_is_over_elsewhere_is_over_here() -> None:
    asked = task(4, workers=2)
    asked.pricers = asked.pricers.until(lambda: True)
    with pytest.raises(OutOfTime):
        search_plans(asked, BATCH)


@pytest.mark.slow
def test_what_a_budget_gets_does_not_depend_on_budgets_before() -> None:
    asked = task(4)
    mesh = candidate_meshes(asked.cluster, asked.options)[-1]
    joint, fresh = joint_on(asked, mesh), joint_on(asked, mesh)
    budgets = [joint.fastest.nbytes * share for share in (0.9, 0.8, 0.7)]
    joint.within(budgets[1])
    joint.within(budgets[2])
    joint.forget_budgets()
    first, second = joint.within(budgets[0]), fresh.within(budgets[0])
    assert (first.choice, first.nbytes) == (second.choice, second.nbytes)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "all"])
def test_workers_are_a_number_of_processes(wrong: Any) -> None:
    with pytest.raises(InputError, match="workers"):
        Options(workers=wrong)
