"""The cases of `benchmarks.properties`: models on the meta device, clusters, and what is asked of the compiler there.

A workload is a model with a batch; a place is a family of machines and a number of their devices, such that more devices of a
family have fewer ones of it among them. Of a workload in a place the search is asked for its choice, then for the best plan
under options that leave it less, and for the choice under a change that can only harm or means nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import ClusterSpec
from autopar.cluster import resized
from autopar.cluster.device import DeviceSpec
from autopar.costmodel.estimator.shape import TransformerShape
from benchmarks.calibrated_models import Bags
from benchmarks.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, Llama, LlamaShape, UNet
from benchmarks.published_models import DEEPSEEK_V3, MIXTRAL, QWEN3_30B, Transformer
from tests.branching import Driving, driving_loss
from tests.zoo.models import ADAMW, SGD, token_loss
from tests.zoo.others import ResNet
from tests.zoo.transformers import T5

Made = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]
"""A model, its global batch, and the further arguments of `compile`."""

SLOWER = 1.5
"""How many times as long a device or a message takes on the slower machines that are asked about."""
TIERED = "a100 tiers"
"""The family whose devices have memory tiers."""


class Place(NamedTuple):
    """So many devices of a family of machines."""

    family: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks} {self.family}"


@dataclass(frozen=True)
class Workload:
    """A model with a batch, and where it is planned. make: gives it; axes: further meshes that are forced, by name."""

    name: str
    family: str
    make: Callable[[], Made]
    places: tuple[Place, ...]
    meshes: Mapping[str, Callable[[int], Mapping[str, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A question to the search in a place. kind: "choice", "forced", or the law that a change is to obey; options: that
    differ from the defaults; cluster: the place's, changed; memory: the share of the choice's peak that a rank may take."""

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Callable[[ClusterSpec], ClusterSpec] = lambda cluster: cluster
    memory: float | None = None


# --- places

DGX = {"h100": "dgx-h100", "a100": "dgx-a100"}
NODES = {
    "ethernet": ("a100", 4, 1.25e9),
    "slow": ("a100", 4, 3e9),
    "cloud": ("h100", 8, 1.25e10),
    "apart": ("h100", 1, 2.5e10),
}
"""The device, how many a node has, and the bytes per second between nodes, of other families."""


def cluster_at(place: Place) -> ClusterSpec:
    """The cluster of a place."""
    family, n = place
    if family in DGX:
        return resized(ClusterSpec.preset(DGX[family], -(-n // 8)), n)
    if family == TIERED:
        return cluster_at(Place("a100", n)).with_tiers()
    if family == "pcie":
        return resized(ClusterSpec.preset("pcie-a100", -(-n // 8)), n)
    if family == "mixed":
        return mixed(n)
    device, per_node, bandwidth_Bps = NODES[family]
    nodes = -(-n // per_node)
    whole = ClusterSpec.homogeneous(
        devices=nodes * per_node, device=device, devices_per_node=per_node, inter_bandwidth_Bps=bandwidth_Bps
    )
    return resized(whole, n)


def mixed(ranks: int, backwards: bool = False) -> ClusterSpec:
    """Nodes of two H100 and nodes of two A100, as many of each, the slower ones listed first where it is backwards."""
    kinds = ["a100", "h100"] if backwards else ["h100", "a100"]
    nodes = [{"count": ranks // 4, "device": device, "devices_per_node": 2} for device in kinds]
    return ClusterSpec.from_dict({"name": f"mixed-{ranks}", "nodes": nodes})


def slower_links(cluster: ClusterSpec) -> ClusterSpec:
    """The same devices behind links over which every message takes longer."""
    return replace(cluster, levels=tuple(level.slower(SLOWER) for level in cluster.levels))


def slower_devices(cluster: ClusterSpec) -> ClusterSpec:
    """The same links between devices that take longer for whatever they compute."""
    return replace(cluster, devices=tuple((n, DeviceSpec.slower(device, SLOWER)) for n, device in cluster.devices))


# --- models


def llama(shape: LlamaShape, layers: int, batch: int, seq: int) -> Made:
    """Some layers of a Llama in bf16, trained with AdamW."""
    model = Llama(replace(shape, layers=layers), seq).to(torch.bfloat16)
    return model, (ids(batch, seq),) * 2, {"optimizer": ADAMW}


def published(shape: TransformerShape, layers: int, batch: int) -> Made:
    """Some layers of a published transformer in bf16, trained with AdamW."""
    model = Transformer(replace(shape, layers=layers)).to(torch.bfloat16)
    return model, (ids(batch, shape.seq_len),) * 2, {"optimizer": ADAMW}


def t5(batch: int = 64, width: int = 512, layers: int = 3) -> Made:
    """An encoder and a decoder of so many layers, sources of 512 tokens, targets of 128."""
    model = T5(32128, 512, 128, width, layers).to(torch.bfloat16)
    return model, (ids(batch, 512), ids(batch, 128), ids(batch, 128)), {"loss_fn": token_loss, "optimizer": ADAMW}


def unet(batch: int = 64) -> Made:
    """The noise of images of 64 x 64."""
    model, images = UNet((64, 128, 256)), torch.zeros(batch, 3, 64, 64)
    return model, (images, torch.zeros(batch), images), {"loss_fn": F.mse_loss, "optimizer": ADAMW}


def resnet(batch: int = 256) -> Made:
    """Images of 64 x 64, normalised over the batch."""
    inputs = torch.zeros(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)
    return ResNet(128, 1000), inputs, {"loss_fn": F.cross_entropy, "optimizer": SGD}


def bags(batch: int = 8192) -> Made:
    """Bags of 64 of four million words."""
    return Bags(1 << 22, 128, 3), (ids(batch, 64), torch.zeros(batch, dtype=torch.long)), {"optimizer": ADAMW}


def driving(batch: int = 256) -> Made:
    """Three encoders of several costs into two heads."""
    rows = (torch.zeros(batch, 512, channels) for channels in (12, 8, 4))
    targets = torch.zeros(batch, 4), torch.zeros(batch, dtype=torch.long)
    return Driving(1024, (4, 3, 2)), (*rows, *targets), {"loss_fn": driving_loss, "optimizer": SGD}


def ids(batch: int, seq: int) -> Tensor:
    """Token ids: (batch, seq)."""
    return torch.zeros(batch, seq, dtype=torch.long)


GPT2 = TransformerShape(layers=12, hidden=768, heads=12, ffn=3072, vocab=50304, seq_len=1024, name="gpt2")
DEEPSEEK_OF_TWO = replace(DEEPSEEK_V3, first_dense_layers=1)
"""The shape for two layers, one of which is then a mixture."""
EXPERTS: dict[str, Callable[[int], dict[str, int]]] = {
    "ep": lambda n: {"ep": n},
    "dp×ep=2": lambda n: {"dp": n // 2, "ep": 2},
    "ep×tp=2": lambda n: {"ep": n // 2, "tp": 2},
}
CONTEXT: dict[str, Callable[[int], dict[str, int]]] = {
    "cp": lambda n: {"cp": n},
    "dp×cp=4": lambda n: {"dp": n // 4, "cp": 4},
}


def places(**families: tuple[int, ...]) -> tuple[Place, ...]:
    """Places by family; underscores stand for spaces."""
    return tuple(Place(family.replace("_", " "), n) for family, sizes in families.items() for n in sizes)


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            "gpt2",
            "dense",
            functools.partial(published, GPT2, 4, 48),
            places(h100=(1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 64), pcie=(4, 8), ethernet=(4, 6, 8, 12), mixed=(4, 8)),
        ),
        Workload(
            "8B",
            "dense",
            functools.partial(llama, LLAMA_8B, 4, 32, 4096),
            places(h100=(2, 4, 6, 8, 12, 16, 32), a100_tiers=(2, 4), ethernet=(8, 16), mixed=(8,)),
        ),
        Workload(
            "70B", "dense", functools.partial(llama, LLAMA_70B, 4, 64, 4096), places(h100=(8, 16, 32, 64), a100=(8, 24))
        ),
        Workload(
            "405B", "dense", functools.partial(llama, LLAMA_405B, 4, 512, 8192), places(h100=(64, 256, 1024, 2048))
        ),
        Workload(
            "Mixtral",
            "mixture",
            functools.partial(published, MIXTRAL, 2, 64),
            places(h100=(4, 8, 16, 64), a100=(8,)),
            EXPERTS,
        ),
        Workload("Qwen3", "mixture", functools.partial(published, QWEN3_30B, 2, 64), places(h100=(8, 16, 24)), EXPERTS),
        Workload(
            "DeepSeek-V3",
            "mixture",
            functools.partial(published, DEEPSEEK_OF_TWO, 2, 128),
            places(h100=(32, 64)),
            EXPERTS,
        ),
        Workload(
            "8B at 128k",
            "long context",
            functools.partial(llama, LLAMA_8B, 4, 4, 131072),
            places(h100=(8, 16, 32)),
            CONTEXT,
        ),
        Workload(
            "8B at 1M",
            "long context",
            functools.partial(llama, LLAMA_8B, 2, 1, 1048576),
            places(h100=(16, 64)),
            CONTEXT,
        ),
        Workload("unet", "convolutional", unet, places(h100=(1, 2, 4, 6, 8, 16), pcie=(2, 4, 8), ethernet=(8, 12))),
        Workload("resnet", "convolutional", resnet, places(h100=(1, 2, 3, 4, 8, 16), ethernet=(4, 8, 12))),
        Workload("t5", "encoder-decoder", t5, places(h100=(1, 2, 4, 8, 16), ethernet=(4, 8), pcie=(4, 8), mixed=(4,))),
        Workload(
            "bags",
            "recommender",
            bags,
            places(h100=(1, 2, 3, 4, 7, 8, 16), ethernet=(4, 8, 12), pcie=(4, 8), mixed=(4,)),
        ),
        Workload(
            "driving", "branches", driving, places(h100=(1, 2, 3, 4, 6, 8, 12, 16), ethernet=(4, 8), mixed=(4, 8))
        ),
    )
}


# --- questions

CHOICE = Question("choice", "choice")
TP = (2, 4, 8)
"""Sizes of forced tensor-parallel axes."""
MIDDLE = {"mixture": "ep", "dense": "cp", "long context": "cp"}
"""The axis in the middle of forced meshes of three, by family."""


def questions(workload: Workload, place: Place) -> list[Question]:
    """All that is asked of a workload in a place, the choice first."""
    return [CHOICE, *_forced(workload, place), *_changed(place)]


def _forced(workload: Workload, place: Place) -> list[Question]:
    """Options that leave the search less than it has."""
    n, found = place.ranks, dict[str, dict[str, Any]]()
    found["overlap=False"] = {"overlap": False}
    found |= {f"recompute={policy}": {"recompute": policy} for policy in ("none", "selective", "full")}
    found |= {f"microbatches={m}": {"microbatches": m} for m in (1, 2, 4, 8)}
    if place.family == TIERED:
        found |= {f"offload={kind}": {"offload": kind} for kind in ("none", "optimizer", "activations")}
    if n > 1:
        found |= {f"strategy={name}": {"strategy": name} for name in ("dp", "zero1", "zero3")}
        found |= {f"dp={n}": {"mesh": {"dp": n}}, "idle_ranks=False": {"idle_ranks": False}, "pp=1": {"pp": 1}}
        found |= {"axes tp=2": {"axes": {"tp": 2}}, "order=0": {"order": 0}}
    for k in TP:
        if n > k and n % k == 0:
            mesh = {"dp": n // k, "tp": k}
            found[f"tp={k}"] = {"mesh": mesh}
            found[f"megatron tp={k}"] = {"mesh": mesh, "strategy": "megatron"}
        if n == k:
            found[f"tp={k}"] = {"mesh": {"tp": k}}
    for order in (2, 4, n) if workload.family == "long context" else ():
        found[f"order={order}"] = {"order": order}
    for name, sizes in workload.meshes.items():
        if n % 4 == 0:
            found[name] = {"mesh": sizes(n)}
    for k, tp in ((2, 2), (4, 2), (8, 2), (2, 4)) if workload.family in MIDDLE else ():
        if n % (k * tp) == 0 and n > k * tp:
            middle = MIDDLE[workload.family]
            found[f"dp×{middle}={k}×tp={tp}"] = {"mesh": {"dp": n // (k * tp), middle: k, "tp": tp}}
    for stages in (2, 4):
        if n % stages == 0:
            found[f"pp={stages}"] = {"pp": stages}
            for schedule in ("1f1b", "zb-h1", "interleaved") if stages == 2 else ():
                found[f"pp={stages} {schedule}"] = {"pp": stages, "schedule": schedule}
            if n > stages and stages == 2:
                found[f"pp={stages} of dp"] = {"pp": stages, "mesh": {"dp": n // stages}}
            if n % (8 * stages) == 0 and stages == 2:
                middle = "ep" if workload.family == "mixture" else "cp"
                found[f"pp={stages} of three axes"] = {
                    "pp": stages,
                    "mesh": {"dp": n // (4 * stages), middle: 2, "tp": 2},
                }
    return [Question("forced", name, options) for name, options in found.items()]


def _changed(place: Place) -> list[Question]:
    """Changes that a step's seconds are to follow, or not to notice."""
    found = [
        Question("slower", "slower devices", cluster=slower_devices),
        *(Question("less memory", f"memory {share:.0%}", memory=share) for share in (0.85, 0.7)),
        *(Question("ended early", f"search_s={seconds:g}", {"search_s": seconds}) for seconds in (0.0, 0.5)),
        Question("same", "workers=2", {"workers": 2}),
    ]
    if place.ranks > 1:
        found.append(Question("slower", "slower links", cluster=slower_links))
    if place.family == "mixed":
        found.append(Question("same", "devices listed backwards", cluster=lambda c: mixed(c.size, backwards=True)))
    if place.ranks % 2 == 0 and place.ranks > 2:
        sizes = place.ranks // 2, 2
        found.append(Question("same as tp=2", "axes of other names", {"mesh": dict(zip("ab", sizes, strict=True))}))
    return found
