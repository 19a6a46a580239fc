"""Modules that are experts of one kind, as one mixture: each row through the one that it chose.

Two or three Linears around an activation that has a name are `autopar.experts`. Which they are is taken from numbers, not from
names. Any other expert is its first one's forward, in which each Linear is a grouped product with the weights of all.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.known.expert_gates import TOLERANCE, gates_without_limits
from autopar.capture.known.known_transformers import all_of_them, instead, linear
from autopar.ops.experts import experts as one_mixture
from autopar.runtime.kernels.gates import Gate

_ROWS = 64


@dataclass(frozen=True)
class Form:
    """The layers of an expert, by name: `first` one, or gate and up (of one Linear where `halves` says in which order its
    outputs hold them), then `gate`, then `second`."""

    first: tuple[str, ...]
    second: str
    gate: Gate
    halves: str = ""


def like_ones(module: nn.Module) -> list[nn.Module]:
    """The experts of a module: the modules of the container below it that hold the same parameters each; none where no
    container, or more than one, has such."""
    found = [
        list(part.children())
        for part in module.modules()
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) and _alike(list(part.children()))
    ]
    return found[0] if len(found) == 1 else []


def _alike(parts: Sequence[nn.Module]) -> bool:
    def facts(part: nn.Module) -> Any:
        plain = {k: v for one in part.modules() for k, v in vars(one).items() if isinstance(v, (bool, int, float, str))}
        kinds = [(name, type(one)) for name, one in part.named_modules()]
        return kinds, [(name, p.shape, p.dtype, p.requires_grad) for name, p in part.named_parameters()], plain

    different = len({id(p) for part in parts for p in part.parameters()})
    own = sum(len(list(part.parameters())) for part in parts)
    return len(parts) > 1 and 0 < own == different and all(facts(part) == facts(parts[0]) for part in parts[1:])


def form_of(expert: nn.Module) -> Form | None:
    """Its layers and the activation between them, if that has a name; expert: with numbers, in float64."""
    layers = OrderedDict((name, part) for name, part in expert.named_modules() if type(part) is nn.Linear)
    weights = sum(len(list(layer.parameters())) for layer in layers.values())
    drops = any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in expert.modules())
    if drops or weights != len(list(expert.parameters())) or len(layers) not in (2, 3):
        return None
    width = next(iter(layers.values())).in_features
    x = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    with torch.no_grad():
        wanted = expert(x)
        for *first, second in itertools.permutations(layers):
            ones, last = [layers[name] for name in first], layers[second]
            f = last.in_features
            sizes = [(one.in_features, one.out_features) for one in ones]
            biases = {one.bias is None for one in ones}
            if last.out_features != width or len(biases) > 1 or wanted.shape != x.shape:
                continue
            if sizes in ([(width, f)], [(width, 2 * f)], [(width, f)] * 2):
                ways = ("low", "high", "even", "odd") if sizes == [(width, 2 * f)] else ("",)
                for way in ways:
                    h = torch.stack([one(x) for one in ones], 1) if way == "" else _halves(ones[0](x), way, -1, -2)
                    h = h.squeeze(1) if len(ones) == 1 and way == "" else h
                    for gate in gates_without_limits():
                        y = last(gate.value(h))
                        if bool(((y - wanted).abs() <= TOLERANCE * wanted.abs().max()).all()):
                            return Form(tuple(first), second, gate, way)
    return None


def _halves(t: Tensor, way: str, dim: int, to: int) -> Tensor:
    """The outputs along a dim as gate and up, which the new dim `to` holds. way: gate is in the low or high half, or is
    the even or odd ones."""
    pairs = t.unflatten(dim, (2, -1) if way in ("low", "high") else (-1, 2))
    pairs = pairs.movedim(dim - 1 if way in ("low", "high") else dim, to)
    return pairs if way in ("low", "even") else pairs.flip(to)


def can_be_grouped(expert: nn.Module) -> bool:
    """Whether all parameters of an expert are those of Linears, or of LayerNorms and RMSNorms."""
    held = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
    return all(type(part) in held or not list(part.parameters(recurse=False)) for part in expert.modules())


def mixture_of(experts: Sequence[nn.Module], form: Form | None, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x: (…, d); chosen, weights: (…, choices) -> (…, d), the weighted sum of the experts that each row takes."""
    if form is None:
        return _grouped(experts, x, chosen, weights)
    w, b = all_of_them(experts, *form.first)
    w_out, b_out = all_of_them(experts, form.second)
    if form.halves:
        w_in = _halves(w.transpose(1, 2), form.halves, -1, -2)
        b_in = None if b is None else _halves(b, form.halves, -1, -2)
    else:
        each = (len(experts), len(form.first))
        w_in, b_in = w.unflatten(0, each).permute(0, 3, 1, 2), None if b is None else b.unflatten(0, each)
    gate = form.gate
    return one_mixture(
        x, chosen, weights, w_in, w_out.transpose(1, 2), b_in, b_out, act=gate.act, alpha=gate.alpha, shift=gate.shift
    )


def _grouped(experts: Sequence[nn.Module], x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = x.unsqueeze(-2).expand(*x.shape[:-1], chosen.shape[-1], x.shape[-1])
    none = (chosen < 0) | (chosen >= len(experts))
    with _each_its_own(experts, chosen.masked_fill(none, 0)):
        y = experts[0](rows)
    return (y * weights.masked_fill(none, 0).unsqueeze(-1)).sum(-2).to(y.dtype)


@contextmanager
def _each_its_own(experts: Sequence[nn.Module], chosen: Tensor) -> Iterator[None]:
    """Within the context the layers of the first expert give each row what those of its own expert would."""

    def forward(name: str, layer: Any) -> Any:
        if type(layer) is nn.Linear:
            return lambda x: linear(x, chosen, *all_of_them(experts, name))

        def normalized(x: Tensor) -> Tensor:
            shape, eps = layer.normalized_shape, layer.eps
            y = F.layer_norm(x, shape, eps=eps) if type(layer) is nn.LayerNorm else F.rms_norm(x, shape, eps=eps)
            weight, bias = (None, None) if layer.weight is None else all_of_them(experts, name)
            y = y if weight is None else y * F.embedding(chosen, weight)
            return y if bias is None else y + F.embedding(chosen, bias)

        return normalized

    with ExitStack() as stack:
        for name, layer in experts[0].named_modules():
            if list(layer.parameters(recurse=False)):
                stack.enter_context(instead(layer, forward=forward(name, layer)))
        yield
