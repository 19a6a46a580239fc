"""The demo's GPT and its text, for benchmarks of emitted programs."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
TEXT = importlib.import_module("stdlib_text")


def demo_program(ranks: int, **options: Any) -> Any:
    """The demo, compiled for so many ranks of this machine. options: of autopar.Options."""
    import autopar

    demo = importlib.import_module("train_gpt")
    torch.manual_seed(0)
    return autopar.compile(
        demo.Gpt(TEXT.VOCAB, TEXT.SEQ),
        autopar.ClusterSpec.local(ranks),
        TEXT.batch(0),
        loss_fn=demo.next_character_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        options=autopar.Options(**options),
    )
