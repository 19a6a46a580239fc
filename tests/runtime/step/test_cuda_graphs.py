"""Steps captured once and played: by a capture that keeps the calls of torch in the place of kernels, so without a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.comm.recorder import Recorder
from autopar.runtime.kernels import random
from autopar.runtime.step.cuda_graphs import CudaGraphWarning
from autopar.runtime.step.session import Session
from autopar.runtime.step.step_record import StepRecord, difference
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

STEPS = 6
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Played(TorchDispatchMode):
    """A stand-in for a CUDA graph. `capture` notes every call with the tensors that it was given and that it made, and leaves no
    trace of having run; `play` makes the same calls on the same tensors with the same numbers."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.captured = self.played = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    @torch.no_grad()
    def capture(self, work: Callable[[], Any]) -> Any:
        self.captured += 1
        held = [t for rt in self.session.rts for t in (*rt.params.values(), *rt.buffers.values())]
        before = [t.clone() for t in held]
        with self:
            result = work()
        for t, old in zip(held, before, strict=True):
            t.copy_(old)
        own: set[int] = set()
        for _, args, kwargs, made in self.calls:
            given = {storage(t) for t in tensors((args, kwargs))}
            own |= {storage(t) for t in tensors(made)} - given
            for t in tensors(made):
                if t.is_floating_point() and storage(t) in own:
                    t.fill_(float("nan"))  # nothing of it was computed yet
        return result

    @torch.no_grad()
    def play(self) -> None:
        self.played += 1
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(x: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]


def storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def trained(
    program: autopar.ParallelProgram,
    batches: Iterable[Any],
    captured: bool,
    each: Callable[[Session], None] = lambda session: None,
    begin: Callable[[Session], None] = lambda session: None,
) -> tuple[list[Tensor], dict[str, Tensor], list[Played]]:
    """Losses, final parameters and buffers, and the captures that were made."""
    made: list[Played] = []

    def body(session: Session) -> Any:
        begin(session)
        if captured:
            session.capture_steps(lambda: made.append(Played(session)) or made[-1])  # type: ignore[func-returns-value]
        losses = []
        for batch in batches:
            losses.append(session.train_step(program.leaves(batch)))
            each(session)
        held = {n: t.clone() for n, t in (*session.rt.params.items(), *session.rt.buffers.items())}
        return losses, held

    ((losses, held),) = program.on_ranks(body)
    return losses, held, made


def assert_the_same(program: autopar.ParallelProgram, batches: list[Any]) -> None:
    """Bit for bit, from one capture."""
    losses, held, _ = trained(program, batches, False)
    own_losses, own_held, made = trained(program, batches, True)
    assert [one.captured for one in made] == [1]
    assert made[0].played == len(batches) - 2
    assert all(map(torch.equal, losses, own_losses))
    assert all(torch.equal(held[name], own_held[name]) for name in held)


def of_zoo(zoo: ZooModel, optimizer: Any = None, **options: Any) -> autopar.ParallelProgram:
    """A program of a model of the zoo on one rank."""
    return compiled_zoo(zoo, 1, optimizer=optimizer or zoo.optimizer, options=autopar.Options(**options))


@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
@pytest.mark.few(2)
@pytest.mark.parametrize("zoo", [zoo for zoo in MODELS if zoo.name != "lstm"], ids=str)
def test_played_steps_are_those_of_the_text(zoo: ZooModel) -> None:
    """The model is no LSTM, whose kernel on CPUs keeps for backward, in grad mode alone, what no call can make again."""
    assert_the_same(of_zoo(zoo), [zoo.batch(seed) for seed in range(STEPS)])


@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
@pytest.mark.parametrize("options", [{"microbatches": 4, "recompute": "full", "precision": "bf16"}], ids=str)
def test_microbatches_what_runs_again_and_casts_are_captured(options: dict[str, Any]) -> None:
    assert_the_same(of_zoo(BY_NAME["llama"], **options), [BY_NAME["llama"].batch(seed) for seed in range(STEPS)])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_played_steps_give_beside_the_loss_is_theirs_to_keep(microbatches: int) -> None:
    zoo = BY_NAME["mlp"]

    def loss_fn(out: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(out, y)
        return loss, {"right": (out.argmax(1) == y).sum(), "mean": out.mean(), "out": out}

    program = autopar.compile(
        zoo.make(),
        autopar.ClusterSpec.local(1),
        zoo.batch(),
        loss_fn=loss_fn,
        optimizer=SGD,
        options=autopar.Options(microbatches=microbatches),
    )
    batches, given = [zoo.batch(seed) for seed in range(STEPS)], ([], [])
    for captured, extras in enumerate(given):
        _, _, made = trained(program, batches, bool(captured), lambda session, kept=extras: kept.append(session.extras))
    assert [one.captured for one in made] == [1]
    torch.testing.assert_close(given[1], given[0], rtol=0, atol=0)
    assert not torch.equal(given[1][-1]["out"], given[1][-2]["out"])


def test_what_changes_between_steps_outside_of_forward_and_backward_may_change() -> None:
    """A learning rate, clipping, and steps that are skipped as their loss is no number: buffers go back with them."""
    zoo = BY_NAME["resnet"]
    rule = autopar.UpdateRule(
        functools.partial(torch.optim.AdamW, lr=0.1),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        clip_norm=autopar.ClipNorm(0.1),
    )
    program = of_zoo(zoo, rule)
    batches = [list(zoo.batch(seed)) for seed in range(STEPS)]
    batches[4][0] = torch.full_like(batches[4][0], math.nan)
    skipped: list[bool] = []

    def begin(session: Session) -> None:
        session.skip_not_finite()

    def note(session: Session) -> None:
        skipped.append(session.updater.not_finite)

    rates = {}
    for captured in (False, True):
        losses, held, _ = trained(program, map(tuple, batches), captured, note, begin)
        rates[captured] = losses, held
    assert skipped == [False, False, False, False, True, False] * 2
    for one, other in zip(*rates.values(), strict=True):
        pairs = (
            zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        )
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_gradients_lie_where_they_lay_and_losses_do_not() -> None:
    zoo = BY_NAME["mlp"]
    places: list[dict[str, int]] = []
    batches = [zoo.batch(seed) for seed in range(STEPS)]
    losses, _, _ = trained(
        of_zoo(zoo), batches, True, lambda s: places.append({n: g.data_ptr() for n, g in s.grads.items()})
    )
    assert places[2] == places[3] == places[5]
    assert len({loss.data_ptr() for loss in losses}) == STEPS
    assert len({loss.item() for loss in losses}) == STEPS


def test_what_moved_is_captured_anew() -> None:
    zoo = BY_NAME["mlp"]
    program, batches = of_zoo(zoo), [zoo.batch(seed) for seed in range(10)]
    steps = 0

    def move(session: Session) -> None:
        nonlocal steps
        steps += 1
        if steps % 10 == 5:
            buffer = next(iter(session.stages.values())).rt
            name, parameter = next(iter(buffer.params.items()))
            buffer.params[name] = parameter.data.clone()
            session.opt_params[name].data = buffer.params[name]

    losses, held, _ = trained(program, batches, False, move)
    own_losses, own_held, made = trained(program, batches, True, move)
    assert [one.captured for one in made] == [1, 1]
    assert all(map(torch.equal, losses, own_losses))
    assert all(torch.equal(held[name], own_held[name]) for name in held)


class Guarded(nn.Module):
    """Indices that the model makes itself, and a branch: each has a guard inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table((x * 3).long()).sum()
        return y * 2 if x.sum() > 0 else y


@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
def test_guards_inside_the_step_are_read_when_it_is_played() -> None:
    batches = [(torch.rand(8, 2),) for _ in range(STEPS)]
    options = autopar.Options(branches="guard")
    program = autopar.compile(Guarded(), autopar.ClusterSpec.local(1), batches[0], optimizer=SGD, options=options)
    assert sum("rt.guards." in line for line in program.sources[0].splitlines()) == 2
    assert_the_same(program, batches)
    for wrong in range(STEPS):
        with pytest.raises(autopar.GuardError, match="this depends on the data"):
            trained(program, [*batches[:wrong], (torch.zeros(8, 2),)], True)


class Noisy(nn.Module):
    """Draws of every kind, with dropout of weights and of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.w + torch.randn_like(x) * torch.rand_like(x)
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
        return F.dropout(attended, 0.3).square().sum()


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error::autopar.runtime.step.cuda_graphs.CudaGraphWarning")
@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "recompute": "full"}], ids=str)
def test_a_played_step_draws_anew(options: dict[str, Any]) -> None:
    """The keys lie in memory and are those of the step; the batch is the same in all, so equal masks would give equal losses
    where nothing is learned."""
    batch = (torch.randn(4, 6, 8),)
    still = functools.partial(torch.optim.SGD, lr=0.0)
    program = autopar.compile(
        Noisy(), autopar.ClusterSpec.local(1), batch, optimizer=still, options=autopar.Options(**options)
    )
    assert_the_same(program, [batch] * STEPS)
    losses, _, _ = trained(program, [batch] * STEPS, True)
    assert len({loss.item() for loss in losses}) == STEPS


def test_keys_in_memory_are_those_of_the_numbers() -> None:
    keys = random.StepKeys(torch.device("cpu"))
    parts = [(microbatch, call, 0) for microbatch in range(2) for call in range(3)]
    first = [keys.of(5, 0, part) for part in parts]
    for step in range(1, 4):
        keys.write(5, step)
        wanted = [random.make_key(5, step, *part) for part in parts]
        assert [int(keys.of(5, step, part)) for part in parts] == wanted
        for key, number in zip((keys.of(5, step, part) for part in parts), wanted, strict=True):
            assert int(random._further(key, 2)) == random.make_key(number, 2)
            assert torch.equal(random.normal((5, 7), torch.float32, key), random.normal((5, 7), torch.float32, number))
    assert first == [random.make_key(5, 0, *part) for part in parts]
    assert keys.of(5, 3, (9, 9, 9)) == random.make_key(5, 3, 9, 9, 9)


# --- what is not captured, and why


def refused(program: autopar.ParallelProgram, batch: Any, why: str) -> None:
    """Assert that the program is refused by a warning, and that its steps are those of the text."""
    batches = [batch] * 4
    losses, held, _ = trained(program, batches, False)
    with pytest.warns(CudaGraphWarning, match=why):
        own_losses, own_held, made = trained(program, batches, True)
    assert not any(one.played for one in made)
    assert all(map(torch.equal, losses, own_losses))
    assert all(torch.equal(held[name], own_held[name]) for name in held)


def test_a_loss_scale_that_moves_is_refused() -> None:
    zoo = BY_NAME["mlp"]
    rule = autopar.UpdateRule(SGD, loss_scaling=autopar.LossScaling())
    refused(of_zoo(zoo, rule), zoo.batch(), "the loss scale is a number that changes")


def test_parameters_in_tiers_are_refused() -> None:
    zoo = BY_NAME["mlp"]
    cluster = autopar.ClusterSpec.local(1).with_tiers()
    program = compiled_zoo(zoo, cluster, options=autopar.Options(offload="parameters"))
    refused(program, zoo.batch(), "parameters rest in memory tiers")


def test_several_ranks_a_compiler_and_a_cpu_are_refused() -> None:
    zoo = BY_NAME["mlp"]
    with pytest.warns(CudaGraphWarning, match="it has several ranks"):
        compiled_zoo(zoo, 2).on_ranks(lambda session: session.capture_steps(lambda: Played(session)))
    with pytest.warns(CudaGraphWarning, match="the compiler 'inductor'"):
        compiled_zoo(zoo, 1, options=autopar.Options(compiler="inductor")).on_ranks(
            lambda session: session.capture_steps(lambda: Played(session))
        )
    with pytest.warns(CudaGraphWarning, match="they run on a device of kind 'cpu'"):
        compiled_zoo(zoo, 1, options=autopar.Options(cuda_graphs=True)).run([zoo.batch()])


def test_a_recorded_run_is_that_of_the_text() -> None:
    zoo = BY_NAME["mlp"]

    def profiled(session: Session) -> None:
        session.recorder = Recorder(torch.device("cpu")) if session.rt.step == 3 else None

    _, _, made = trained(of_zoo(zoo), [zoo.batch()] * 6, True, profiled)
    assert [one.played for one in made] == [3]


# --- records


def recorded(work: Callable[[], Any], *at_rest: Tensor) -> StepRecord:
    record = StepRecord(at_rest, [globals()])
    with record:
        work()
    return record


def test_records_differ_in_numbers_ops_and_tensors() -> None:
    x, y = torch.ones(4), torch.ones(4)
    one = recorded(lambda: (x * 2 + y).sum(), x, y)
    assert one.refused == ""
    assert difference(one.calls, recorded(lambda: (x * 2 + y).sum(), x, y).calls) == ""
    assert "aten.mul.Tensor (" in difference(one.calls, recorded(lambda: (x * 3 + y).sum(), x, y).calls)
    assert "aten.add.Tensor (" in difference(one.calls, recorded(lambda: (x * 2 + x).sum(), x, y).calls)
    assert "run other ops" in difference(one.calls, recorded(lambda: x * 2 + y, x, y).calls)
    assert "run other ops" in difference(one.calls, recorded(lambda: (x / 2 + y).sum(), x, y).calls)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda x: x.sum().item(), "the host waits"),
        (lambda x: x[x > 0], "the host waits"),
        (lambda x: x.bincount(), "the host waits"),
        (lambda x: torch.rand(3), "torch's generator"),
        (lambda x: torch.nn.functional.dropout(x.float(), 0.5), "torch's generator"),
        (lambda x: x + ELSEWHERE, "made elsewhere"),
        (lambda x: x + torch.tensor([1, 2, 3]), "made elsewhere"),
        (lambda x: [(x + i, x + 1 + torch.tensor([i, 2, 3])) for i in range(99)], "made elsewhere"),
        (lambda x: x.float().to("meta"), "copied between host and device"),
    ],
)
def test_what_no_record_can_show_to_be_alike_is_refused(work: Callable[[Tensor], Any], why: str) -> None:
    x = torch.arange(3)
    assert why in recorded(lambda: work(x), x).refused


ELSEWHERE = torch.ones(3)
