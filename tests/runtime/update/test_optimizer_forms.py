"""Which form an optimizer's step takes: torch's fused kernel on GPUs, and whatever the user said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autopar.ir.setting import OptimizerState
from autopar.runtime.comm.devices import CPU, Device
from autopar.runtime.update.optimizer_forms import choose_forms, is_fusible
from autopar.runtime.update.update_state import groups_text, read_groups, restore_groups

CUDA = torch.device("cuda")
H100 = Device("cuda", (9, 0))


def made(kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3))], lr=0.1, **options)


@pytest.mark.parametrize("kind", [Adam, AdamW, functools.partial(SGD, momentum=0.9)])
def test_an_optimizer_with_a_fused_kernel_takes_it_on_a_gpu(kind: Callable[..., Optimizer]) -> None:
    for device, form in ((CUDA, True), (torch.device("cpu"), None)):
        optimizer = made(kind)
        choose_forms([optimizer], device)
        assert optimizer.param_groups[0]["fused"] is form


@pytest.mark.parametrize("said", [{"foreach": True}, {"fused": False}, {"capturable": True}, {"differentiable": True}])
def test_what_the_user_said_stays(said: dict[str, bool]) -> None:
    optimizer = made(AdamW, **said)
    before = dict(optimizer.param_groups[0])
    choose_forms([optimizer], CUDA)
    assert optimizer.param_groups[0] == before
    assert not is_fusible(optimizer)


def test_an_optimizer_without_one_keeps_its_form() -> None:
    optimizer = made(Adagrad)
    choose_forms([optimizer], CUDA)
    assert not optimizer.param_groups[0]["fused"]


def test_a_checkpoint_does_not_carry_the_form() -> None:
    on_gpu, here = made(AdamW, weight_decay=0.3), made(AdamW)
    choose_forms([on_gpu], CUDA)
    restore_groups(here, read_groups(groups_text([on_gpu]), [here])[0])
    assert here.param_groups[0]["weight_decay"] == 0.3
    assert here.param_groups[0]["fused"] is None
    restore_groups(on_gpu, read_groups(groups_text([here]), [on_gpu])[0])
    assert on_gpu.param_groups[0]["fused"] is True


def test_a_fused_update_needs_no_scratch_and_another_one_that_of_all_parameters() -> None:
    fused, other = OptimizerState(scratch=(2.0, 1.0, 0.0), is_fused=True), OptimizerState(scratch=(2.0, 1.0, 0.0))
    shards = [10.0, 4.0, 7.0]
    assert fused.scratch_bytes(shards, H100) == 0
    assert other.scratch_bytes(shards, H100) == 42
    assert fused.scratch_bytes(shards, CPU) == fused.scratch_bytes(shards) == other.scratch_bytes(shards) == 20
