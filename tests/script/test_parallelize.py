"""A training script of two processes: what its loop computes, keeps and is told."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

import autopar
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.loaded import LoadedProgram
from tests.script import loop_worker
from tests.script.loop_worker import batch, loss, model, optimizer
from tests.warm import torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patched:
        own = tmp_path_factory.mktemp("script")
        patched.setenv("AUTOPAR_CACHE", str(own / "cache"))
        yield own


def run(ranks: int, what: str, folder: Path, status: int = 0) -> list[Any]:
    """The results of every rank of a launch."""
    done = torchrun(ranks, Path(loop_worker.__file__), what, folder, timeout=300)
    assert done.returncode == status, done.stderr[-4000:]
    return [torch.load(folder / f"{what}.{rank}.pt", weights_only=False) for rank in range(ranks)]


def eager() -> tuple[list[float], dict[str, Any], Any]:
    """The same loop on one device."""
    own = model()
    steps, losses, lr = optimizer(own.parameters()), [], 0.0
    state: dict[str, Any] = {}
    for n in range(8):
        if n == 7:
            state = {name: value.clone() for name, value in own.state_dict().items()}
        ids, targets = batch(n)
        lr = steps.param_groups[0]["lr"] = 1e-2 / (n + 1) if n < 4 else lr
        value = loss(own(ids), targets)
        value.backward()
        losses.append(value.item())
        if n not in (4, 5):
            steps.step()
            steps.zero_grad()
    return losses, state, lr


def check(told: list[Any], steps: int = 8) -> None:
    """See that every rank's loop computed what one device does."""
    losses, state, _ = eager()
    other = model(seed=1)
    for told_losses, full, taken, _, measured, again, logits in told:
        torch.testing.assert_close(told_losses, losses, rtol=1e-9, atol=1e-12)
        assert (taken, list(full)) == (steps, list(state))
        for name, value in state.items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)
        other.load_state_dict(full)
        assert other.head.weight is other.tokens.weight
        ids, targets = batch(9)
        torch.testing.assert_close(logits, other(ids), rtol=1e-9, atol=1e-12)
        assert measured == again == pytest.approx(loss(other(ids), targets).item(), rel=1e-9)


def test_a_loop_on_two_ranks_computes_what_one_device_does(tmp_path: Path) -> None:
    """Ranks are threads, and the program is one of `compile`."""
    cluster, entries = autopar.ClusterSpec.local(2), {"evaluate": autopar.Entry()}
    program = autopar.compile(model(), cluster, batch(), loss_fn=loss, optimizer=optimizer, entries=entries)
    manifest = Manifest.read(program.save(tmp_path / "out"))
    check(
        program.on_ranks(lambda one: loop_worker.trained(autopar.Step(LoadedProgram(manifest, one), model(), tmp_path)))
    )


@pytest.mark.slow
def test_a_script_of_two_processes_computes_what_one_device_does(folder: Path) -> None:
    told = run(2, "loop", folder)
    check(told)
    assert {Path(directory).parent for _, _, _, directory, *_ in told} == {folder / "cache"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks_goes_on_from_a_checkpoint(ranks: int, folder: Path) -> None:
    if not (folder / "saved").exists():
        run(2, "loop", folder)
    kept = {path.name for path in (folder / "cache").iterdir()}
    losses, _, lr = eager()
    for told, rate, steps in run(ranks, "resumed", folder):
        assert told == pytest.approx(losses[-1], rel=1e-9)
        assert (rate, steps) == (lr, 8)
    added = {path.name for path in (folder / "cache").iterdir()} - kept
    assert len(added) == (0 if ranks == 2 else 1)


@pytest.mark.slow
def test_ranks_that_do_not_do_the_same_are_told_so_by_name(folder: Path) -> None:
    """The script ends badly, as what rank 1 trained last is not what rank 0 did."""
    results = run(2, "misuse", folder, status=1)
    assert "compiles at every start: model.mix.lock is a _thread.lock" in results[0][0]["warned"]
    assert "there is no optimizer, so that no step trains anything" in results[0][0]["warned"]
    for rank, (told, state) in enumerate(results):
        assert told["once"].startswith("once-")
        assert told["cluster"].startswith("InputError: cluster local-3 has 3 devices, and this script runs on 2 ranks")
        compiles = "" if rank == 0 else "rank 0 could not compile: "
        assert told["graph"].startswith(f"DataError: {compiles}the model cannot be captured at ")
        assert "ranks ask autopar.parallelize for different programs: rank 1" in told["closure"]
        assert "has another loss_fn" in told["closure"]
        assert told["shape"].startswith("GuardError: ")
        assert "stepped the scheduler" in told["scheduler"]
        assert told["lr"].startswith("RankError: ")
        assert "learning rate" in told["lr"]
        torch.testing.assert_close(state["mix.weight"], model(seed=0).mix.weight.detach(), rtol=0, atol=0)


@pytest.mark.slow
def test_every_machine_makes_its_own_files_of_one_plan(folder: Path) -> None:
    for _ in range(2):
        (told, *first), (heard, *other) = run(2, "machines", folder)
        assert told.startswith("DataError: the model cannot be captured at ")
        assert heard.startswith("DataError: rank 0 could not compile: the model cannot be captured at ")
        assert [Path(one[1]).parent.name for one in (first, other)] == ["cache0", "cache1"]
        assert (first[0], first[2:]) == (other[0], other[2:])
        assert len(list((folder / "cache1").iterdir())) == 1


def test_it_takes_what_compile_takes() -> None:
    taken, all_of = (inspect.signature(one).parameters for one in (autopar.parallelize, autopar.compile))
    assert [(name, taken[name].default) for name in all_of] == [(name, one.default) for name, one in all_of.items()]


def mean(out: torch.Tensor) -> torch.Tensor:
    return out.mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def chained(of: torch.optim.Optimizer) -> lr.ChainedScheduler:
    """A scheduler that has no count of steps of its own."""
    return lr.ChainedScheduler([lr.ConstantLR(of, 0.5, 2), lr.ExponentialLR(of, 0.5)])


def with_step(body: Any, own: torch.nn.Module, x: torch.Tensor, folder: Path, **others: Any) -> Any:
    """The result of a script's loop on one rank."""
    one_rank = autopar.ClusterSpec.local(1)
    program = autopar.compile(own, one_rank, (x,), loss_fn=mean, optimizer=sgd, **others)
    manifest = Manifest.read(program.save(folder / "out"))
    return program.on_ranks(lambda one: body(autopar.Step(LoadedProgram(manifest, one), own, folder)))[0]


def test_a_script_that_steps_a_scheduler_made_of_others_is_told_so(tmp_path: Path) -> None:
    own = torch.nn.Linear(4, 1).double()
    x = torch.ones(2, 4, dtype=torch.float64)

    def trained(step: autopar.Step) -> list[float]:
        rates = [step.optimizer.param_groups[0]["lr"] for _ in range(3) if step(x) is not None]
        step.scheduler.step()
        with pytest.raises(RuntimeProgramError, match="stepped the scheduler"):
            step(x)
        return rates

    assert with_step(trained, own, x, tmp_path, scheduler=chained) == [0.25, 0.25, 0.125]


def test_a_script_that_would_train_other_parameters_than_the_program_does_is_told_so(tmp_path: Path) -> None:
    own = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1).requires_grad_(False)).double()
    x = torch.ones(2, 4, dtype=torch.float64)

    def trained(step: autopar.Step) -> None:
        step(x)
        for layer, to, words in ((own[1], True, "1.weight was unfrozen"), (own[0], False, "0.weight was frozen")):
            layer.requires_grad_(to)
            with pytest.raises(RuntimeProgramError, match=f"{words} after parallelize; which parameters"):
                step(x)
            layer.requires_grad_(not to)
        step(x)
        step.optimizer.add_param_group({"params": own[1].parameters()})
        with pytest.raises(RuntimeProgramError, match="groups have other parameters"):
            step(x)

    with_step(trained, own, x, tmp_path)
