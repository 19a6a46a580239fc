"""Architectures of timm, tiny: each with few blocks and channels, otherwise as its author set it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case
from .without_torchvision import timm

BATCH = 4
_ONE, _FEW = (1, 1, 1, 1), (16, 16, 32, 32)
_PYRAMID = {"depths": _ONE}
_FLAT: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4}
_WINDOWS: dict[str, Any] = {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4)}
_STAGES = {"layers": _ONE}
# Name of an architecture in timm: the side of its image, and what is small.
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "test_resnet": (64, {}),
    "resnet18": (64, {"channels": _FEW, "layers": _ONE}),
    "resnext50_32x4d": (64, _STAGES | {"cardinality": 4}),
    "seresnet50": (64, _STAGES),
    "res2net50_26w_4s": (64, _STAGES),
    "test_convnext": (64, {}),
    "test_convnext2": (64, {}),
    "test_efficientnet": (64, {}),
    "mobilenetv2_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "ghostnet_050": (64, {}),
    "densenet121": (64, {"growth_rate": 8, "block_config": (2, 2, 2)}),
    "test_vit": (64, {"img_size": 64}),
    "test_vit3": (64, {"img_size": 64}),
    "deit_tiny_distilled_patch16_224": (64, _FLAT),
    "beit_base_patch16_224": (64, _FLAT),
    "eva02_tiny_patch14_224": (56, _FLAT | {"img_size": 56}),
    "cait_xxs24_224": (64, _FLAT),
    "xcit_nano_12_p16_224": (64, _FLAT),
    "swin_tiny_patch4_window7_224": (64, _WINDOWS),
    "swinv2_tiny_window8_256": (64, _WINDOWS),
    "test_nfnet": (64, {}),
    "levit_128s": (64, {"img_size": 64, "embed_dim": (32, 48), "key_dim": 8, "num_heads": (2, 4), "depth": (1, 1)}),
    "twins_svt_small": (64, _PYRAMID | {"img_size": 64, "embed_dims": _FEW, "num_heads": (1, 2, 2, 2)}),
    "edgenext_xx_small": (64, _PYRAMID | {"global_block_counts": (0, 1, 1, 1)}),
    "davit_tiny": (64, _PYRAMID | {"embed_dims": _FEW, "num_heads": (1, 2, 2, 2)}),
    "crossvit_9_240": (240, {"embed_dim": (16, 32), "depth": ((1, 1, 0),)}),
    "test_byobnet": (64, {}),
    "test_mambaout": (64, {}),
}


def cases() -> list[Case]:
    """One case an architecture, an image classifier."""
    named = [Case(name, "timm", partial(_by_name, name, *of), _classified) for name, of in SMALL.items()]
    return named + [Case(name, "timm", partial(_built, make), _classified) for name, make in BUILT.items()]


def _built(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return make(), _images(64)


def _by_name(name: str, side: int, sizes: dict[str, Any]) -> tuple[nn.Module, Any]:
    return timm().create_model(name, num_classes=10, **sizes), _images(side)


def _images(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, side, side), torch.randint(0, 10, (BATCH,))


def _classified(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of all heads."""
    heads = output if isinstance(output, tuple) else (output,)
    return torch.stack([F.cross_entropy(head, labels) for head in heads]).mean()


def _models() -> Any:
    return timm().models


def _mixer(**given: Any) -> nn.Module:
    return _models().mlp_mixer.MlpMixer(10, 64, embed_dim=48, num_blocks=2, **given)


def _gmlp() -> nn.Module:
    of = _models().mlp_mixer
    return _mixer(mlp_ratio=6, block_layer=of.SpatialGatingBlock, mlp_layer=of.GatedMlp)


def _poolformer() -> nn.Module:
    given = {"mlp_act": nn.GELU, "mlp_bias": True, "layer_scale_init_values": 1e-5, "res_scale_init_values": None}
    of = _models().metaformer
    return of.MetaFormer(3, 10, **given, depths=_ONE, dims=_FEW, norm_layers=of.GroupNorm1, use_mlp_head=False)


def _caformer() -> nn.Module:
    of = _models().metaformer
    mixers = [of.SepConv, of.SepConv, of.Attention, of.Attention]
    norms = [of.LayerNorm2dNoBias] * 2 + [of.LayerNormNoBias] * 2
    return of.MetaFormer(3, 10, depths=_ONE, dims=(16, 32, 64, 64), token_mixers=mixers, norm_layers=norms)


def _volo() -> nn.Module:
    return _models().volo.VOLO(list(_ONE), 64, 3, 10, embed_dims=[32, 64, 64, 64], num_heads=[2, 4, 4, 4])


def _regnet() -> nn.Module:
    of = _models().regnet
    return of.RegNet(of.RegNetCfg(depth=6, w0=8, wa=8.0, wm=2.0, group_size=8, se_ratio=0.25), 3, 10)


def _repvgg() -> nn.Module:
    of = _models().byobnet
    cfg = of.model_cfgs["repvgg_a0"]
    blocks = tuple(replace(block, d=1, c=16) for block in cfg.blocks)
    return of.ByobNet(replace(cfg, blocks=blocks, stem_chs=16), 10)


def _vgg() -> nn.Module:
    return _models().vgg.VGG([16, "M", 32, "M", 32, "M", 32, "M", 32, "M"], 10, mlp_ratio=0.01)


def _maxxvit(name: str) -> nn.Module:
    of = _models().maxxvit
    cfg = of.model_cfgs[name]
    cfg = replace(cfg, embed_dim=_FEW, depths=_ONE, stem_width=16)
    cfg = replace(cfg, transformer_cfg=replace(cfg.transformer_cfg, dim_head=8))
    return of.MaxxVit(cfg, 64, num_classes=10)


def _hrnet() -> nn.Module:
    of, cfg = _models().hrnet, {}
    for name, stage in of.cfg_cls["hrnet_w18_small"].items():
        if isinstance(stage, dict):
            n = stage["num_branches"]
            stage = stage | {"num_blocks": (1,) * n, "num_channels": tuple(8 * 2**i for i in range(n))}
        cfg[name] = stage
    return of.HighResolutionNet(cfg | {"stem_width": 16}, num_classes=10)


BUILT: dict[str, Callable[[], nn.Module]] = {
    "mlp mixer": _mixer,
    "gmlp": _gmlp,
    "poolformer": _poolformer,
    "caformer": _caformer,
    "pvt_v2": lambda: _models().pvt_v2.PyramidVisionTransformerV2(
        3, 10, depths=_ONE, embed_dims=_FEW, num_heads=(1, 2, 2, 4)
    ),
    "volo": _volo,
    "focalnet": lambda: _models().focalnet.FocalNet(3, 10, embed_dim=16, depths=_ONE),
    "convmixer": lambda: _models().convmixer.ConvMixer(32, 2, num_classes=10),
    "regnety": _regnet,
    "repvgg": _repvgg,
    "vgg": _vgg,
    "maxvit": partial(_maxxvit, "maxvit_pico_rw"),
    "coatnet": partial(_maxxvit, "coatnet_pico_rw"),
    "hrnet": _hrnet,
}
