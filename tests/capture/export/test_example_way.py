"""Branches go the example's way wherever they stand, on any plan; a model without branches is never run on its example."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture_program
from autopar.capture.export import export
from tests.capture.equal import SGD, Net

CPUS = autopar.ClusterSpec.local(4)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.last(torch.relu(net.first(x)))


def finite(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if not torch.isfinite(h).all():  # finite
        h = h.clamp(-10, 10)
    return net.last(torch.relu(h))


def small(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h if h.norm() < 1e3 else h / h.norm())  # small


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def one(batch: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(seed))


def with_bad_row(row: int, value: float = float("inf"), batch: int = 8) -> Tensor:
    x = one(batch)
    x[row, 3] = value
    return x


def trained(model: nn.Module, loss_fn: Any = squares, **given: Any) -> autopar.Program:
    options = autopar.Options(**{"branches": "guard", **given.pop("options", {})})
    return autopar.compile(model, CPUS, (one(),), loss_fn=loss_fn, optimizer=SGD, options=options, **given)


def stops(program: autopar.Program, batch: Any, line: str) -> None:
    """See that the batch stops the program at a line."""
    with pytest.raises(autopar.GuardError, match=line):
        program.run([batch])


def test_a_model_without_branches_is_not_run_on_its_example() -> None:
    with mock.patch.object(export, "decisions_of", side_effect=AssertionError) as run:
        assert not capture_program(Net(plain), (one(),)).exported.followed
        with pytest.raises(AssertionError):
            capture_program(Net(small), (one(),))
    assert run.call_count == 1


@pytest.mark.slow
def test_the_lines_that_are_followed_are_in_the_report() -> None:
    assert "checks that every batch does" in trained(Net(small)).report()


PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 4}, "strategy": "dp"},
    "tp": {"mesh": {"tp": 4}, "strategy": "megatron"},
    "accumulated": {"mesh": {"dp": 4}, "microbatches": 2},
    "pipeline": {"pp": 2, "microbatches": 2},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_row_that_goes_another_way_stops_every_plan_wherever_it_lies(plan: str) -> None:
    model = Net(finite)
    program = trained(model, options=PLANS[plan])
    assert autopar.verify(program, model, (one(seed=1),)).ok
    for row in (0, 7):
        stops(program, (with_bad_row(row),), "# finite")


def test_a_condition_of_all_rows_together_is_that_of_the_whole_batch() -> None:
    model = Net(small)
    with pytest.raises(autopar.CoupledError, match="needs a sum over all samples"):
        trained(model, options={"microbatches": 2})
    program = trained(model, options={"mesh": {"dp": 4}})
    norm = float(model.first(one()).norm())
    assert autopar.verify(program, model, (one() * 500 / norm,), steps=1).ok
    stops(program, (one() * 1400 / norm,), "# small")  # every rank's rows alone have less


def counted(out: Tensor) -> Tensor:
    return squares(out) if out.abs().mean().item() < 1e6 else out.mean()  # counted


def test_losses_hooks_wrappers_entries_and_buckets_are_followed_alike() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net(plain)
            self.inner.last.register_forward_hook(self.looked_at)

        @staticmethod
        def looked_at(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out if (out < 1e7).all() else out * 0  # hook

        def forward(self, x: Tensor) -> Tensor:
            assert x.max() < 1e3, f"too large: {x.shape}"  # wrapper
            return self.inner(x)

    model = Wrapper()
    with torch.no_grad():
        model.inner.last.bias.fill_(1.0)
    entries = {"evaluate": autopar.Entry(loss_fn=counted)}
    program = trained(model, counted, entries=entries, buckets={"0": {0: (8, 4)}}, options={"pp": 1})
    for batch in (8, 4):
        assert autopar.verify(program, model, (one(batch, 1),)).ok
    stops(program, (with_bad_row(5, 2e3),), "# wrapper")
    stops(program, (with_bad_row(2, 2e3, 4),), "# wrapper")
    stops(program, (-1e10 * one().abs(),), "# hook|# counted")
    stops(program.entries["evaluate"], (-1e10 * one().abs(),), "# hook|# counted")


@pytest.mark.slow
def test_microbatches_that_are_batches_of_their_own_each_go_the_way_of_the_first() -> None:
    model = Net(small)
    program = trained(model, options={"microbatches": 2, "coupled": "per-microbatch", "mesh": {"dp": 4}})
    norm = float(model.first(one()).norm())
    bad = one()
    bad[4:] *= 3000 / norm
    stops(program, (bad,), "# small")


@pytest.mark.slow
def test_a_check_of_a_small_batch_goes_its_own_way() -> None:
    program = trained(Net(finite), options={"mesh": {"dp": 4}})
    assert autopar.check(program).ok


def test_without_values_the_refusal_says_so() -> None:
    with pytest.raises(autopar.InputError, match=r"# small.*holds no values"):
        autopar.compile(Net(small).to("meta"), CPUS, (one(),))
