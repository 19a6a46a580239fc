"""Several steps over one set of parameters: what they compute, what they hold, and what is refused.

The reference is eager PyTorch in float64 that trains and evaluates in turn.
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
from autopar.runtime.program.manifest import Manifest
from tests.measure import measure_turns
from tests.warm import torchrun

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
LOSS = nn.functional.cross_entropy


class Classifier(nn.Module):
    """Layers that eval mode changes, and one that training alone has."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.dropout, self.head, self.extra = nn.Dropout(dropout), nn.Linear(16, 4), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x) + 0.1 * self.extra(x).sin() if self.training else self.body(x)
        return self.head(self.dropout(self.norm(hidden).tanh()))


def batch(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 8, generator=make).double(), torch.randint(0, 4, (samples,), generator=make)


def model(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(1)
    return Classifier(dropout).double()


SIZES = {"0": {0: (12, 5)}, "1": {0: (12, 5)}}
PLANS: dict[str, dict[str, Any]] = {
    "solver": {},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "megatron": {"strategy": "megatron", "tp": 2},
    "pipeline": {"pp": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
}
QUICK = {("zero3", 2), ("pipeline", 2), ("zb-v", 2)}
TURNS = [("", batch(8)), ("evaluate", batch(12, 1)), ("", batch(8, 2)), ("evaluate", batch(5, 3)), ("", batch(8, 4))]
TURNS.append(TURNS[1])


def compiled(ranks: int, made: nn.Module | None = None, entry: Entry | None = None, **options: Any) -> autopar.Program:
    if tp := options.pop("tp", 0):
        options["mesh"] = {"dp": ranks // tp, "tp": tp}
    return autopar.compile(
        made or model(),
        autopar.ClusterSpec.local(ranks),
        batch(8),
        loss_fn=LOSS,
        optimizer=ADAM,
        options=autopar.Options(**options),
        entries={"evaluate": entry or Entry(batch(12), buckets=SIZES)},
    )


@functools.cache
def program_of(plan: str, ranks: int) -> autopar.Program:
    return compiled(ranks, **PLANS[plan])


def evaluated(made: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = copy.deepcopy(made).eval()
    with torch.no_grad():
        output = made(x)
        return LOSS(output, y), output


def eager(made: nn.Module, turns: list[tuple[str, Any]]) -> tuple[list[Any], list[Any], nn.Module]:
    """Losses of training, (loss, output) of evaluation, and the model afterwards."""
    made = copy.deepcopy(made)
    optimizer, losses, outputs = ADAM(made.parameters()), [], []
    for name, (x, y) in turns:
        if name:
            outputs.append(evaluated(made, x, y))
            continue
        optimizer.zero_grad()
        loss = LOSS(made(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, outputs, made


def assert_equal(result: autopar.RunResult, made: nn.Module, turns: list[tuple[str, Any]]) -> None:
    losses, outputs, trained = eager(made, turns)
    torch.testing.assert_close(list(result.losses), losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(list(result.outputs), outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.state_dict(), dict(trained.state_dict()), rtol=1e-9, atol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(plan, ranks, marks=() if (plan, ranks) in QUICK else pytest.mark.slow)
        for plan in PLANS
        for ranks in (2, 3, 4)
        if ranks != 3 or plan in ("solver", "zero1", "zero3")
    ],
)
def test_training_and_evaluation_in_turn_are_those_of_eager(plan: str, ranks: int) -> None:
    assert_equal(program_of(plan, ranks).run_in_turn(TURNS), model(), TURNS)


def test_an_entry_computes_with_the_parameters_of_the_program_and_decides_the_rest_itself() -> None:
    program = program_of("pipeline", 2)
    for form in program.forms:
        for one, first in zip(form.plan.stages, program.plan.stages, strict=True):
            assert (one.mesh, one.parameters) == (first.mesh, first.parameters)
        assert [s.buffers.keys() for s in form.stages] == [s.buffers.keys() for s in program.stages]
    assert program.model.training
    assert not program.entry("evaluate").training


@pytest.mark.slow
def test_dropout_is_off_in_evaluation_alone() -> None:
    program = compiled(2, model(0.5), Entry(), strategy="dp")
    result = program.run_in_turn([*TURNS[:1], ("evaluate", batch(8, 1))])
    trained = model()
    trained.load_state_dict(result.state_dict())
    torch.testing.assert_close(result.outputs[0], evaluated(trained, *batch(8, 1)), rtol=1e-9, atol=1e-9)
    assert autopar.verify(program.entry("evaluate"), model(0.5), batch(8, 1)).ok


@pytest.mark.parametrize("plan", [pytest.param(p, marks=() if p == "zero3" else pytest.mark.slow) for p in PLANS])
def test_training_and_evaluation_share_one_memory_and_its_peak_is_promised(plan: str) -> None:
    """Parameters, optimizer state and buffers are there once, and gradients go before evaluation."""
    program = program_of(plan, 2)
    forms = program, program.entry("evaluate")
    measured = measure_turns(program, TURNS[:2])
    (alone,) = measure_turns(program, TURNS[:1])
    for rank, peaks in enumerate(zip(*measured, strict=True)):
        assert max(peaks) <= 1.01 * max(alone[rank], peaks[1])
        for form, peak in zip(forms, peaks, strict=True) if len(program.stages) == 1 else ():
            predicted = form.account.peaks[form.group_of(rank)]
            assert 0.98 * peak - 256 <= predicted <= 1.05 * peak + 256, (rank, predicted, peak)
    assert program.predicted.peak_bytes == max(max(form.account.peaks) for form in program.forms)


@pytest.mark.slow
def test_the_loss_alone_the_output_alone_and_another_loss() -> None:
    x, y = batch(8, 1)
    made = model()
    entries = {
        "loss": Entry(outputs=False),
        "output": Entry((x,), loss_fn=None),
        "smooth": Entry(loss_fn=functools.partial(LOSS, label_smoothing=0.1)),
    }
    program = autopar.compile(
        made, autopar.ClusterSpec.local(2), batch(8), loss_fn=LOSS, optimizer=ADAM, entries=entries
    )
    loss, output = evaluated(made, x, y)
    alone, without_loss, smooth = program.run_in_turn([("loss", (x, y)), ("output", (x,)), ("smooth", (x, y))]).outputs
    torch.testing.assert_close(alone, (loss, None))
    assert without_loss[0] is None
    torch.testing.assert_close(without_loss[1], output)
    torch.testing.assert_close(smooth, (LOSS(output, y, label_smoothing=0.1), output))


def test_what_is_no_entry_is_refused_by_name() -> None:
    program = program_of("zero3", 2)
    with pytest.raises(autopar.InputError, match="has no entry 'test'; it has evaluate"):
        program.run_in_turn([("test", batch(8))])
    with pytest.raises(autopar.InputError, match=r"fits none of the program's buckets"):
        program.run_in_turn([("evaluate", batch(8))])
    with pytest.raises(autopar.InputError, match="'not a name'"):
        autopar.compile(model(), "dgx-a100", batch(8), loss_fn=LOSS, entries={"not a name": Entry()})
    with pytest.raises(autopar.InputError, match=r"must be an autopar\.Entry, not dict"):
        autopar.compile(model(), "dgx-a100", batch(8), loss_fn=LOSS, entries={"evaluate": {}})  # type: ignore[dict-item]
    with pytest.raises(autopar.InputError, match="2 positional inputs") as without_loss:
        autopar.compile(model(), "dgx-a100", batch(8), loss_fn=LOSS, entries={"average": Entry(loss_fn=None)})
    assert "entries['average']. Its example inputs are those of the program" in without_loss.value.__notes__[0]


@pytest.mark.slow
def test_a_checkpoint_is_that_of_training_alone() -> None:
    program = program_of("pipeline", 4)
    alone = autopar.compile(
        model(),
        autopar.ClusterSpec.local(4),
        batch(8),
        loss_fn=LOSS,
        optimizer=ADAM,
        plan=program.plan,
        options=autopar.Options(pp=2),
    )

    def states(one: autopar.Program) -> dict[str, Any]:
        def body(session: Any) -> dict[str, Any]:
            for name in ("", "evaluate") if one.entries else ("",):
                session.run_entry(name, list(batch(12 if name else 8)))
            return dict(session.state_dict())

        return one.on_ranks(body)[0]

    ours, theirs = states(program), states(alone)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


LOOP = """import os, sys, torch, autopar
program, turns = autopar.load(sys.argv[1]), torch.load(sys.argv[1] + "/turns.pt")
results = [(program.entry(name) if name else program)(*batch) for name, batch in turns]
if os.environ["RANK"] == "0":
    torch.save(results, sys.argv[1] + "/results.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_emitted_program_evaluates_between_its_steps_on_every_number_of_ranks(tmp_path: Path) -> None:
    home = tmp_path / "program"
    compiled(2, strategy="zero3").save(home, also=[1])
    assert set(Manifest.read(home).entries) == set(Manifest.read(home / "worlds" / "1").entries) == {"evaluate"}
    torch.save(TURNS, home / "turns.pt")
    (tmp_path / "loop.py").write_text(LOOP)
    losses, outputs, _ = eager(model(), TURNS)
    for ranks in (2, 1):
        done = torchrun(ranks, tmp_path / "loop.py", home, timeout=100)
        assert done.returncode == 0, done.stderr[-3000:]
        results = torch.load(home / "results.pt")
        torch.testing.assert_close([r for r in results if isinstance(r, torch.Tensor)], losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close([r for r in results if isinstance(r, tuple)], outputs, rtol=1e-9, atol=1e-9)


DATA = """import torch
def train():
    return torch.load(HERE + "/turns.pt")[::2]
def evaluate():
    return torch.load(HERE + "/turns.pt")[1::2]
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_evaluates_every_so_many_steps_and_after_the_last(tmp_path: Path) -> None:
    home, turns = tmp_path / "program", [("", batch(8, i)) for i in range(3)]
    program_of("zero3", 2).save(home)
    torch.save([batch(8), batch(12, 1), batch(8, 2), batch(5, 3)], tmp_path / "turns.pt")
    (tmp_path / "data.py").write_text(DATA.replace("HERE", repr(str(tmp_path))))
    data = [f"--data={tmp_path / 'data.py'}:train", f"--eval-data={tmp_path / 'data.py'}:evaluate"]
    done = torchrun(2, home / "run.py", "--steps=3", "--eval-every=2", *data, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    turns = [("", batch(8)), ("", batch(8, 2)), ("", batch(8))]
    for steps in (2, 3):
        _, _, trained = eager(model(), turns[:steps])
        mean = sum(evaluated(trained, *one)[0].item() for one in (batch(12, 1), batch(5, 3))) / 2
        assert f"step {steps}: evaluate loss {mean:.6f} (mean of 2 batches)" in done.stdout
    assert "step 1: evaluate" not in done.stdout
    wrong = torchrun(2, home / "run.py", *data, "--eval-entry=test", timeout=100)
    assert "the program has evaluate" in wrong.stderr


def test_the_report_and_the_facts_name_entries() -> None:
    program = program_of("pipeline", 2)
    assert "entry evaluate, with the same parameters:" in program.report()
    assert "0 (5, 8)" in program.report()


class Encoder(nn.Module):
    """Some layers of a classifier."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.part = nn.Sequential(classifier.body, classifier.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).tanh()


class Ensemble(nn.Module):
    """A classifier and layers of its own."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.student, self.own = classifier, nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) + self.own(x)


def with_modules(**options: Any) -> tuple[autopar.Program, dict[str, nn.Module]]:
    modules: dict[str, nn.Module] = {"": model()}
    modules |= {"encode": Encoder(modules[""]), "both": Ensemble(modules[""])}  # type: ignore[arg-type]
    program = autopar.compile(
        modules[""],
        autopar.ClusterSpec.local(2),
        batch(8),
        loss_fn=LOSS,
        optimizer=ADAM,
        options=autopar.Options(**options),
        entries={name: Entry(batch(8)[:1], loss_fn=None, module=modules[name]) for name in ("encode", "both")},
    )
    return program, modules


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "zero1", "zero3"])
def test_entries_of_other_modules_compute_with_the_tensors_that_these_share(strategy: str) -> None:
    program, modules = with_modules(strategy=strategy)
    assert "both.own.0.weight" in program.ir.parameters
    assert not [name for name in program.ir.parameters if "student" in name or "part" in name]
    turns = [("", batch(8)), ("encode", batch(8, 3)[:1]), ("both", batch(8, 4)[:1]), ("", batch(8, 1))]
    result = program.run_in_turn([*turns, turns[1], turns[2]])
    trained = copy.deepcopy(modules)
    for steps, outputs in ((1, result.outputs[:2]), (2, result.outputs[2:])):
        trained = copy.deepcopy(modules)
        trained[""].load_state_dict(eager(modules[""], [turns[0], turns[3]][:steps])[2].state_dict())
        for (name, (x,)), (loss, output) in zip(turns[1:3], outputs, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(output, trained[name].eval()(x), rtol=1e-9, atol=1e-9)
            assert loss is None
    assert result.state_dict().keys() == modules[""].state_dict().keys()
    assert autopar.verify(program.entry("both"), modules["both"], batch(8, 5)[:1]).ok


@pytest.mark.slow
def test_a_name_that_an_entry_would_share_with_the_model_is_refused() -> None:
    other = nn.Linear(8, 4).double()
    entries = {"head": Entry(batch(8)[:1], loss_fn=None, module=other)}
    with pytest.raises(autopar.InputError, match=r"has a tensor head\.weight of its own"):
        autopar.compile(model(), autopar.ClusterSpec.local(1), batch(8), loss_fn=LOSS, optimizer=ADAM, entries=entries)
