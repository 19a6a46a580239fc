"""Adapters of low rank beside frozen weights: equal to eager, and nothing is paid for what is frozen.

By hand, and as PEFT wraps a Llama of transformers where both are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
Made = tuple[nn.Module, Any, Any]


class Adapted(nn.Module):
    """x W^T + x A B, of which W is frozen."""

    def __init__(self, inner: int, outer: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=False).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(inner, rank) / inner**0.5)
        self.b = nn.Parameter(torch.randn(rank, outer))

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.base.weight.dtype)
        return (self.base(low) + low.to(self.a.dtype) @ self.a @ self.b).to(low.dtype)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.up, self.down = Adapted(width, 4 * width), Adapted(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def in_bf16(make: Callable[[], Made]) -> Made:
    """The model with frozen parameters in bf16 and adapters in float32, as PEFT has them."""
    model, batch, loss = make()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model, batch, loss


def by_hand() -> Made:
    model = nn.Sequential(nn.Embedding(32, 16).requires_grad_(False), *(Block(16) for _ in range(4)))
    model.append(nn.Linear(16, 32).requires_grad_(False))
    ids = torch.randint(0, 32, (8, 6))
    return model, (ids, ids), lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_peft() -> Made:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "pad_token_id": 0}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # PEFT starts it at zero, where half of the gradients are zero
                parameter.normal_()
    ids = torch.randint(3, 60, (8, 8))
    return model, {"input_ids": ids, "labels": ids}, None


PLANS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "zero3": {"strategy": "zero3"},
    "tp": {"mesh": {"dp": 2, "tp": 2}},
    "stages": {"pp": 2, "microbatches": 2},
}
MADE = pytest.mark.parametrize("make", [by_hand, by_peft])


def compiled(made: Made, **options: Any) -> autopar.ParallelProgram:
    model, batch, loss = made
    given = {"loss_fn": loss, "optimizer": ADAMW, "options": autopar.Options(**options)}
    return autopar.compile(model, autopar.ClusterSpec.local(4), batch, **given)


def adapters(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.few(1)
@MADE
@pytest.mark.parametrize("plan", PLANS)
def test_adapters_train_as_on_one_device(make: Callable[[], Made], plan: str) -> None:
    made = make()
    program = compiled(made, **PLANS[plan])
    assert autopar.verify(program, made[0], made[1]).max_error <= 1e-9
    if plan == "chosen":
        other = program.with_plan(autopar.random_plan(program, 3, pp=1))
        assert autopar.verify(other, made[0], made[1]).max_error <= 1e-9


@pytest.mark.slow
@MADE
@pytest.mark.parametrize("plan", ["chosen", "zero3"])
def test_adapters_in_float32_beside_weights_in_bf16(make: Callable[[], Made], plan: str) -> None:
    made = in_bf16(make)
    program = compiled(made, **PLANS[plan])
    assert autopar.verify(program, made[0], made[1]).max_error <= 1e-9
    want = {torch.float32 if name in adapters(made[0]) else torch.bfloat16 for name, _ in made[0].named_parameters()}
    assert want == {p.type.dtype for stage in program.stages for p in stage.parameters.values()}


@pytest.mark.few(1)
@MADE
@pytest.mark.parametrize("plan", PLANS)
def test_only_adapters_have_gradients_and_optimizer_state(make: Callable[[], Made], plan: str) -> None:
    made = make()
    program = compiled(made, **PLANS[plan])
    model, wanted = made[0], adapters(made[0])
    frozen = dict(model.named_parameters()).keys() - wanted
    batch = program.leaves(made[1])

    def body(session: Any) -> tuple[set[str], set[str], int, set[str]]:
        session.train_step(list(batch))
        state = {name: session.updater.state_of(name) for name in session.opt_params}
        counted = sum(value.nbytes for one in state.values() for value in one.values() if value.dim())
        saved = {name.removeprefix("optim.") for name in session.state_dict() if name.startswith("optim.")}
        return set(session.grads), {name for name, one in state.items() if one}, counted, saved

    ranks = program.on_ranks(body)
    assert set().union(*(grads for grads, *_ in ranks)) == wanted
    assert set().union(*(state for _, state, *_ in ranks)) == wanted
    for *_, saved in ranks:
        assert {name.rpartition(".")[0] for name in saved} == wanted
    for rank, (_, _, counted, _) in enumerate(ranks):
        stages = program.lowered.graph.groups[program.group_of(rank)]
        assert counted == sum(program.account.stages[stage].memory.resting["optimizer"] for stage in stages)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < max(counted for _, _, counted, _ in ranks) <= 2 * 4 * trained
    for stage, module in zip(program.stages, program.in_process.stages, strict=True):
        own = frozen & stage.parameters.keys()
        assert not any(stage.parameters[name].contributions for name in own)
        assert not {name for name, row in module.GRADS.items() if row["contributions"]} & own


@MADE
def test_frozen_weights_stay_as_they_are_to_the_last_bit(make: Callable[[], Made]) -> None:
    made = make()
    program = compiled(made, strategy="zero3")
    before = {name: value.clone() for name, value in made[0].named_parameters()}
    after = program.run([made[1]], steps=3).state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == adapters(made[0])
