"""The mixtures of experts of Hugging Face's transformers, known by the names of their classes: nothing is imported from it.

Nearly all of them are one computation, written as a loop over the experts that the batch chose or as products of sorted rows:

    y[t] = sum over j of weights[t, j] · expert[chosen[t, j]](x[t])

Where the activation has a name (`expert_gates.py`) this is the op `experts`, which can send rows to experts on other
ranks. In all others rows stay in their places, so that tokens shard and microbatches are possible.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.known.equal_forwards import Integers
from autopar.capture.known.expert_gates import gate_of
from autopar.capture.known.known_blocks import below, forward_class, know
from autopar.ops.experts import experts
from autopar.ops.grouped import grouped_mm, stacked
from autopar.runtime.data.origin import module_of, name_of, package_of

Expert = Callable[[Tensor, Tensor], Tensor]
"""(rows (…, k), which expert each takes) → (…, n)."""


def without_cache(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The named arguments of a step that computes a loss, without the cache that the library's models fill by default for
    generation, and that nothing of a loss reads. With windows of attention the cache stays: without it the library also looks for
    packed sequences, which makes masks that are no longer known by position."""
    computes_loss = package_of(type(model)) == "transformers" and named.get("labels") is not None
    config = getattr(model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = bool(kinds) or getattr(config, "sliding_window", None) is not None
    if not computes_loss or windows or {"use_cache", "past_key_values"} & named.keys():
        return named
    takes = "use_cache" in inspect.signature(type(model).forward).parameters
    return {**named, "use_cache": False} if takes else named


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    """x: (tokens, d), chosen and weights: (tokens, choices) -> (tokens, d)."""
    rows = x.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    return (expert(rows, chosen) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def linear(rows: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor:
    """weight: (experts, n, k), or (experts, k, n) if it is transposed."""
    y = grouped_mm(rows, weight if transposed else weight.transpose(1, 2), chosen)
    return y if bias is None else y + F.embedding(chosen, bias)


def any_expert(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of experts, no number twice along the last dim."""
    return below(getattr(module, "total_experts", 0) or module.num_experts)(module, shape, generator)


# --- classes under `use_experts_implementation`


def is_decorated(module: nn.Module) -> bool:
    """Whether its class has weights of all experts as 3-dimensional parameters, as that decorator asks for."""
    facts = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "_apply_gate")
    return (
        module_of(type(module)).startswith("transformers.models.")
        and all(hasattr(module, fact) for fact in facts)
        and not getattr(module, "_is_expert_parallel", False)
    )


def decorated(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: (tokens, d)."""

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        first = self.gate_up_proj if self.has_gate else self.up_proj
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
        h = linear(rows, chosen, first, biases[0], self.is_transposed)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y = linear(h, chosen, self.down_proj, biases[1], self.is_transposed)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    return mixture(hidden_states, top_k_index, top_k_weights, expert)


def is_named(module: nn.Module) -> bool:
    """Whether it is decorated, with an activation that has a name, and nothing after the second layer."""
    return is_decorated(module) and not getattr(module, "has_post_expert_norm", True) and gate_of(module) is not None


def named(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: (tokens, d)."""
    found = gate_of(self)
    assert found is not None
    gate, interleaved = found
    first, second = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if not self.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        biases = (halves(bias, self.has_gate, interleaved), self.down_proj_bias)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        halves(first, self.has_gate, interleaved),
        second,
        *biases,
        act=gate.act,
        alpha=gate.alpha,
        limit=gate.limit,
        shift=gate.shift,
    )


def halves(t: Tensor, gated: bool, interleaved: bool) -> Tensor:
    """(…, n) -> (…, 2, f) of gate and up, or (…, 1, n)."""
    if not gated:
        return t.unsqueeze(-2)
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else t.unflatten(-1, (2, -1))


know(is_decorated, decorated, any_expert)
know(is_named, named, any_expert)


# --- classes with a loop of their own


def known(
    name: str,
    integers: Integers = any_expert,
    passed_on: Sequence[str] = (),
    steps: Callable[[nn.Module], int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a forward for the class `transformers.models.NAME`."""

    def matches(module: nn.Module) -> bool:
        return name_of(forward_class(module)) == f"transformers.models.{name}"

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        know(matches, forward, integers, passed_on, steps)
        return forward

    return add


@known("step3p7.modeling_step3p7.Step3p7Experts")
def step(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: (tokens, d)."""

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        return linear(self._apply_gate(linear(rows, chosen, self.gate_up_proj, None)), chosen, self.down_proj, None)

    return mixture(hidden_states, top_k_index, top_k_weights, expert)


@known("dbrx.modeling_dbrx.DbrxExperts")
def dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: (batch, sequence, d); the matrices of all experts lie under each other."""
    w1, v1, w2 = (
        w.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
        for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    )

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        h = self.mlp.activation_fn(linear(rows, chosen, w1, None)) * linear(rows, chosen, v1, None)
        return grouped_mm(h, w2, chosen)

    x = hidden_states.reshape(-1, self.hidden_size)
    return mixture(x, top_k_index, top_k_weights, expert).view(hidden_states.shape[0], -1, self.hidden_size)


def all_of_them(experts: Sequence[nn.Module], *names: str) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of layers that every expert has, stacked: expert by expert, of each the layers in order."""
    layers: list[Any] = [expert.get_submodule(name) for expert in experts for name in names]
    biases = None if getattr(layers[0], "bias", None) is None else stacked([one.bias for one in layers])
    return stacked([one.weight for one in layers]), biases


def two_layers(module: Any, first: str, second: str) -> Expert:
    """Experts that are modules, `module["expert_0"]` and so on: a Linear, an activation, dropout and a Linear."""
    experts = [module[f"expert_{i}"] for i in range(module.num_experts)]

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        h = experts[0].dropout(experts[0].act(linear(rows, chosen, *all_of_them(experts, first))))
        return linear(h, chosen, *all_of_them(experts, second))

    return expert


def one_or_none(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One-hot in the last dim; where an expert is full a token has none."""
    chosen = torch.randint(0, module.num_experts + 1, shape[:-1], generator=generator)
    return F.one_hot(chosen, module.num_experts + 1)[..., :-1]


@known("switch_transformers.modeling_switch_transformers.SwitchTransformersExperts", one_or_none)
def switch(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """selected_experts: (tokens, 1, experts), one-hot or zero."""
    chosen = selected_experts.argmax(-1).masked_fill(selected_experts.sum(-1) == 0, self.num_experts)
    return mixture(hidden_states, chosen, routing_weights, two_layers(self, "wi", "wo"))


def any_numbers(module: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of experts, as often as they come."""
    return torch.randint(0, module.num_experts, shape, generator=generator)


@known("nllb_moe.modeling_nllb_moe.NllbMoeExperts", any_numbers)
def nllb(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """router_mask: (tokens, choices), the number of an expert."""
    kept = self.token_dropout if self.training else lambda y: y * (1 - self.moe_token_dropout)
    expert = two_layers(self, "fc1", "fc2")
    weights = router_probs.unsqueeze(-1)
    rows = hidden_states.unsqueeze(1).expand(-1, router_mask.shape[1], -1)
    return kept(expert(rows, router_mask) * weights).sum(1).to(hidden_states.dtype)


@known("longcat_flash.modeling_longcat_flash.LongcatFlashExperts")
def longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts after the routed ones give their row back."""
    routed = self.num_routed_experts

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        if not routed:
            return rows
        gate, up = linear(rows, chosen, self.gate_up_proj[:routed], None).chunk(2, -1)
        y = linear(self.act_fn(gate) * up, chosen, self.down_proj, None)
        return y + rows.masked_fill((chosen < routed).unsqueeze(-1), 0)

    return mixture(hidden_states, top_k_index, top_k_weights, expert)


# --- JetMoE, whose router sorts rows by expert and says in a list how many each expert has


@contextmanager
def instead(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Within the context the module has these methods."""
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


def routed(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x: (tokens, d) -> which experts each token takes, and their weights: (tokens, choices) both; the logits of all. Calls
    the router, whose hooks collect them for its loss."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor]:
        logits = router.layer(x).float()
        top, chosen = logits.topk(router.top_k, dim=1)
        return chosen, torch.softmax(top, dim=1).type_as(x), None, None, logits

    with instead(router, forward=forward):
        chosen, weights, _, _, logits = router(x)
    return chosen, weights, logits


@known("jetmoe.modeling_jetmoe.JetMoeMoE")
def jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    """layer_input: (batch, sequence, d)."""

    def expert(rows: Tensor, chosen: Tensor) -> Tensor:
        gate, up = linear(rows, chosen, self.input_linear.weight, None).chunk(2, -1)
        return linear(self.activation(gate) * up, chosen, self.output_linear.weight, None)

    x = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, weights, _ = routed(self.router, x)
    return mixture(x, chosen, weights, expert).view(layer_input.shape) + self.bias


@known("jetmoe.modeling_jetmoe.JetMoeAttention", below(2), passed_on=["past_key_values"])
def jetmoe_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, between queries and outputs of experts whose rows stay in their places."""
    experts = self.experts

    def queries(layer_input: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        x = layer_input.reshape(-1, layer_input.shape[-1])
        chosen, weights, logits = routed(experts.router, x)
        rows = x.unsqueeze(1).expand(-1, chosen.shape[1], -1)
        q = linear(rows, chosen, experts.input_linear.weight, None)
        return q.view(*layer_input.shape[:2], *q.shape[1:]), logits, (chosen, weights)

    def outputs(layer_input: Tensor, topology: tuple[Tensor, Tensor]) -> Tensor:
        chosen, weights = topology
        y = linear(layer_input.reshape(*chosen.shape, -1), chosen, experts.output_linear.weight, None)
        return (y * weights.unsqueeze(-1)).sum(1).view(*layer_input.shape[:2], -1) + experts.bias

    own: Any = forward_class(self)
    with instead(experts, map=queries, reduce=outputs):
        return own.forward(self, *args, **kwargs)
