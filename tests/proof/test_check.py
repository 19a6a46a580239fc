"""`autopar.check`: a small batch under the same plan tells right from wrong, in one line and within its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.proof.check import shrunken
from tests.capture.equal import SGD


@pytest.fixture(scope="module")
def program() -> autopar.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = (torch.randn(64, 8), torch.randint(0, 4, (64,)))
    return autopar.compile(
        model,
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=nn.functional.cross_entropy,
        optimizer=SGD,
        options=autopar.Options(mesh={"dp": 2}, strategy="zero3", microbatches=2),
    )


def test_the_plan_stays_and_the_batch_shrinks_to_what_it_divides(program: autopar.Program) -> None:
    small = shrunken(program)
    assert [tuple(leaf.shape) for leaf in small.request.inputs] == [(4, 8), (4,)]
    assert replace(small.plan, program="", predicted={}) == replace(program.plan, program="", predicted={})


def test_a_right_program_is_equal(program: autopar.Program) -> None:
    result = autopar.check(program)
    assert result.ok
    assert result.batch == 4
    assert result.tensors == len(autopar.verify(program, program.model, program.request.inputs).errors)
    assert str(result).startswith("check: equal to one device in float64 on a batch of 4 (of 64): ")
    assert "\n" not in str(result)


def test_a_wrong_program_is_not(program: autopar.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.proof import ranks

    sources = ranks.stage_sources
    monkeypatch.setattr(
        ranks,
        "stage_sources",
        lambda *args: [source.replace("rt.loss_scale, ", "1.5 * rt.loss_scale, ") for source in sources(*args)],
    )
    result = autopar.check(program)
    assert result.outcome == "not equal"
    assert result.error > 0.01
    assert not result.ok


def test_a_check_that_would_take_too_long_is_left_out_and_says_so(program: autopar.Program) -> None:
    result = autopar.check(program, time_limit_s=1e-9)
    assert result.outcome == "too long"
    assert not result.ok
    assert "time_limit_s" in str(result)


def test_a_batch_that_the_plan_cannot_divide_further_stays_whole() -> None:
    batch = (torch.randn(2, 8),)
    program = autopar.compile(nn.Linear(8, 4), autopar.ClusterSpec.local(2), batch)
    assert shrunken(program) is program
    assert autopar.check(program).ok


def test_a_model_without_values_is_refused_by_name() -> None:
    model = nn.Linear(8, 4, device="meta")
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (torch.randn(4, 8),))
    with pytest.raises(autopar.InputError, match="weight holds none"):
        autopar.check(program)
