"""Programs compiled block by block against torch.compile of the whole model, on one CPU rank: a JSON object per model.

    python benchmarks/compiled_step.py [--models llama resnet] [--steps 20] [--layers 12]

Both sides use inductor and the same fused AdamW, are given the same batches, and take turns (harness.py). Each compiles into an
empty cache of its own, after a function of no weight has been compiled, so that what a process pays once is nobody's.
`compile_s` is the first step's time beyond the median step. With dropout the two draw other random numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import command_line, print_json, take_turns  # noqa: E402
from benchmarks.models import Llama, LlamaShape  # noqa: E402
from tests.zoo.others import BasicBlock, VitBlock  # noqa: E402
from tests.zoo.transformers import BertLayer, Gpt2  # noqa: E402

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
VOCAB, SEQ, DIM = 1024, 128, 256


class Blocks(nn.Module):
    """Something before, equal blocks, something behind; the loss of labels: (batch,)."""

    def __init__(self, before: nn.Module, blocks: list[nn.Module], behind: nn.Module, mask: bool = False) -> None:
        super().__init__()
        self.before, self.blocks, self.behind, self.mask = before, nn.ModuleList(blocks), behind, mask

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rest = ((x > 0)[:, None, None, :].expand(-1, 1, x.shape[1], -1),) if self.mask else ()
        x = self.before(x)
        for block in self.blocks:
            x = block(x, *rest)
        return F.cross_entropy(self.behind(x), labels)


class Patches(nn.Module):
    """Images in patches of 4 × 4, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 64, DIM) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).transpose(1, 2) + self.position


class Mean(nn.Module):
    """Logits of the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).mean(1))


class NextToken(nn.Module):
    """The loss of a model that gives logits of every token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())


def gpt2(layers: int, dropout: float = 0.0) -> nn.Module:
    model = Gpt2(VOCAB, SEQ, DIM, 8, layers)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif hasattr(module, "dropout"):
            module.dropout = dropout
    return NextToken(model)


def resnet(layers: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16))
    return Blocks(stem, [BasicBlock(32, 32, 1) for _ in range(layers)], head)


def tokens(step: int, batch: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 7 + 3) % VOCAB


def sentences(step: int) -> tuple[Tensor, Tensor]:
    ids, _ = tokens(step)
    ids[1, SEQ // 2 :] = 0
    return ids, ids[:, 0] % 16


def images(step: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 32, 32, generator=make), torch.randint(16, (8,), generator=make)


@dataclass(frozen=True)
class Case:
    """A model of so many layers, and its batch of a step."""

    model: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


CASES = {
    "llama": Case(lambda n: Llama(LlamaShape(n, DIM, 768, 8, 2, VOCAB), SEQ), tokens),
    "gpt2": Case(gpt2, tokens),
    "gpt2-dropout": Case(functools.partial(gpt2, dropout=0.1), tokens),
    "bert": Case(
        lambda n: Blocks(nn.Embedding(VOCAB, DIM), [BertLayer(DIM, 8) for _ in range(n)], Mean(), mask=True), sentences
    ),
    "vit": Case(lambda n: Blocks(Patches(), [VitBlock(DIM, 8) for _ in range(n)], Mean()), images),
    "resnet": Case(resnet, images),
}


def whole_step(model: nn.Module) -> Callable[[Any], float]:
    """A training step of torch.compile(model)."""
    compiled, optimizer = torch.compile(model, dynamic=False), OPTIMIZER(model.parameters())

    def step(batch: Any) -> float:
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(name: str, layers: int, steps: int) -> dict[str, Any]:
    """One model, in this process."""
    import autopar
    from autopar.runtime.memory.heap import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model(layers)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(1),
        case.batch(0),
        optimizer=OPTIMIZER,
        options=autopar.Options(compiler="inductor"),
    )
    again = case.model(layers)
    again.load_state_dict(weights)
    first_s: dict[str, float] = {}

    def timed(side: str, step: Callable[[Any], float], batch: Any) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
        start = time.perf_counter()
        step(batch)
        first_s[side] = time.perf_counter() - start

    def body(session: Any) -> Any:
        sides = {"blocks": lambda batch: float(session.train_step(list(batch))), "model": whole_step(again)}
        for side, step in sides.items():
            timed(side, step, case.batch(0))
        return take_turns(sides, lambda i: case.batch(i + 1), steps, 3, barrier=lambda: None)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
        turns = program.on_ranks(body)[0]
    compile_s = {side: first_s[side] - turns.median_s(side) for side in first_s}
    return {
        "benchmark": "compiled_step",
        "model": name,
        "layers": layers,
        **turns.summary(),
        **turns.ratios("blocks", "model"),
        "compile_s": {side: round(seconds, 1) for side, seconds in compile_s.items()},
        "compile_ratio": round(compile_s["model"] / compile_s["blocks"], 2),
        "uncompiled": sorted({str(one.message) for one in said if "is not compiled" in str(one.message)}),
    }


def main() -> None:
    parser = command_line(__doc__, steps=20)
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, args.layers, args.steps)))
        return
    for name in args.models:
        command = [sys.executable, __file__, "--worker", name, "--layers", str(args.layers), "--steps", str(args.steps)]
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        print_json(json.loads(ran.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
