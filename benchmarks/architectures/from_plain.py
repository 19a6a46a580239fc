"""Models of plain torch, PEFT and x-transformers, tiny."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

from .case import Case
from .from_transformers import tiny_config
from .shrunken import SEQUENCE, VOCABULARY

BATCH = 4
Made = tuple[nn.Module, Any]


def cases() -> list[Case]:
    """The models of the libraries as cases; those of torch have a target and a loss."""
    lora = [Case(f"lora {kind}", "peft", lambda kind=kind: _lora(kind)) for kind in ("llama", "gpt2", "qwen3")]  # type: ignore[misc]
    wrapped = [
        Case("x-transformers decoder", "x-transformers", _autoregressive),
        Case("x-transformers encoder", "x-transformers", _encoder, _classes),
        Case("x-transformers rotary swiglu", "x-transformers", _rotary),
        Case("x-transformers vit", "x-transformers", _vit, F.cross_entropy),
    ]
    plain = [
        Case("nn.Transformer", "plain", _transformer, F.mse_loss),
        Case("nn.TransformerEncoder", "plain", _layers, F.mse_loss),
        Case("LSTM", "plain", lambda: _recurrent(nn.LSTM), F.mse_loss),
        Case("GRU", "plain", lambda: _recurrent(nn.GRU), F.mse_loss),
        Case("projected LSTM", "plain", lambda: _recurrent(nn.LSTM, proj_size=8), F.mse_loss),
        Case("conv net", "plain", _convolutional, F.cross_entropy),
        Case("MLP mixer", "plain", _mixer, F.cross_entropy),
        Case("DeepFM", "plain", _factorization, F.binary_cross_entropy_with_logits),
        Case("Fourier operator", "plain", _fourier, F.mse_loss),
        Case("variational autoencoder", "plain", _variational),
        Case("CTC", "plain", _ctc),
    ]
    return [*plain, *lora, *wrapped]


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY - 3, (BATCH, SEQUENCE))


def _classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _lora(kind: str) -> Made:
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    names = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    ids = _tokens()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    return adapted, {"input_ids": ids, "labels": ids.clone()}


def _autoregressive() -> Made:
    layers = Decoder(dim=32, depth=2, heads=4)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)), (
        _tokens(),
    )


def _rotary() -> Made:
    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)), (
        _tokens(),
    )


def _encoder() -> Made:
    layers = Encoder(dim=32, depth=2, heads=4)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers), (_tokens(), _tokens())


def _vit() -> Made:
    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(dim=32, depth=2, heads=4)
    )
    return model, (torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,)))


def _transformer() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.inner(source, target, tgt_mask=mask)

    x = torch.randn(BATCH, SEQUENCE, 32)
    return Masked(), (x, torch.randn_like(x), torch.randn_like(x))


def _layers() -> Made:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    x = torch.randn(BATCH, SEQUENCE, 32)
    return model, (x, torch.randn_like(x))


def _recurrent(kind: Callable[..., nn.Module], **options: Any) -> Made:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(16, 32, 2, batch_first=True, **options)
            self.head = nn.Linear(options.get("proj_size", 32), 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x)[0])

    return Tagger(), (torch.randn(BATCH, SEQUENCE, 16), torch.randn(BATCH, SEQUENCE, 4))


def _convolutional() -> Made:
    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, (torch.randn(BATCH, 3, 16, 16), torch.randint(0, 10, (BATCH,)))


def _mixer() -> Made:
    class Block(nn.Module):
        def __init__(self, tokens: int, dim: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
            self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
            self.channels = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norms[1](x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 32, 8, 8)
            self.blocks = nn.Sequential(*(Block(16, 32) for _ in range(2)))
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))

    return Mixer(), (torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,)))


def _factorization() -> Made:
    class DeepFM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(4))
            self.linear = nn.ModuleList(nn.Embedding(20, 1) for _ in range(4))
            self.deep = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, ids: Tensor) -> Tensor:
            rows = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
            pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
            first = sum(table(ids[:, i]) for i, table in enumerate(self.linear))
            return (first + pairs + self.deep(rows.flatten(1))).squeeze(1)

    return DeepFM(), (torch.randint(0, 20, (8, 4)), torch.rand(8).round())


def _fourier() -> Made:
    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.drop = nn.Linear(1, 16), nn.Linear(16, 1)
            self.weights = nn.Parameter(torch.randn(16, 16, 5, dtype=torch.cfloat) / 16)
            self.local = nn.Conv1d(16, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lift(x).transpose(1, 2)
            modes = torch.einsum("bim,iom->bom", torch.fft.rfft(h)[..., :5], self.weights)
            h = F.gelu(torch.fft.irfft(F.pad(modes, (0, 12)), n=32) + self.local(h))
            return self.drop(h.transpose(1, 2))

    return Operator(), (torch.randn(BATCH, 32, 1), torch.randn(BATCH, 32, 1))


def _variational() -> Made:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(32, 16), nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = mean + log_variance.mul(0.5).exp()
            kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
            return F.mse_loss(self.decoder(z), x, reduction="sum") + kl

    return Vae(), (torch.randn(8, 32),)


def _ctc() -> Made:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.layers(x).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((x.shape[0],), x.shape[1]), torch.full((x.shape[0],), labels.shape[1])
            return F.ctc_loss(scores, labels, *lengths)

    return Speech(), (torch.randn(BATCH, 20, 16), torch.randint(1, 12, (BATCH, 5)))
