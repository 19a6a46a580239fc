"""State spaces, transducers and denoisers with their recurrences written out, tiny."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case

BATCH, LENGTH, WIDTH = 4, 12, 16
Made = tuple[nn.Module, Any]


def cases() -> list[Case]:
    """State-space models, speech, and a diffusion transformer."""
    return [
        Case("S4D", "state space", lambda: (Stack(Diagonal), _tokens()), _next),
        Case("Mamba, its loop written out", "state space", lambda: (Stack(Selective), _tokens()), _next),
        Case("linear recurrence by doubling", "state space", lambda: (Stack(Doubled), _tokens()), _next),
        Case("RNN-T", "speech", _transducer),
        Case("conformer CTC", "speech", _conformer),
        Case("DiT", "denoisers", _dit, F.mse_loss),
    ]


def _tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 30, (BATCH, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


def _next(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


class Stack(nn.Module):
    """Two layers of a kind between an embedding and a head."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class Diagonal(nn.Module):
    """The kernel of a diagonal state space, applied by FFT (S4D)."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        low, high = math.log(0.001), math.log(0.1)
        self.log_dt = nn.Parameter(torch.rand(WIDTH) * (high - low) + low)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(WIDTH, states // 2, dtype=torch.cfloat)))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states // 2)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(states // 2).repeat(WIDTH, 1).float())
        self.d, self.out = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        u, length = u.transpose(-1, -2), u.size(1)
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.c)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dta = a * dt.unsqueeze(-1)
        powers = dta.unsqueeze(-1) * torch.arange(length, device=u.device)
        c = c * (torch.exp(dta) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(powers)).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        y = y[..., :length] + u * self.d.unsqueeze(-1)
        return F.glu(self.out(F.gelu(y).transpose(-1, -2)), dim=-1)


class Selective(nn.Module):
    """Mamba's block with a loop over time."""

    def __init__(self, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.rank, self.states = rank, states
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float().repeat(inner, 1)))
        self.d = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        (b, length, _) = x.shape
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        delta, before, after = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.a_log)))
        given = torch.einsum("bld,bln,bld->bldn", delta, before, x)
        state = torch.zeros((b, x.size(2), self.states), device=x.device, dtype=x.dtype)
        ys = []
        for i in range(length):
            state = decay[:, i] * state + given[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, after[:, i, :]))
        y = torch.stack(ys, dim=1) + x * self.d
        return self.out_proj(y * F.silu(gate))


class Doubled(nn.Module):
    """A gated linear recurrence h = a h + b, by log2(length) steps of doubled reach."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.given, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.sigmoid(self.gate(x))
        b = (1 - a) * self.given(x)
        reach = 1
        while reach < x.size(1):
            b = b + a * F.pad(b, (0, 0, reach, 0))[:, : x.size(1)]
            a = a * F.pad(a, (0, 0, reach, 0), value=1.0)[:, : x.size(1)]
            reach *= 2
        return self.out(b)


class Transducer(nn.Module):
    """Encoder, predictor and joiner, and the sum over alignments by log-add over the grid (Graves)."""

    def __init__(self, vocabulary: int = 10) -> None:
        super().__init__()
        self.encoder, self.embed = nn.LSTM(8, WIDTH, batch_first=True), nn.Embedding(vocabulary, WIDTH)
        self.predictor, self.joiner = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, vocabulary)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        encoded, _ = self.encoder(frames)
        predicted, _ = self.predictor(self.embed(F.pad(labels, (1, 0))))
        joint = self.joiner(torch.tanh(encoded.unsqueeze(2) + predicted.unsqueeze(1))).log_softmax(-1)
        blank = joint[..., 0]
        index = labels[:, None, :, None].expand(-1, joint.size(1), -1, 1)
        emit = joint[:, :, :-1].gather(3, index).squeeze(3)
        alpha = torch.cat([torch.zeros_like(emit[:, 0, :1]), emit[:, 0].cumsum(1)], dim=1)
        for t in range(1, joint.size(1)):
            stay = alpha + blank[:, t - 1]
            row = [stay[:, 0]]
            for u in range(1, joint.size(2)):
                row.append(torch.logaddexp(stay[:, u], row[-1] + emit[:, t, u - 1]))
            alpha = torch.stack(row, dim=1)
        return -(alpha[:, -1] + blank[:, -1, -1]).mean()


def _transducer() -> Made:
    return Transducer(), (torch.randn(BATCH, 6, 8), torch.randint(1, 10, (BATCH, 3)))


class Conformer(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, half a feed-forward; CTC of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide, self.depthwise = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.batch_norm, self.narrow = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        x = x + 0.5 * self.halves[0](x)
        y = self.norm(x)
        padding = torch.arange(x.size(1), device=x.device)[None, :] >= lengths[:, None]
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        y = F.glu(self.wide(x.transpose(1, 2)), dim=1)
        x = x + self.narrow(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        scores = self.head(x + 0.5 * self.halves[1](x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, lengths, label_lengths, zero_infinity=True)


def _conformer() -> Made:
    lengths, label_lengths = torch.tensor([20, 18, 16, 20]), torch.tensor([5, 4, 5, 3])
    return Conformer(), (torch.randn(BATCH, 20, WIDTH), torch.randint(1, 12, (BATCH, 5)), lengths, label_lengths)


class Dit(nn.Module):
    """Patches modulated by time and class: adaLN-zero blocks (Peebles and Xie)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.classes = nn.Conv2d(4, 32, 2, 2), nn.Embedding(11, 32)
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.places = nn.Parameter(torch.randn(1, 16, 32) * 0.02, requires_grad=False)
        self.norm = nn.LayerNorm(32, elementwise_affine=False, eps=1e-6)
        self.mixes = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(approximate="tanh"), nn.Linear(64, 32)) for _ in range(2)
        )
        self.modulations = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(32, 192)) for _ in range(2))
        self.head = nn.Linear(32, 2 * 2 * 4)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(16, device=t.device) / 16).to(x.dtype)
        angles = t[:, None].to(x.dtype) * frequencies[None]
        c = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.classes(y)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for mix, mlp, modulation in zip(self.mixes, self.mlps, self.modulations, strict=True):
            shift, scale, gate, shift_2, scale_2, gate_2 = modulation(c).unsqueeze(1).chunk(6, dim=-1)
            z = self.norm(h) * (1 + scale) + shift
            h = h + gate * mix(z, z, z, need_weights=False)[0]
            h = h + gate_2 * mlp(self.norm(h) * (1 + scale_2) + shift_2)
        z = self.head(self.norm(h)).reshape(x.shape[0], 4, 4, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", z).reshape(x.shape)


def _dit() -> Made:
    x = torch.randn(BATCH, 4, 8, 8)
    return Dit(), (x, torch.randint(0, 1000, (BATCH,)), torch.randint(0, 10, (BATCH,)), torch.randn_like(x))
