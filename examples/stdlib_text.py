"""Real text that every machine has: the source of Python's standard library, as characters.

`batches` is what `torchrun OUT/run.py --data examples/stdlib_text.py:batches` calls: it yields global batches, the same
on every rank, and each rank takes its own part of them. Nothing but torch and the standard library is needed here.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

BATCH, SEQ = 16, 128
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
VOCAB = len(ALPHABET)  # 96; a character outside the alphabet reads as a space


@functools.cache
def corpus() -> Tensor:
    """The top-level modules of the standard library, one after another, as character numbers. (characters,)"""
    code = torch.full((256,), ALPHABET.index(" "), dtype=torch.long)
    for index, character in enumerate(ALPHABET):
        code[ord(character)] = index
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 100_000:
        raise RuntimeError(f"{folder} holds no standard library in source form; any other folder of .py files will do")
    return code[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Characters and the ones that follow them, from random places. Two of (BATCH, SEQ)."""
    text = corpus()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQ - 1, (BATCH, 1), generator=generator)
    window = text[starts + torch.arange(SEQ + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    step = 0
    while True:
        yield batch(step)
        step += 1
