"""Cases of `benchmarks.properties` that are drawn: models and places that its list has not, and any options beside each other.

A list that is asked again and again is what a search is bent to. So whoever changes the search draws a number that nobody drew
before. Options need not be met: what is refused is a line too, whose words are worth reading.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import LLAMA_8B, LLAMA_70B, LlamaShape
from benchmarks.plan_growth import RandomModel, unequal_linears
from benchmarks.properties_cases import (
    CHOICE,
    DEEPSEEK_OF_TWO,
    MIDDLE,
    Made,
    Place,
    Question,
    Workload,
    ids,
    llama,
    places,
    published,
    slower_devices,
    slower_links,
)
from benchmarks.properties_models import Clip, Conformer, Recurrent, Scans, TwoTowers, ViT
from benchmarks.published_models import MIXTRAL, QWEN3_30B
from tests.zoo.models import ADAMW, token_loss

DRAWN = 8
"""Options that are drawn for a workload in a place."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "zb-auto", "dualpipev", "interleaved-zb")
STRATEGIES = ("dp", "zero1", "zero2", "zero3", "megatron", "megatron-zero1", "megatron-zero3")


def vit(batch: int = 480) -> Made:
    """Six blocks as wide as those of a ViT-H."""
    model = ViT(1280, 6, 16).to(torch.bfloat16)
    labels = torch.zeros(batch, dtype=torch.long)
    return model, (_images(batch), labels), {"loss_fn": F.cross_entropy, "optimizer": ADAMW}


def clip(batch: int = 1024) -> Made:
    """Images and texts of a batch beside each other."""
    return Clip().to(torch.bfloat16), (_images(batch), ids(batch, 77)), {"optimizer": ADAMW}


def conformer(batch: int = 64) -> Made:
    """Eight seconds of speech."""
    frames = torch.zeros(batch, 800, 80, dtype=torch.bfloat16)
    return Conformer().to(torch.bfloat16), (frames, ids(batch, 200)), {"loss_fn": token_loss, "optimizer": ADAMW}


def scans(batch: int = 32) -> Made:
    """Sequences of 2,048 tokens."""
    return Scans().to(torch.bfloat16), (ids(batch, 2048),) * 2, {"loss_fn": token_loss, "optimizer": ADAMW}


def recurrent(batch: int = 64) -> Made:
    """Sequences of 64 tokens."""
    return Recurrent(), (ids(batch, 64),) * 2, {"loss_fn": token_loss, "optimizer": ADAMW}


def two_towers(batch: int = 16384) -> Made:
    """Bags of 20 and of 10."""
    inputs = ids(batch, 20), ids(batch, 10), torch.zeros(batch, dtype=torch.long)
    return TwoTowers(), inputs, {"loss_fn": F.cross_entropy, "optimizer": ADAMW}


def wide(batch: int = 4096) -> Made:
    """Six layers of 8,192 x 8,192, for which there are few rows."""
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(8192, 8192), nn.GELU()))).to(torch.bfloat16)
    return model, (torch.zeros(batch, 8192, dtype=torch.bfloat16),) * 2, {"loss_fn": F.mse_loss, "optimizer": ADAMW}


def linears(batch: int = 1024) -> Made:
    """Forty layers of which none is as wide as another."""
    model, inputs = unequal_linears(40, 1)
    return model, inputs, {"loss_fn": F.mse_loss, "optimizer": ADAMW}


def random_graph(seed: int = 3) -> Made:
    """Sixty ops that read any before them."""
    return RandomModel(60, seed), (torch.zeros(1024, 256),), {"optimizer": ADAMW}


def _images(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16)


LARGE_VOCABULARY = LlamaShape(layers=4, dim=1024, ffn=2816, heads=16, kv_heads=4, vocab=262144)

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            "8B, odd ranks",
            "dense",
            functools.partial(llama, LLAMA_8B, 6, 24, 4096),
            places(
                h100=(3, 5, 6, 7, 9, 10, 12, 18, 20, 24, 28, 36, 48, 56, 96), slow=(3, 6, 12, 20), apart=(3, 4, 6, 8)
            ),
        ),
        Workload(
            "large vocabulary",
            "dense",
            functools.partial(llama, LARGE_VOCABULARY, 4, 64, 1024),
            places(h100=(4, 8, 24), slow=(8,), pcie=(4,), apart=(2, 4)),
        ),
        Workload(
            "70B at 32k",
            "long context",
            functools.partial(llama, LLAMA_70B, 4, 6, 32768),
            places(h100=(8, 12, 16, 24, 32, 40, 64, 96), cloud=(16, 24, 32, 48), slow=(12,)),
        ),
        Workload(
            "70B at 64k",
            "long context",
            functools.partial(llama, LLAMA_70B, 4, 4, 65536),
            places(h100=(32, 48, 64), cloud=(32,)),
        ),
        Workload(
            "Mixtral, odd ranks",
            "mixture",
            functools.partial(published, replace(MIXTRAL, seq_len=8192), 3, 48),
            places(h100=(12, 16, 20, 24, 32, 48, 64, 96), cloud=(24,), slow=(12, 16, 20)),
        ),
        Workload(
            "Qwen3, odd ranks",
            "mixture",
            functools.partial(published, QWEN3_30B, 4, 96),
            places(h100=(6, 12, 16, 20, 24, 40, 48, 64, 96), cloud=(16, 24, 48), slow=(12,)),
        ),
        Workload(
            "DeepSeek-V3 at 8k",
            "mixture",
            functools.partial(published, replace(DEEPSEEK_OF_TWO, seq_len=8192), 3, 128),
            places(h100=(64, 128, 256), cloud=(64,)),
        ),
        Workload("vit", "dense", vit, places(h100=(2, 3, 4, 6, 8, 10, 12, 16, 24, 40), slow=(4, 8, 12), pcie=(8,))),
        Workload("clip", "branches", clip, places(h100=(2, 8, 16), slow=(4, 8), apart=(4,))),
        Workload("conformer", "dense", conformer, places(h100=(2, 6, 8, 16), slow=(4, 8), pcie=(4,))),
        Workload("scans", "dense", scans, places(h100=(2, 3, 6, 8, 12, 16, 24), slow=(4, 6, 8, 12), apart=(4,))),
        Workload("recurrent", "dense", recurrent, places(h100=(2, 4, 8), slow=(4,))),
        Workload("two towers", "recommender", two_towers, places(h100=(2, 4, 8, 16), slow=(4, 8), pcie=(4,))),
        Workload("wide", "dense", wide, places(h100=(2, 4, 8, 12, 16), slow=(4, 8), apart=(2, 4, 8))),
        Workload("linears", "dense", linears, places(h100=(2, 4, 8), slow=(4, 8))),
        Workload("random graph", "dense", random_graph, places(h100=(2, 4, 8), slow=(4,))),
    )
}


def questions(workload: Workload, place: Place, seed: int) -> list[Question]:
    """All that is asked of a workload in a place, the choice first."""
    draw, found = random.Random(f"{seed} {workload.name} {place}"), dict[str, dict[str, Any]]()
    for _ in range(DRAWN):
        options = _options(workload, place.ranks, draw)
        found[json.dumps(options, sort_keys=True)] = options
    forced = [Question("forced", name, options) for name, options in found.items() if options]
    changed = [
        Question("slower", "slower devices", cluster=slower_devices),
        Question("less memory", "memory 85%", memory=0.85),
    ]
    if place.ranks > 1:
        changed.append(Question("slower", "slower links", cluster=slower_links))
    return [CHOICE, *forced, *changed]


def _options(workload: Workload, ranks: int, draw: random.Random) -> dict[str, Any]:
    """Options that may be at odds with each other."""
    options: dict[str, Any] = {}
    stages = draw.choice([n for n in (2, 3, 4, 6, 8) if ranks % n == 0] or [1]) if draw.random() < 0.45 else 1
    if stages > 1:
        options["pp"] = stages
        if draw.random() < 0.5:
            options["schedule"] = draw.choice(SCHEDULES)
    if ranks > stages and draw.random() < 0.75:
        axes = ("dp", "tp") if draw.random() < 0.2 else ("dp", MIDDLE.get(workload.family, "cp"), "tp")
        sizes = dict(zip(axes, factors(ranks // stages, len(axes), draw), strict=True))
        options["mesh"] = {axis: n for axis, n in sizes.items() if n > 1}
    if draw.random() < 0.2:
        options["strategy"] = draw.choice(STRATEGIES)
    if draw.random() < 0.25:
        options["recompute"] = draw.choice(("none", "selective", "full"))
    if draw.random() < 0.4:
        options["microbatches"] = draw.choice((1, 2, 4, 8, 16))
    if draw.random() < 0.1:
        options["overlap"] = False
    if workload.family == "long context" and draw.random() < 0.3:
        options["order"] = draw.choice((0, 2, 4, 8))
    return options


def factors(number: int, parts: int, draw: random.Random) -> Sequence[int]:
    """So many sizes whose product is the number."""
    sizes, prime = [1] * parts, 2
    while number > 1:
        while number % prime == 0:
            sizes[draw.randrange(parts)] *= prime
            number //= prime
        prime += 1
    return sizes
