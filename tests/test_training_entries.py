"""Several training steps over one set of parameters, each with its optimizer: a generator and its critic, in turn.

The reference is eager PyTorch in float64.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.options import Entry
from tests.measure import measure_turns
from tests.warm import torchrun

ADAM = functools.partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.999))
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
Turns = list[tuple[str, tuple[torch.Tensor, ...]]]


def loss_of(scores: torch.Tensor, wanted: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


class Both(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic


class GeneratorStep(Both):
    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return loss_of(self.critic(self.generator(noise)), 1.0)


class CriticStep(Both):
    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return loss_of(self.critic(real), 1.0) + loss_of(self.critic(self.generator(noise).detach()), 0.0)


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8)).double()
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    return generator, critic.requires_grad_(False)


def drawn(seed: int, width: int) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed)).double()


def turns(rounds: int) -> Turns:
    pairs: Turns = []
    for k in range(rounds):
        pairs += [("critic", (drawn(2 * k, 6), drawn(100 + k, 8))), ("", (drawn(2 * k + 1, 6),))]
    return [*pairs, ("sample", (drawn(99, 6),))]


def compiled(ranks: int, **options: Any) -> autopar.Program:
    generator, critic = modules()
    return autopar.compile(
        GeneratorStep(generator, critic),
        autopar.ClusterSpec.local(ranks),
        (drawn(0, 6),),
        optimizer=ADAM,
        options=autopar.Options(**options),
        entries={
            "critic": Entry(
                (drawn(0, 6), drawn(1, 8)),
                loss_fn=None,
                train=True,
                module=CriticStep(generator, critic),
                optimizer=SGD,
                trains=critic,
            ),
            "sample": Entry((drawn(0, 6),), loss_fn=None, module=generator),
        },
    )


PLANS: dict[str, dict[str, Any]] = {
    "solver": {},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "microbatches": {"strategy": "zero3", "microbatches": 2, "coupled": "per-microbatch"},
}


@functools.cache
def program_of(plan: str, ranks: int) -> autopar.Program:
    return compiled(ranks, **PLANS[plan])


def eager(taken: Turns, parts: int = 1) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Losses in turn, the sample, and the state afterwards. parts: microbatches that are batches of their own."""
    generator, critic = modules()
    critic.requires_grad_(True)
    optimizers = {"": ADAM(generator.parameters()), "critic": SGD(critic.parameters())}
    steps = {"": GeneratorStep(generator, critic), "critic": CriticStep(generator, critic)}
    losses, sample = [], torch.zeros(())
    for name, batch in taken:
        if name == "sample":
            with torch.no_grad():
                sample = copy.deepcopy(generator).eval()(*batch)
            continue
        for one in optimizers.values():
            one.zero_grad()
        pieces = [steps[name](*(t.chunk(parts)[k] for t in batch)) / parts for k in range(parts)]
        loss = torch.stack(pieces).sum()
        loss.backward()
        optimizers[name].step()
        losses.append(loss.detach())
    return losses, sample, dict(steps[""].state_dict())


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(plan, ranks, marks=() if (plan, ranks) == ("zero3", 2) else pytest.mark.slow)
        for plan in PLANS
        for ranks in (2, 4)
    ],
)
def test_twenty_steps_of_two_optimizers_in_turn_are_those_of_eager(plan: str, ranks: int) -> None:
    taken = turns(10)
    program = program_of(plan, ranks)
    result = program.run_in_turn(taken)
    losses, sample, state = eager(taken, program.plan.microbatches)
    torch.testing.assert_close(list(result.losses), losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.outputs[0][1], sample, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.state_dict(), state, rtol=1e-9, atol=1e-9)


def test_an_optimizer_has_the_parameters_that_its_step_trains_and_no_other_has_gradients() -> None:
    program, taken = program_of("zero3", 2), turns(1)

    def body(session: Any) -> dict[str, tuple[set[str], set[str], set[str]]]:
        seen = {}
        for name, batch in taken[:2]:
            session.run_entry(name, list(batch))
            updater = session.entry(name).updater
            seen[name] = ({*updater.own}, {*session.grads}, {*session.full_grads()})
        return seen

    for of_rank in program.on_ranks(body):
        for name, part in (("", "generator"), ("critic", "critic")):
            expected = {n for n in program.ir.parameters if n.startswith(part)}
            assert of_rank[name] == (expected, expected, expected)
    assert not any(p.requires_grad for n, p in program.model.named_parameters() if n.startswith("critic"))


@pytest.mark.parametrize("plan", ["zero3", pytest.param("solver", marks=pytest.mark.slow)])
def test_every_step_counts_the_state_of_all_optimizers(plan: str) -> None:
    program = program_of(plan, 2)
    forms, measured = {"": program, **program.entries}, measure_turns(program, turns(1))
    for (name, _), of_ranks in zip(turns(1), measured, strict=True):
        for rank, peak in enumerate(of_ranks):
            predicted = forms[name].account.peaks[forms[name].group_of(rank)]
            assert 0.98 * peak - 256 <= predicted <= 1.05 * peak + 256, (name, rank, predicted, peak)


@pytest.mark.slow
def test_a_checkpoint_has_the_state_of_every_optimizer_and_goes_on_under_another_plan() -> None:
    taken = turns(4)
    states = program_of("zero3", 2).on_ranks(
        lambda session: ([session.run_entry(n, list(b)) for n, b in taken[:5]], session.state_dict())[1]
    )
    assert {"optim_groups", "optim_groups@critic", "optim@critic.critic.0.weight.momentum_buffer"} <= states[0].keys()

    def resumed(session: Any) -> list[float]:
        session.load_state_dict(states[0])
        return [float(session.run_entry(n, list(b))) for n, b in taken[5:8]]

    losses, _, _ = eager(taken)
    for of_rank in program_of("solver", 4).on_ranks(resumed):
        assert of_rank == pytest.approx([one.item() for one in losses[5:8]], rel=1e-9, abs=1e-9)


LOOP = """import os, sys, torch, autopar
program, turns = autopar.load(sys.argv[1]), torch.load(sys.argv[1] + "/turns.pt")
results = [(program.entry(name) if name else program)(*batch) for name, batch in turns]
if os.environ["RANK"] == "0":
    torch.save(results, sys.argv[1] + "/results.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_emitted_program_trains_with_both_optimizers(tmp_path: Path) -> None:
    home, taken = tmp_path / "program", turns(3)
    program_of("zero3", 2).save(home)
    torch.save(taken, home / "turns.pt")
    (tmp_path / "loop.py").write_text(LOOP)
    done = torchrun(2, tmp_path / "loop.py", home, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(home / "results.pt")
    losses, sample, _ = eager(taken)
    torch.testing.assert_close(results[:-1], losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(results[-1][1], sample, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    generator, critic = modules()
    step, cluster = GeneratorStep(generator, critic), autopar.ClusterSpec.local(1)

    def refused(entry: Entry) -> str:
        with pytest.raises(autopar.InputError) as caught:
            autopar.compile(step, cluster, (drawn(0, 6),), optimizer=ADAM, entries={"critic": entry})
        return str(caught.value)

    assert "parameter that its module has not" in refused(Entry(train=True, trains=nn.Linear(2, 2)))
    assert "set train=True" in refused(Entry(optimizer=SGD))
    assert "optimizer must be a factory" in refused(
        Entry(train=True, optimizer=SGD(critic.parameters()))  # type: ignore[arg-type]
    )


class Counted(nn.Module):
    """A first layer of another model, a head of its own, and a buffer that counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = layer, nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).relu()
        self.seen += hidden.detach().sum(0)
        return self.own(hidden)


def test_an_entry_whose_module_names_parameters_otherwise_is_verified() -> None:
    """State of the module is compared under the first program's names; all other state is to stay as it is."""
    torch.manual_seed(2)
    first = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    other, batch = Counted(first[0]), (torch.randn(8, 6), torch.randn(8, 4))
    loss = nn.functional.mse_loss
    entry = Entry(batch, module=other, train=True, loss_fn=loss, optimizer=SGD)
    program = autopar.compile(
        first, autopar.ClusterSpec.local(2), batch, loss_fn=loss, optimizer=SGD, entries={"other": entry}
    )
    verified = autopar.verify(program.entries["other"], other, batch)
    assert verified.ok, verified.errors
    assert {"param/0.weight", "param/other.own.weight", "param/2.weight", "buffer/other.seen"} <= verified.errors.keys()
