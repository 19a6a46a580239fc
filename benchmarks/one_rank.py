"""One rank beside eager PyTorch: what the emitted program itself costs, where no message hides it. One JSON object.

    python -m benchmarks.one_rank [--steps 20] [--only NAME]

Models of the zoo, wide enough that kernels count: Llama, GPT-2 and BERT with dropout, ViT, ResNet. Both take turns on the
same batches with the same optimizer (see harness.py). Where a model drops nothing the losses must agree.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.harness import command_line, print_json, take_turns
from benchmarks.models import Gpt, next_token_loss
from tests.zoo.others import ResNet, Vit
from tests.zoo.transformers import Gpt2, Llama

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True)
BATCH, SEQUENCE, WIDTH, VOCAB = 8, 128, 256, 4096
Batch = tuple[Tensor, Tensor]


class Bert(nn.Module):
    """Layers of torch's encoder, post-norm, with dropout of activations and of attention's weights. ids: (batch, seq)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.1, F.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


def token_batch(index: int) -> Batch:
    """ids and labels: (batch, seq)."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(index))
    return ids, ids.roll(1, 1)


def image_batch(index: int, size: int) -> Batch:
    """images: (batch, 3, size, size), labels: (batch,)."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4 * BATCH, 3, size, size, generator=generator), torch.arange(4 * BATCH) % 8


Loss = Callable[[Tensor, Tensor], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Loss | None]] = {
    "llama": (lambda: Llama(VOCAB, SEQUENCE, WIDTH, 4), token_batch, None),
    "gpt": (lambda: Gpt(VOCAB, SEQUENCE, WIDTH, 8, 4), token_batch, next_token_loss),
    "gpt2 with dropout": (lambda: Gpt2(VOCAB, SEQUENCE, WIDTH, 8, 4), token_batch, next_token_loss),
    "bert with dropout": (Bert, token_batch, next_token_loss),
    "vit": (lambda: Vit(WIDTH, 8, 4), functools.partial(image_batch, size=16), F.cross_entropy),
    "resnet": (lambda: ResNet(32), functools.partial(image_batch, size=32), F.cross_entropy),
}


def measured(name: str, steps: int) -> dict[str, Any]:
    """Both programs of a model in turn."""
    make, batch_of, loss_fn = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    eager = copy.deepcopy(model)
    optimizer = OPTIMIZER(eager.parameters())
    program = autopar.compile(
        model, autopar.ClusterSpec.local(1), batch_of(0), loss_fn=loss_fn, optimizer=OPTIMIZER
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        emitted = autopar.load(program.save(directory))

        def eager_step(batch: Batch) -> float:
            inputs, labels = batch
            loss = eager(inputs, labels) if loss_fn is None else loss_fn(eager(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        steps_of = {"autopar": lambda batch: float(emitted(batch)), "eager": eager_step}
        turns = take_turns(steps_of, batch_of, steps, warmup=3, barrier=lambda: None)
    return {**turns.summary(), **turns.ratios("autopar", "eager")}


def main() -> None:
    parser = command_line(__doc__, steps=20)
    parser.add_argument("--only", default="", help="part of a model's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_json({name: measured(name, args.steps) for name in MODELS if args.only in name})


if __name__ == "__main__":
    main()
