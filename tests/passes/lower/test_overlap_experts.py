"""A mixture of experts that rows travel to, suspended beside an expert that all rows share."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CheckError
from autopar.ir.lines import Compute, Function, GoOn, Line, Start, Wait, label
from autopar.passes.check.lines import check
from autopar.passes.search.overlap import overlapping
from autopar.plan import OVERLAPS
from autopar.runtime import ExpertOverflow, run_threads
from autopar.runtime.comm.comm import Comm
from tests.measure import measure_peak
from tests.ops.rings import with_choices
from tests.proof.test_memory_measured import UNDER

WIDTH, EXPERTS, CHOICES, ROWS, RANKS = 16, 8, 2, 64, 4


class Mixture(nn.Module):
    """x: (rows, width). crowded: all rows choose the same experts."""

    def __init__(self, crowded: bool) -> None:
        super().__init__()
        d = WIDTH
        self.norm, self.router = nn.LayerNorm(d), nn.Linear(d, EXPERTS)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, d, 2, d) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, d, d) * d**-0.5)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        if crowded:
            nn.init.zeros_(self.router.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(CHOICES)
        return x + autopar.experts(h, chosen, weights, self.w_in, self.w_out) + self.down(F.silu(self.up(h)))


class Model(nn.Module):
    def __init__(self, crowded: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(crowded) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 8, (ROWS,), generator=generator)


def model(crowded: bool = False) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(crowded)


@functools.cache
def program(
    overlap: str, crowded: bool = False, on_overflow: str = "chunk", precision: str | None = None, choice: str = "+t0+e"
) -> autopar.Program:
    cluster = autopar.ClusterSpec.local(RANKS)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], bandwidth_Bps=1e7, latency_s=1e-6),))
    options = autopar.Options(
        mesh={"ep": RANKS},
        microbatches=1,
        recompute="none",
        on_overflow=on_overflow,
        overlap=False,
        precision=precision,
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    made = autopar.compile(model(crowded), cluster, batch(), optimizer=optimizer, options=options)
    made = with_choices(made, "experts", {"ep": choice})
    return made.with_plan(overlapping(made.plan, overlap))


def trained(made: autopar.Program) -> list[Tensor]:
    """Losses and rank 1's shards after two steps."""

    def rank(comm: Comm) -> list[Tensor]:
        session = made.in_process.session(comm, made.request.update, made.options.seed)
        session.load_weights(made.weights())
        losses = [torch.as_tensor(session.train_step(list(batch()))) for _ in range(2)]
        return [*losses, *(tensor.clone() for stage in session.stages.values() for _, tensor in stage.stored())]

    return run_threads(RANKS, {"ep": RANKS}, rank)[1]


def function_of(made: autopar.Program, kind: str) -> Function:
    function = getattr(next(iter(made.stages[0].templates.values())), kind)
    assert isinstance(function, Function)
    return function


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_shared_expert_runs_while_rows_travel(kind: str) -> None:
    lines = function_of(program("any"), kind).lines
    start = next(i for i, x in enumerate(lines) if isinstance(x, Start) and isinstance(x.line, Compute))
    end = next(i for i, x in enumerate(lines) if isinstance(x, Wait) and x.value == lines[start].outs[0])
    between = [label(line) for line in lines[start:end]]
    assert sum(isinstance(line, GoOn) for line in lines[start:end]) == (1 if kind == "forward" else 2)
    assert sum(name.startswith("autopar.linear") for name in between) >= 2
    assert program("any").predicted.step_time_s < 0.97 * program("").predicted.step_time_s


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
@pytest.mark.parametrize("crowded", [False, True], ids=["even", "in more pieces than planned"])
def test_no_bit_changes(overlap: str, crowded: bool) -> None:
    pairs = zip(trained(program(overlap, crowded)), trained(program("", crowded)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_it_computes_what_eager_does(overlap: str) -> None:
    assert autopar.verify(program(overlap), model(), batch()).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_plans_compute_what_eager_does(seed: int) -> None:
    made = program("")
    assert autopar.verify(made.with_plan(autopar.random_plan(made, seed)), model(), batch()).ok


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("crowded", [False, True])
def test_a_step_takes_no_more_memory_than_promised(overlap: str, crowded: bool) -> None:
    made = program(overlap, crowded)
    assert max(measure_peak(made, batch())) <= made.predicted.peak_bytes * (1 + UNDER)


def test_more_rows_than_promised_stop_the_step_by_name() -> None:
    with pytest.raises(ExpertOverflow, match="No token is dropped"):
        trained(program("any", crowded=True, on_overflow="stop"))


def test_an_op_that_goes_on_without_a_start_is_found() -> None:
    made = program("any")
    (name, template), *_ = made.stages[0].templates.items()

    def without(kind: type[Line]) -> Function:
        gone = next(x for x in template.forward.lines if isinstance(x, kind))
        return replace(template.forward, lines=tuple(x for x in template.forward.lines if x is not gone))

    for kind in (Start, Wait):
        templates = {**made.stages[0].templates, name: replace(template, forward=without(kind))}
        with pytest.raises(CheckError):
            check(replace(made.stages[0], templates=templates), made.rules)
