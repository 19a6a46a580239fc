"""An emitted directory trains by the same rule as `program.run`: optimizer, scheduler, clipping, loss scaling."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.update.update_rule import UpdateRule
from tests import optimizer_groups
from tests.optimizer.test_optimizers import with_update
from tests.proof.test_processes import batch, compiled, in_torchrun, same, saved

COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
LAMBDA = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=math.sqrt)
ADAM = functools.partial(torch.optim.Adam, lr=0.02)
RULE = UpdateRule(ADAM, COSINE, autopar.ClipNorm(0.3), None, autopar.LossScaling(64.0, interval=2), compensated=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "rule",
    [
        RULE,
        UpdateRule(ADAM, clip_norm=autopar.ClipNorm(0.5, math.inf)),
        UpdateRule(ADAM, clip_value=0.1),
        UpdateRule(functools.partial(optimizer_groups.decayed, lr=0.01)),
    ],
)
def test_the_manifest_holds_the_rule(rule: UpdateRule, tmp_path: Path) -> None:
    program = with_update(compiled(1), rule)
    program.save(tmp_path)
    read = Manifest.read(tmp_path).update_rule()
    assert replace(read, optimizer=None, scheduler=None) == replace(rule, optimizer=None, scheduler=None)
    for got, want in ((read.optimizer, rule.optimizer), (read.scheduler, rule.scheduler)):
        assert (got is None) == (want is None)
        assert got is None or (got.func, got.keywords) == (want.func, want.keywords)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (UpdateRule(lambda named_parameters: ADAM(named_parameters)), "the optimizer factory .*cannot be written"),
        (replace(RULE, scheduler=lambda optimizer: COSINE(optimizer)), "the scheduler factory .*cannot be written"),
        (replace(RULE, scheduler=LAMBDA), "an argument of the scheduler"),
    ],
)
def test_what_has_no_name_to_import_is_refused(rule: UpdateRule, words: str, tmp_path: Path) -> None:
    with pytest.raises(autopar.EmitError, match=words):
        with_update(compiled(1), rule).save(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"strategy": "zero3", "mesh": {"dp": 2}, "microbatches": 4}, {"pp": 2, "microbatches": 4}]
)
def test_processes_follow_the_rule_as_threads_do(options: dict[str, object], tmp_path: Path) -> None:
    program = with_update(compiled(2, **options), RULE)
    want = program.run([batch(step) for step in range(4)])
    held = program.on_ranks(lambda s: [s.train_step(list(batch(step))) for step in range(4)] and s.state_dict())[0]
    seen: set[str] = set()
    for got in in_torchrun("curve", 2, saved(program, tmp_path / "program", 4), tmp_path):
        assert got["losses"] == pytest.approx([t.item() for t in want], rel=1e-12)
        mine = {name: value for name, value in want.state_dict().items() if name in got["weights"]}
        same(got["weights"], mine)
        seen |= mine.keys()
        for name in ("optim_groups", "optim_schedulers", "optim_scaling"):
            assert got["weights"][name] == held[name], name
    assert seen == want.state_dict().keys()
