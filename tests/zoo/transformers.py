"""Transformers in plain PyTorch, tiny, each with the traits that its namesake brings to a compiler."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gpt2Block(nn.Module):
    """Fused qkv that is split by width, dropout in three places, biases everywhere."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.ln_2 = nn.LayerNorm(d_model)
        self.fc = nn.Linear(d_model, 4 * d_model)
        self.out = nn.Linear(4 * d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, d_model // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(d_model, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, seq, d_model)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    """Learned positions, an output head tied to the embedding, labels of -100 ignored. ids: (batch, seq)."""

    def __init__(self, vocab: int = 64, seq: int = 16, d_model: int = 32, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, d_model)
        self.wpe = nn.Embedding(seq, d_model)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Gpt2Block(d_model, heads, 0.1) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def rotary_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin: (seq, head_dim), the two halves alike."""
    angles = torch.outer(torch.arange(seq).float(), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class GroupedAttention(nn.Module):
    """Rotary grouped-query attention; `repeat` copies the key heads itself instead of asking for enable_gqa."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, repeat: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.repeat = heads, kv_heads, repeat
        self.head_dim = d_model // heads
        self.wq = nn.Linear(d_model, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(d_model, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(d_model, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.repeat:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class LlamaBlock(nn.Module):
    def __init__(self, d_model: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.attention = GroupedAttention(d_model, heads, kv_heads)
        self.ffn_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.gate = nn.Linear(d_model, ffn, bias=False)
        self.up = nn.Linear(d_model, ffn, bias=False)
        self.down = nn.Linear(ffn, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Labels are the ids themselves, shifted inside. With labels the loss is returned, without them the logits."""

    def __init__(self, vocab: int = 64, seq: int = 16, d_model: int = 64, layers: int = 3) -> None:
        super().__init__()
        heads, kv_heads = 8, 4
        self.embed = nn.Embedding(vocab, d_model)
        self.blocks = nn.ModuleList(LlamaBlock(d_model, heads, kv_heads, 96) for _ in range(layers))
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.head = nn.Linear(d_model, vocab, bias=False)
        cos, sin = rotary_tables(seq, d_model // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        seq = ids.shape[1]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


@dataclasses.dataclass
class ClassifierOutput:
    loss: Tensor | None
    logits: Tensor


class BertLayer(nn.Module):
    """Post-norm, separate biased projections, a boolean mask of real tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)
        self.norm_1 = nn.LayerNorm(d_model, eps=1e-12)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        self.norm_2 = nn.LayerNorm(d_model, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.norm_1(x + self.dense(mixed))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Called with keywords, returns a dataclass with `.loss`. attention_mask: (batch, seq), 1 where a token is real."""

    def __init__(self, vocab: int = 64, seq: int = 16, d_model: int = 32, classes: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, d_model, padding_idx=0)
        self.position = nn.Embedding(seq, d_model)
        self.token_type = nn.Embedding(2, d_model)
        self.norm = nn.LayerNorm(d_model, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(d_model, 8) for _ in range(layers))
        self.pooler = nn.Linear(d_model, d_model)
        self.classifier = nn.Linear(d_model, classes)
        self.register_buffer("position_ids", torch.arange(seq)[None])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, labels: Tensor | None = None
    ) -> ClassifierOutput:
        seq = input_ids.shape[1]
        embedded = self.word(input_ids) + self.position(self.position_ids[:, :seq]) + self.token_type(token_type_ids)
        x = self.norm(embedded)
        mask = attention_mask[:, None, None, :].bool().expand(-1, 1, seq, -1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return ClassifierOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


def relative_buckets(queries: int, keys: int, buckets: int, bidirectional: bool) -> Tensor:
    """T5's bucket of each (query, key) pair: exact for near keys, logarithmic for far ones. (queries, keys)"""
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    far = exact + (torch.log(distance.clamp(min=1) / exact) / math.log(32 / exact) * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class T5Attention(nn.Module):
    """Unscaled attention with an additive bias; attends to `memory` where one is given."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(1, 2).flatten(2))


class T5Layer(nn.Module):
    def __init__(self, d_model: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-6) for _ in range(3 if cross else 2))
        self.self_attention = T5Attention(d_model, heads)
        self.cross_attention = T5Attention(d_model, heads) if cross else None
        self.wi = nn.Linear(d_model, 2 * d_model, bias=False)
        self.wo = nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.self_attention(normed, normed, bias)
        if self.cross_attention is not None and memory is not None:
            x = x + self.cross_attention(self.norms[1](x), memory, None)
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class T5(nn.Module):
    """Encoder and decoder share one embedding; each stack learns a relative position bias that masks its attention."""

    def __init__(self, vocab: int = 64, source: int = 16, target: int = 8, d_model: int = 32, layers: int = 2) -> None:
        super().__init__()
        heads = 8
        self.scale = d_model**-0.5
        self.shared = nn.Embedding(vocab, d_model)
        self.encoder = nn.ModuleList(T5Layer(d_model, heads, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Layer(d_model, heads, cross=True) for _ in range(layers))
        self.encoder_bias = nn.Embedding(8, heads)
        self.decoder_bias = nn.Embedding(8, heads)
        self.encoder_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.decoder_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.register_buffer("encoder_buckets", relative_buckets(source, source, 8, bidirectional=True))
        self.register_buffer("decoder_buckets", relative_buckets(target, target, 8, bidirectional=False))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        bias = self.encoder_bias(self.encoder_buckets).permute(2, 0, 1)[None]
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.encoder_norm(memory)

        size = target.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=target.device).tril()
        bias = self.decoder_bias(self.decoder_buckets).permute(2, 0, 1)[None].masked_fill(~causal, float("-inf"))
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, bias, memory)
        return F.linear(self.decoder_norm(x) * self.scale, self.shared.weight)


class MoeLayer(nn.Module):
    """Top-2 of `experts`, dense: every expert sees every token, the gate is zero where it was not chosen."""

    def __init__(self, d_model: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, d_model, ffn) / d_model**0.5)
        self.w_out = nn.Parameter(torch.randn(experts, ffn, d_model) / ffn**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (batch, seq, d_model). Returns the mixture and the load-balancing loss."""
        scores = self.router(x).softmax(dim=-1)
        weight, chosen = scores.topk(2, dim=-1)
        gate = torch.zeros_like(scores).scatter(-1, chosen, weight / weight.sum(dim=-1, keepdim=True))
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.w_in))
        mixed = torch.einsum("bsef,efd,bse->bsd", hidden, self.w_out, gate)
        load = (gate > 0).to(x.dtype).mean(dim=(0, 1))
        return mixed, (load * scores.mean(dim=(0, 1))).sum() * scores.shape[-1]


class Moe(nn.Module):
    """Returns the loss: next-token cross entropy plus the balance of the experts."""

    def __init__(self, vocab: int = 64, seq: int = 8, d_model: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model) for _ in range(2 * layers))
        self.attentions = nn.ModuleList(GroupedAttention(d_model, 8, 2, repeat=True) for _ in range(layers))
        self.mixtures = nn.ModuleList(MoeLayer(d_model, 16, 8) for _ in range(layers))
        self.head = nn.Linear(d_model, vocab, bias=False)
        cos, sin = rotary_tables(seq, d_model // 8)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        balance = x.new_zeros(())
        for i, (attention, mixture) in enumerate(zip(self.attentions, self.mixtures, strict=True)):
            x = x + attention(self.norms[2 * i](x), self.cos, self.sin)
            mixed, layer_balance = mixture(self.norms[2 * i + 1](x))
            x, balance = x + mixed, balance + layer_balance
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance
