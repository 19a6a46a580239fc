"""Mixtures of experts as people write them: a loop over experts in the forward of a module of their own, in many forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HIDDEN, EXPERTS = 8, 16, 4


class Mlp(nn.Module):
    """Two layers with biases and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class SwiGlu(nn.Module):
    """Gate, up and down, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, HIDDEN, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Fused(nn.Module):
    """Gate and up in one layer, of which the second half is the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 2 * HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Normed(nn.Module):
    """A norm, and an activation without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Mixture(nn.Module):
    """A router and a list of experts. chosen experts: `choices` of a token."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp, choices: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.top_k = choices


class WhereIndex(Mixture):
    """`torch.where(index == e)` and `index_add_`."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.size(-1))
        weights, index = self.gate(flat).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(index == e)
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot].unsqueeze(-1))
        return y.view_as(x)


class OneHotPermuted(Mixture):
    """Mixtral's old form: a one-hot mask, experts that nobody chose are skipped, weights in the model's dtype."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden_states.dtype)
        final = torch.zeros((batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            layer = self.experts[number]
            slot, rows = torch.where(mask[number].squeeze(0))
            if rows.shape[0] == 0:
                continue
            current = hidden_states[None, rows].reshape(-1, width)
            current = layer(current) * weights[rows, slot, None]
            final.index_add_(0, rows, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width), logits


class BooleanMask(Mixture):
    """Masks of tokens and weights scattered to all experts."""

    def forward(self, x: Tensor) -> Tensor:
        logits, index = self.gate(x).topk(self.top_k, dim=-1)
        spread = torch.full((*x.shape[:-1], EXPERTS), float("-inf"), dtype=x.dtype).scatter(-1, index, logits)
        weights = F.softmax(spread, dim=-1)
        y = torch.zeros_like(x)
        flat_x, flat_weights = x.reshape(-1, x.size(-1)), weights.view(-1, EXPERTS)
        for i, expert in enumerate(self.experts):
            mask = (index == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                taken = expert(flat_x[flat_mask])
                scores = flat_weights[flat_mask, i].unsqueeze(1)
                y[mask] += (taken * scores).squeeze(1)
        return y


class Repeated(Mixture):
    """DeepSeek's form for training: rows repeated for each choice, written by flat masks; a shared expert beside."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp, choices: int = 2) -> None:
        super().__init__(expert, choices)
        self.shared_experts = expert()

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, shape = hidden_states, hidden_states.shape
        flat = hidden_states.view(-1, shape[-1])
        weight, index = self.gate(flat).softmax(-1).topk(self.top_k)
        flat_index = index.view(-1)
        rows = flat.repeat_interleave(self.top_k, dim=0)
        y = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            y[flat_index == i] = expert(rows[flat_index == i])
        y = (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)
        return y.view(*shape) + self.shared_experts(identity)


class SortedCounts(Mixture):
    """DeepSeek's form for inference: rows sorted by expert, counts as a list, pieces joined and put back."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        scores = self.gate(flat).sigmoid()
        index = scores.topk(self.top_k, dim=-1, sorted=False).indices
        weight = scores.gather(1, index)
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        counts = index.new_zeros((index.shape[0], EXPERTS))
        counts.scatter_(1, index, 1)
        tokens_per_expert = counts.sum(dim=0)
        order = index.view(-1).argsort()
        sorted_tokens = flat[order // index.shape[1]]
        outputs, start = [], 0
        for i, number in enumerate(tokens_per_expert.cpu().numpy()):
            end = start + number
            if number == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[order] = outs
        y = new_x.view(*index.shape, -1).type(weight.dtype).mul_(weight.unsqueeze(dim=-1)).sum(dim=1).type(new_x.dtype)
        return y.view_as(x)


class Bincount(Mixture):
    """Pieces by `bincount`, split at once."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, index = F.softmax(self.gate(flat), dim=-1).topk(self.top_k)
        order = torch.argsort(index.flatten(), stable=True)
        sizes = torch.bincount(index.flatten(), minlength=EXPERTS).tolist()
        rows = order.div(self.top_k, rounding_mode="floor")
        y = torch.zeros_like(flat)
        pieces = zip(rows.split(sizes), weight.flatten()[order].split(sizes), strict=True)
        for expert, (piece, share) in zip(self.experts, pieces, strict=True):
            y = y.index_add(0, piece, expert(flat[piece]) * share[:, None])
        return y.view_as(x)


class Switch(Mixture):
    """One expert a token, with no more rows than its capacity; others pass by. A loss of its own."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp, choices: int = 1) -> None:
        super().__init__(expert, choices)
        self.capacity_factor = 1.25

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, x.shape[-1])
        probs = F.softmax(self.gate(flat), dim=-1)
        best, routes = probs.max(dim=-1)
        capacity = int(self.capacity_factor * len(flat) / EXPERTS)
        final = flat.clone()
        for i in range(EXPERTS):
            rows = torch.eq(routes, i).nonzero(as_tuple=True)[0][:capacity]
            final[rows, :] = flat[rows] + self.experts[i](flat[rows]) * best[rows].view(-1, 1)
        balance = EXPERTS * (F.one_hot(routes, EXPERTS).float().mean(0) * probs.mean(0)).sum()
        return final.view_as(x), balance


class PerToken(Mixture):
    """A loop over tokens and their choices."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, index = self.gate(flat).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(flat)
        for t in range(flat.shape[0]):
            for j in range(self.top_k):
                y[t] += weights[t, j] * self.experts[index[t, j].item()](flat[t].unsqueeze(0)).squeeze(0)
        return y.unflatten(0, x.shape[:-1])


class Apart(nn.Module):
    """Experts in a module of their own, which is told what was chosen."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp, choices: int = 2) -> None:
        super().__init__()
        self.router, self.experts, self.choices = nn.Linear(D, EXPERTS), Told(expert), choices

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, index = self.router(flat).softmax(-1).topk(self.choices)
        return self.experts(flat, index, weights).view_as(x)


class Told(nn.Module):
    """Experts that are told what was chosen, by name."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"expert_{i}": expert() for i in range(EXPERTS)})

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in index.unique().tolist():
            rows, slot = (index == number).nonzero(as_tuple=True)
            y[rows] += self.layers[f"expert_{number}"](x[rows]) * weights[rows, slot].unsqueeze(-1)
        return y


FORMS: tuple[type[nn.Module], ...] = (
    WhereIndex,
    OneHotPermuted,
    BooleanMask,
    Repeated,
    SortedCounts,
    Bincount,
    Switch,
    PerToken,
    Apart,
)
KINDS: tuple[type[nn.Module], ...] = (Mlp, SwiGlu, Fused, Normed)
