"""The zoo: one registry of small seeded models that the compiler has to get right, with inputs, loss and optimizer.

Sizes are a few dozen, and divisible by 8 where that is natural, so that 8 ranks can share them and a float64 step takes
milliseconds. `batch()` is a whole training batch: the model's arguments, then the targets of `loss_fn` (tuple), or
keywords (dict). Inference leaves the targets away.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import others, transformers

Batch = tuple[Any, ...] | dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """`targets` names what inference leaves away: how many trailing entries of a tuple, or one key of a dict."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Batch]
    loss_fn: Callable[..., Tensor] | None
    optimizer: Callable[..., torch.optim.Optimizer]
    tags: frozenset[str] = frozenset()
    targets: int | str = 1

    def make(self) -> nn.Module:
        """The model, with the same parameters every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            model = self.build()
        ORIGIN[model] = self
        return model

    def batch(self, seed: int = 0) -> Batch:
        """A global training batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs()

    def inference_batch(self, seed: int = 0) -> Batch:
        batch = self.batch(seed)
        if isinstance(batch, dict):
            return {key: value for key, value in batch.items() if key != self.targets}
        assert isinstance(self.targets, int)
        return batch[: len(batch) - self.targets]

    def __repr__(self) -> str:
        return self.name


ORIGIN: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()
"""The origin of a module: a zoo model, or a class of the tests and its arguments. Modules of one origin run alike."""


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: (batch, seq, vocab), labels: (batch, seq) with -100 where a token does not count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def ids(batch: int, seq: int, vocab: int = 64) -> Tensor:
    return torch.randint(1, vocab, (batch, seq))


def partly_ignored(labels: Tensor) -> Tensor:
    """The tail of each row is ignored, and all of the second row, so that shards count different numbers of tokens."""
    length = torch.randint(1, labels.shape[1] + 1, (labels.shape[0],))
    length[1] = 0
    return labels.masked_fill(torch.arange(labels.shape[1])[None] >= length[:, None], -100)


def bert_inputs() -> dict[str, Tensor]:
    length = torch.randint(1, 17, (8,))
    mask = (torch.arange(16)[None] < length[:, None]).long()
    return {
        "input_ids": ids(8, 16) * mask,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (8, 16)),
        "labels": torch.randint(0, 8, (8,)),
    }


def recommender_inputs() -> tuple[Any, ...]:
    features = {
        "user": {"id": torch.randint(0, 64, (16,)), "dense": torch.randn(16, 8)},
        "item": torch.randint(0, 128, (16,)),
    }
    history = [torch.randint(0, 128, (16, 4)) for _ in range(2)]
    return features, history, torch.randint(0, 2, (16,)).float()


def images(batch: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 16, 16), torch.randint(0, 8, (batch,))


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)

MODELS: tuple[ZooModel, ...] = (
    ZooModel("mlp", others.Mlp, lambda: (torch.randn(16, 32), torch.randint(0, 16, (16,))), F.cross_entropy, SGD),
    ZooModel(
        "gpt2",
        transformers.Gpt2,
        lambda: (ids(8, 16), partly_ignored(ids(8, 16))),
        token_loss,
        ADAMW,
        frozenset({"dropout", "tied", "transformer"}),
    ),
    ZooModel(
        "llama", transformers.Llama, lambda: (ids(8, 16),) * 2, None, ADAMW, frozenset({"transformer", "scalar-output"})
    ),
    ZooModel(
        "bert",
        transformers.Bert,
        bert_inputs,
        None,
        ADAM,
        frozenset({"transformer", "kwargs", "loss-attribute"}),
        targets="labels",
    ),
    ZooModel(
        "t5",
        transformers.T5,
        lambda: (ids(8, 16), ids(8, 8), partly_ignored(ids(8, 8))),
        token_loss,
        ADAMW,
        frozenset({"tied", "transformer"}),
    ),
    ZooModel(
        "moe",
        transformers.Moe,
        lambda: (ids(8, 8), ids(8, 8)),
        None,
        ADAMW,
        frozenset({"transformer", "scalar-output"}),
    ),
    ZooModel("vit", others.Vit, images, F.cross_entropy, ADAMW, frozenset({"transformer"})),
    ZooModel("resnet", others.ResNet, images, F.cross_entropy, SGD, frozenset({"batchnorm"})),
    ZooModel(
        "lstm",
        others.LstmClassifier,
        lambda: (ids(8, 8, 32), torch.randint(0, 8, (8,))),
        F.cross_entropy,
        ADAM,
        frozenset({"recurrent"}),
    ),
    ZooModel(
        "gru",
        others.GruClassifier,
        lambda: (torch.randn(8, 8, 8), torch.randint(0, 8, (8,))),
        F.cross_entropy,
        SGD,
        frozenset({"recurrent"}),
    ),
    ZooModel(
        "partly-frozen",
        others.PartlyFrozen,
        lambda: (torch.randn(16, 32), torch.randint(0, 8, (16,))),
        F.cross_entropy,
        ADAMW,
        frozenset({"unused", "frozen"}),
    ),
    ZooModel("audio", others.AudioNet, lambda: (torch.randn(8, 1, 64),) + (torch.randn(8, 1, 64),), F.mse_loss, ADAM),
    ZooModel(
        "recommender", others.Recommender, recommender_inputs, others.recommender_loss, ADAM, frozenset({"nested"})
    ),
)
BY_NAME = {model.name: model for model in MODELS}
