"""Denoising and encoding models of diffusers, tiny."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case

BATCH = 4


def output_loss(output: Any, target: Tensor) -> Tensor:
    """Mean squared error of the first output."""
    first = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
    return F.mse_loss(first, target)


def cases() -> list[Case]:
    """The models, with tensors of the shapes they take; the last tensor is the target."""
    return [
        Case(name, "diffusers", make, output_loss)
        for name, make in {
            "UNet2DModel": _unet,
            "UNet2DConditionModel": _conditioned,
            "UNet1DModel": _unet1d,
            "UNet3DConditionModel": _unet3d,
            "DiTTransformer2DModel": _dit,
            "PixArtTransformer2DModel": _pixart,
            "SD3Transformer2DModel": _sd3,
            "FluxTransformer2DModel": _flux,
            "AutoencoderKL": _vae,
            "VQModel": _vq,
            "AutoencoderTiny": _tiny_vae,
            "PriorTransformer": _prior,
            "WanTransformer3DModel": _wan,
            "CogVideoXTransformer3DModel": _cog,
            "SanaTransformer2DModel": _sana,
            "LTXVideoTransformer3DModel": _ltx,
        }.items()
    ]


Made = tuple[nn.Module, Any]
UNET: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}


def _steps() -> Tensor:
    return torch.randint(0, 100, (BATCH,))


def _image(channels: int = 4, size: int = 16) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _unet() -> Made:
    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **UNET,
    )
    return model, (_image(), _steps(), _image())


def _conditioned() -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **UNET,
    )
    return model, (_image(), _steps(), torch.randn(BATCH, 6, 32), _image())


def _unet1d() -> Made:
    model = diffusers.UNet1DModel(
        sample_size=64, in_channels=2, out_channels=2, block_out_channels=(16, 32, 32), extra_in_channels=16
    )
    return model, (torch.randn(BATCH, 2, 64), _steps(), torch.randn(BATCH, 2, 64))


def _unet3d() -> Made:
    model = diffusers.UNet3DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **UNET,
    )
    x = torch.randn(BATCH, 4, 4, 8, 8)
    return model, (x, _steps(), torch.randn(BATCH, 6, 32), torch.randn_like(x))


def _dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    return model.eval(), (_image(4, 8), _steps(), torch.randint(0, 10, (BATCH,)), _image(4, 8))


class _Named(nn.Module):
    """A model that takes its tensors by name, called by position."""

    def __init__(self, model: nn.Module, names: str) -> None:
        super().__init__()
        self.model, self.names = model, names.split()

    def forward(self, *tensors: Tensor) -> Any:
        return self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=False)


def _pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        cross_attention_dim=32, caption_channels=16, norm_num_groups=4, use_additional_conditions=False,
    )  # fmt: skip
    named = _Named(model, "hidden_states encoder_hidden_states timestep")
    return named, (_image(4, 8), torch.randn(BATCH, 6, 16), _steps(), _image(8, 8))


def _sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    named = _Named(model, "hidden_states encoder_hidden_states pooled_projections timestep")
    return named, (_image(4, 8), torch.randn(BATCH, 6, 32), torch.randn(BATCH, 16), _steps(), _image(4, 8))


def _flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    named = _Named(model, "hidden_states encoder_hidden_states pooled_projections timestep img_ids txt_ids")
    tensors = (torch.randn(BATCH, 16, 4), torch.randn(BATCH, 6, 32), torch.randn(BATCH, 32), torch.rand(BATCH))
    return named, (*tensors, torch.zeros(16, 3), torch.zeros(6, 3), torch.randn(BATCH, 16, 4))


def _vae() -> Made:
    model = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), latent_channels=4, norm_num_groups=8,
    )  # fmt: skip
    return model, (_image(3), _image(3))


def _vq() -> Made:
    model = diffusers.VQModel(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8, num_vq_embeddings=16, latent_channels=3,
    )  # fmt: skip
    return model, (_image(3), _image(3))


def _tiny_vae() -> Made:
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
    ), (_image(3), _image(3))  # fmt: skip


def _prior() -> Made:
    model = diffusers.PriorTransformer(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=4,
    )
    named = _Named(model, "hidden_states timestep proj_embedding encoder_hidden_states")
    tensors = (torch.randn(BATCH, 16), _steps(), torch.randn(BATCH, 16), torch.randn(BATCH, 5, 16))
    return named, (*tensors, torch.randn(BATCH, 16))


def _wan() -> Made:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    x = torch.randn(BATCH, 4, 2, 8, 8)
    named = _Named(model, "hidden_states timestep encoder_hidden_states")
    return named, (x, _steps(), torch.randn(BATCH, 6, 16), torch.randn_like(x))


def _cog() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=4, text_embed_dim=8,
        num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=6,
    )  # fmt: skip
    x = torch.randn(BATCH, 2, 4, 8, 8)
    named = _Named(model, "hidden_states encoder_hidden_states timestep")
    return named, (x, torch.randn(BATCH, 6, 8), _steps(), torch.randn_like(x))


def _sana() -> Made:
    model = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=4, num_cross_attention_heads=2,
        cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8, sample_size=8, patch_size=1,
    )  # fmt: skip
    named = _Named(model, "hidden_states encoder_hidden_states timestep")
    return named, (_image(4, 8), torch.randn(BATCH, 6, 8), _steps(), _image(4, 8))


def _ltx() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=2,
        caption_channels=16,
    )  # fmt: skip

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, text: Tensor, step: Tensor, mask: Tensor) -> Any:
            return self.model(x, text, step, mask, num_frames=2, height=4, width=4, return_dict=False)

    x = torch.randn(BATCH, 32, 4)
    return Video(), (x, torch.randn(BATCH, 6, 16), _steps(), torch.ones(BATCH, 6), torch.randn_like(x))
