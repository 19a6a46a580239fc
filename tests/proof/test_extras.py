"""A training step gives what loss_fn returns beside the loss, of the whole batch, however it is cut over ranks and in time."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.proof.random_plans import random_plan
from tests.proof.test_memory_measured import PLANS, assert_kept
from tests.warm import torchrun
from tests.zoo import others

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8)


class Net(nn.Module):
    """Logits of 12 classes, and a bound that no sample changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1.0)  # type: ignore[operator]
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden, self.last(hidden)


class Loss(nn.Module):
    """Cross-entropy, and beside it values of every kind: by sample, sums, means, extrema, of no sample, nested."""

    def forward(self, out: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Any]:
        hidden, logits = out
        right = logits.argmax(1) == y
        beside = {
            "logits": logits,
            "hidden": [hidden, right],
            "accuracy": right.float().mean(),
            "fraction": right.sum() / y.numel(),
            "counts": (right.sum(), F.one_hot(y, 12).sum(0)),
            "largest": logits.amax(),
            "by class": logits.exp().sum(0),
        }
        return F.cross_entropy(logits, y), beside


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@functools.cache
def program(ranks: int, loss_fn: Any = None, **options: Any) -> autopar.ParallelProgram:
    return autopar.compile(
        net(),
        autopar.ClusterSpec.local(ranks),
        BATCH,
        loss_fn=loss_fn or Loss(),
        optimizer=ADAM,
        options=autopar.Options(**options),
    )


def check_equal(one: autopar.ParallelProgram, steps: int = 2) -> None:
    """Loss, extras, gradients and parameters are those of one device."""
    found = autopar.verify(one, net(), BATCH, steps=steps)
    assert found.ok, found.errors
    assert {name for name in found.errors if name.startswith(f"output/{steps - 1}/")} == {
        f"output/{steps - 1}/{name}"
        for name in (
            "logits",
            "hidden.0",
            "hidden.1",
            "accuracy",
            "fraction",
            "counts.0",
            "counts.1",
            "largest",
            "by class",
        )
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"microbatches": 4}),
        (2, {"strategy": "zero3"}),
        pytest.param(2, {"strategy": "dp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "zero2", "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        (4, {"pp": 2, "schedule": "1f1b", "microbatches": 4}),
        pytest.param(2, {"pp": 2, "schedule": "zb-h1", "microbatches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_extras_are_those_of_one_device(ranks: int, options: dict[str, Any]) -> None:
    check_equal(program(ranks, **options))


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss], ids=lambda f: f.__name__)
def test_an_output_is_an_extra_beside_a_loss_that_broadcasts_it(loss: Any) -> None:
    """Such a loss is a call of an op with several results, behind the first of which the extra stands."""
    model, (x, _) = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), BATCH
    one = autopar.compile(
        model, autopar.ClusterSpec.local(1), (x, x), loss_fn=lambda out, y: (loss(out, y), {"out": out}), optimizer=ADAM
    )
    found = autopar.verify(one, model, (x, x))
    assert found.ok, found.errors
    assert "output/0/out" in found.errors


EXTREMES: dict[str, Any] = {
    "max": lambda out: out.max(),
    "min": lambda out: out.abs().min(),
    "positive": lambda out: (out > 0).count_nonzero(),
    "positive by class": lambda out: out.relu().count_nonzero(dim=0),
}


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"mesh": {"tp": 2}}], ids=str)
def test_extremes_and_counts_are_those_of_the_whole_batch(options: dict[str, Any]) -> None:
    one = autopar.compile(
        model := nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12)),
        autopar.ClusterSpec.local(2 if "mesh" in options else 1),
        BATCH,
        loss_fn=lambda out, y: (F.cross_entropy(out, y), {name: f(out) for name, f in EXTREMES.items()}),
        optimizer=ADAM,
        options=autopar.Options(**options),
    )
    found = autopar.verify(one, model, BATCH)
    assert found.ok, found.errors
    assert {f"output/0/{name}" for name in EXTREMES} <= {*found.errors}


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_random_plans_give_the_same_extras(microbatches: int) -> None:
    one = program(4, microbatches=microbatches)
    for seed in range(2):
        check_equal(one.with_plan(random_plan(one, seed)))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_random_plans_give_the_same_extras(ranks: int, microbatches: int) -> None:
    one = program(ranks, microbatches=microbatches)
    for seed in range(2, 20):
        check_equal(one.with_plan(random_plan(one, seed)))


def test_a_run_gives_losses_and_extras_nested_as_they_were_returned() -> None:
    result = program(2, strategy="zero3").run([BATCH], steps=2)
    first, second = result.outputs
    assert list(result) == list(result.losses)
    model = net()
    loss, beside = Loss()(model(BATCH[0]), BATCH[1])
    torch.testing.assert_close(result.losses[0], loss)
    torch.testing.assert_close(first, beside)
    assert not second["logits"].requires_grad
    assert not torch.equal(first["logits"], second["logits"])


class WithItsWeight(Net):
    """A model that returns a part of a parameter and a buffer beside its logits, of so many blocks that no call is cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8))

    def forward(self, x: Tensor) -> Any:
        _, logits = super().forward(x)
        return logits, self.last.bias[2:], self.steps


def test_parameters_and_buffers_are_given_as_the_step_began_with_them_and_left_them() -> None:
    torch.manual_seed(0)
    model = WithItsWeight()
    one = autopar.compile(
        model,
        autopar.ClusterSpec.local(1),
        BATCH,
        loss_fn=lambda out, y: (F.cross_entropy(out[0], y), out[1:]),
        optimizer=ADAM,
    )
    bias = model.last.bias[2:].detach().clone()
    result = one.run([BATCH], steps=2)
    torch.testing.assert_close(result.outputs[0], (bias, torch.tensor(1.0)))
    torch.testing.assert_close(result.outputs[1][1], torch.tensor(2.0))
    assert not torch.equal(result.outputs[1][0], bias)


def wide(out: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    return F.cross_entropy(out, y), {"logits": out, "best": out.argmax(1)}


@pytest.mark.parametrize(
    ("plan", "ranks", "microbatches"),
    [
        ("zero3", 2, 4),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("dp", 1, 1), ("zero1", 2, 1), ("1f1b", 2, 4), ("zb-h1", 4, 4))
        ),
    ],
)
def test_the_peak_counts_them_and_the_step_pays_for_them(plan: str, ranks: int, microbatches: int) -> None:
    batch = torch.randn(256, 64), torch.randint(0, 512, (256,))

    def made(loss_fn: Any) -> autopar.ParallelProgram:
        return autopar.compile(
            others.Mlp(64, 128, 512),
            autopar.ClusterSpec.local(ranks),
            batch,
            loss_fn=loss_fn,
            optimizer=ADAM,
            options=replace(PLANS[plan], microbatches=microbatches),
        )

    without, given = made(lambda out, y: wide(out, y)[0]), made(wide)
    assert_kept(given, batch)
    assert max(given.account.peaks) > max(without.account.peaks) + 256 * 512 * 2
    told = sum(stage.bill.rest_s for stage in given.account.stages)
    assert (told > sum(stage.bill.rest_s for stage in without.account.stages)) == (ranks > 1)
    gathers = [c for c in given.account.collectives if c.what.startswith("output ")]
    assert {c.times for c in gathers} == ({microbatches} if plan in ("zero1", "zero3") else set())


LOADED = """import sys, torch
sys.path.insert(0, sys.argv[1])
from autopar_runtime.run.launch import load
program = load(sys.argv[1], backend="gloo")
loss, extras = program(*torch.load(sys.argv[2]))
torch.save((loss, extras), f"{sys.argv[3]}/{torch.distributed.get_rank()}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_saved_programs_give_and_report_them_on_every_rank(tmp_path: Path) -> None:
    """On two processes, of which the second alone has the logits."""
    one = program(2, pp=2, schedule="1f1b", microbatches=4)
    out = one.save(tmp_path / "out")
    torch.save(BATCH, tmp_path / "batch.pt")
    (tmp_path / "loaded.py").write_text(LOADED)
    done = torchrun(2, tmp_path / "loaded.py", out, tmp_path / "batch.pt", tmp_path)
    assert done.returncode == 0, done.stderr
    result = one.run([BATCH], steps=1)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), (result.losses[0], result.outputs[0]))
    (tmp_path / "data.py").write_text(
        f"import torch\ndef batches():\n    yield torch.load({str(tmp_path / 'batch.pt')!r})\n"
    )
    told = tmp_path / "metrics.jsonl"
    done = torchrun(2, out / "run.py", "--steps", 1, "--data", f"{tmp_path / 'data.py'}:batches", "--metrics", told)
    assert done.returncode == 0, done.stderr
    accuracy, right = (result.outputs[0][name] for name in ("accuracy", "counts"))
    assert f"accuracy {accuracy:.6g}  fraction {accuracy:.6g}  counts.0 {right[0]}" in done.stdout
    extras = json.loads(told.read_text())["extras"]
    assert list(extras) == ["accuracy", "fraction", "counts.0", "largest"]
    assert extras["counts.0"] == right[0]


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (
            lambda out, y: (F.cross_entropy(out[1], y), {"n": 3, "x": out[0]}),
            r"loss_fn\(…\)\[1\]\['n'\] is 3: beside the loss",
        ),
        (lambda out, y: (F.cross_entropy(out[1], y), ()), r"returned \(\) beside the loss, which holds no tensor"),
        (
            lambda out, y: (F.cross_entropy(out[1], y), out[0], out[1]),
            r"must return a scalar tensor, or \(scalar, what",
        ),
        (lambda out, y: (out[1], F.cross_entropy(out[1], y)), r"must return a scalar tensor, or \(scalar, what"),
    ],
)
def test_what_no_step_gives_is_refused(loss_fn: Any, said: str) -> None:
    with pytest.raises(autopar.InputError, match=said):
        program(1, loss_fn)


def perplexed(out: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(out[1], y)
    return loss, loss.exp()


def test_what_microbatches_do_not_add_up_to_is_refused_by_name() -> None:
    with pytest.raises(
        autopar.CoupledError, match=r"aten.exp.*If it is for what loss_fn returns beside the loss, leave"
    ):
        program(1, perplexed, microbatches=4)
    assert autopar.verify(program(1, perplexed), net(), BATCH).ok


def centred(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[1] - out[1].std(0), y)


def test_microbatches_that_are_batches_of_their_own_join_what_is_by_sample_alone() -> None:
    options = {"microbatches": 2, "coupled": "per-microbatch"}
    one = program(1, lambda out, y: (centred(out, y), {"logits": out[1]}), **options)
    found = autopar.verify(one, net(), BATCH)
    assert found.ok, found.errors
    assert "output/1/logits" in found.errors
    with pytest.raises(autopar.InputError, match="value 1 of those that loss_fn gives beside the loss has shape"):
        program(1, lambda out, y: (centred(out, y), out[1].mean()), **options)
