"""Evaluation with averages of parameters: those of torch.optim.swa_utils.AveragedModel, kept where parameters are stored."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.options import Entry
from tests.measure import measure_turns
from tests.test_bucketed import batch as token_batch
from tests.test_bucketed import model as decoder
from tests.test_entries import ADAM, LOOP, LOSS, PLANS, batch, evaluated, model
from tests.warm import torchrun

DECAY = 0.8
Turns = list[tuple[str, tuple[torch.Tensor, torch.Tensor]]]


def turns(steps: int) -> Turns:
    taken: Turns = [("average", batch(12, 90))]
    for k in range(steps):
        taken += [("", batch(8, k)), ("average", batch(12, 50 + k)), ("evaluate", batch(8, 70 + k))]
    return taken


@functools.cache
def program_of(plan: str, ranks: int) -> autopar.Program:
    options = dict(PLANS[plan])
    if tp := options.pop("tp", 0):
        options["mesh"] = {"dp": ranks // tp, "tp": tp}
    return autopar.compile(
        model(),
        autopar.ClusterSpec.local(ranks),
        batch(8),
        loss_fn=LOSS,
        optimizer=ADAM,
        options=autopar.Options(**options),
        entries={"evaluate": Entry(), "average": Entry(batch(12), ema=DECAY)},
    )


def eager(taken: Turns) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    made = model()
    averaged = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer, losses, outputs = ADAM(made.parameters()), [], []
    for name, (x, y) in taken:
        if name:
            outputs.append(evaluated(averaged.module if name == "average" else made, x, y))
            continue
        optimizer.zero_grad()
        loss = LOSS(made(x), y)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(made)
        losses.append(loss.detach())
    return losses, outputs


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(plan, ranks, marks=() if (plan, ranks) == ("zero3", 2) else pytest.mark.slow)
        for plan in ("solver", "zero1", "zero3", "megatron", "pipeline")
        for ranks in (2, 4)
    ],
)
def test_averages_are_those_of_an_averaged_model(plan: str, ranks: int) -> None:
    taken = turns(5)
    result = program_of(plan, ranks).run_in_turn(taken)
    losses, outputs = eager(taken)
    torch.testing.assert_close(list(result.losses), losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(list(result.outputs), outputs, rtol=1e-9, atol=1e-9)


def test_averages_are_counted_once_beside_the_parameters_in_every_form() -> None:
    program = program_of("zero3", 2)
    for form in program.forms:
        resting = form.account.stages[0].memory.resting
        assert resting["averages"] == resting["parameters"] > 0
    measured = measure_turns(program, turns(1))
    for (name, _), of_ranks in zip(turns(1), measured, strict=True):
        account = (program.entry(name) if name else program).account
        for peak in of_ranks:
            assert 0.98 * peak - 256 <= account.peak_bytes <= 1.05 * peak + 256


def test_a_checkpoint_has_the_averages() -> None:
    taken = turns(4)

    def trained(session: Any) -> dict[str, Any]:
        for name, one in taken[:7]:
            session.run_entry(name, list(one))
        return copy.deepcopy(dict(session.state_dict()))

    state = program_of("zero3", 2).on_ranks(trained)[0]
    assert {"averaged@average", "average@average.body.weight"} <= state.keys()

    def resumed(session: Any) -> list[Any]:
        session.load_state_dict(state)
        return [session.run_entry(name, list(one)) for name, one in taken[7:]]

    losses, outputs = eager(taken)
    for of_rank in program_of("zero3", 2).on_ranks(resumed):
        torch.testing.assert_close(of_rank[0], losses[2], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(tuple(of_rank[1]), outputs[5], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_averages_of_a_tied_parameter_in_two_stages_of_a_rank_are_one() -> None:
    sgd, batches = functools.partial(torch.optim.SGD, lr=0.1), [token_batch(8, 8, seed) for seed in range(4)]
    program = autopar.compile(
        decoder(),
        autopar.ClusterSpec.local(2),
        batches[0],
        optimizer=sgd,
        options=autopar.Options(pp=2, schedule="zb-v"),
        entries={"average": Entry(ema=DECAY, outputs=False)},
    )
    assert program.lowered.shared == {"embed.weight": (0, 3)}

    def run(session: Any, state: Any, steps: range) -> Any:
        if state is not None:
            session.load_state_dict(state)
        for k in steps:
            session.train_step(program.leaves(batches[k]))
        return session.run_entry("average", program.leaves(batches[0]))[0], copy.deepcopy(dict(session.state_dict()))

    first, state = program.on_ranks(lambda session: run(session, None, range(3)))[0]
    later = [program.on_ranks(lambda session, n=n: run(session, state, range(3, n)))[0][0] for n in (3, 4)]
    made = decoder()
    averaged, optimizer = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), sgd(made.parameters())
    expected = []
    for one in batches:
        optimizer.zero_grad()
        made(**one).backward()
        optimizer.step()
        averaged.update_parameters(made)
        expected.append(copy.deepcopy(averaged.module).eval()(**batches[0]).detach())
    torch.testing.assert_close([first, *later], [expected[2], expected[2], expected[3]], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_emitted_program_averages(tmp_path: Path) -> None:
    home = tmp_path / "program"
    program_of("zero3", 2).save(home)
    torch.save(turns(3), home / "turns.pt")
    (tmp_path / "loop.py").write_text(LOOP)
    done = torchrun(2, tmp_path / "loop.py", home, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [one for one in torch.load(home / "results.pt") if isinstance(one, tuple)]
    torch.testing.assert_close(outputs, eager(turns(3))[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ema", [0.0, 1.0, 2, True])
def test_what_is_no_decay_is_refused(ema: Any) -> None:
    with pytest.raises(autopar.InputError, match=r"entries\['average'\]: ema is the decay"):
        autopar.compile(
            model(), autopar.ClusterSpec.local(1), batch(8), loss_fn=LOSS, entries={"average": Entry(ema=ema)}
        )
