"""Compile a character-level GPT for four CPU ranks and train it on the standard library's own source.

    python examples/train_gpt.py [--ranks 4] [--steps 200] [--out out/gpt]

Four things happen: the compiler chooses a plan and prints it; the programs are written to `out/gpt`; torchrun starts
one process per rank, which train on real text; and the same programs are checked against the model on one device.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import autopar
import stdlib_text

console = Console()


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Logits of the next character. ids: (batch, seq)."""

    def __init__(self, vocab: int, seq: int, dim: int = 128, heads: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def train(directory: Path, ranks: int, steps: int) -> Iterator[tuple[int, float]]:
    """Run the emitted programs with torchrun; yields (step, loss) as rank 0 prints them."""
    data = f"{Path(stdlib_text.__file__).resolve()}:batches"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(directory / "run.py"), "--data", data, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"\bstep\s+(\d+)\b.*\bloss\s+([-+.\deE]+|nan|inf)", line):
                yield int(found[1]), float(found[2])
    if process.returncode != 0:
        raise SystemExit("torchrun failed:\n" + "".join(said[-40:]))


def train_with_progress(directory: Path, ranks: int, steps: int) -> list[float]:
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    losses: list[float] = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("train", total=steps, loss="-")
        for _, loss in train(directory, ranks, steps):
            losses.append(loss)
            if len(losses) % max(steps // 10, 1) == 1:
                progress.console.print(f"  step {len(losses) - 1:4d}   loss {loss:.3f}")
            progress.update(task, advance=1, loss=f"{loss:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/gpt"))
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Gpt(stdlib_text.VOCAB, stdlib_text.SEQ)
    parameters = sum(p.numel() for p in model.parameters())
    console.rule(f"1. compile {parameters / 1e6:.1f} M parameters for {args.ranks} CPU ranks")
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(args.ranks),
        stdlib_text.batch(0),
        loss_fn=next_character_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )
    console.print(program.report(), markup=False, highlight=False, soft_wrap=True)

    console.rule("2. write the programs")
    program.save(args.out)
    for path in sorted(args.out.rglob("*.py")):
        if "autopar_runtime" not in path.parts:
            console.print(f"  {path}  ({len(path.read_text().splitlines())} lines)", highlight=False)

    console.rule(f"3. torchrun, {args.ranks} processes, {len(stdlib_text.corpus()) / 1e6:.1f} M characters of text")
    losses = train_with_progress(args.out, args.ranks, args.steps)
    edge = max(len(losses) // 10, 1)
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    console.print(f"  mean loss of the first {edge} steps {first:.3f}, of the last {edge} steps {last:.3f}")

    console.rule("4. check against one device, in float64")
    result = autopar.check(program)
    console.print(f"  {result}", highlight=False, soft_wrap=True)
    if not (result.ok and last < first):
        raise SystemExit("the demo did not do what it should")


if __name__ == "__main__":
    main()
