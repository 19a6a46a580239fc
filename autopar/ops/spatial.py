"""Ops on images: shuffling of pixels, unfolding into columns, sampling on a grid.

Batch and channels shard; the image's own dims stay whole.
"""

from __future__ import annotations

import torch

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker, all_float, leading
from autopar.ops.registry import define, named, register

Tensor = torch.Tensor
aten = torch.ops.aten

define(*named("im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle"), precision="follow")
define(*named("pixel_shuffle pixel_unshuffle channel_shuffle"), linear=lambda call: [{0}])


def _spatial(rank: int, names: str) -> None:
    """Ops whose last `rank` dims stay whole."""
    register(*named(names))(lambda call: leading(call, len(call.shapes[0]) - rank))


_spatial(3, "pixel_shuffle pixel_unshuffle")


@register("aten.glu", "aten.glu_backward")
def glu(call: OpCall) -> Rule:
    """The halved dim stays whole."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])

    def labels(shape: tuple[int, ...]) -> Labels:
        return tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(shape))

    out = call.out_shape
    return make.rule([labels(s) for s in call.shapes], [labels(out)])


@register("aten.im2col", "aten.col2im")
def unfold_image(call: OpCall) -> Rule:
    """(n, c, h, w) to (n, c·kernel, places) and back: batch and channels pass."""
    make = Maker()
    x, y = call.shapes[0], call.out_shape
    image, columns = (x, y) if call.op.startswith("aten.im2col") else (y, x)
    lead = make.add("n", image[0]) if len(image) == 4 else ()
    batch = (lead,) if len(image) == 4 else ()
    c = make.add("c", image[-3])
    kernel = make.add("k", columns[-2] // image[-3], whole=True)
    spread, packed = (*batch, c, (), ()), (*batch, (*c, *kernel), ())
    before, after = (spread, packed) if image is x else (packed, spread)
    return make.rule([before], [after], [{0}] if all_float(call) else [])


@register(*named("grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward"))
def grid_sampler(call: OpCall) -> Rule:
    """Batch and channels pass; gradients of the grid are sums over channels."""
    make = Maker()
    image = call.operand("input")
    n, c = make.add("n", image.shape[0]), make.add("c", image.shape[1])
    rest = ((),) * (len(image.shape) - 2)
    pictures, grid = (n, c, *rest), (n, *rest, ())
    if call.op.split(".")[1].endswith("_backward"):
        wanted = call["output_mask"]
        results: list[Labels | None] = [pictures if wanted[0] else None, grid if wanted[1] else None]
        return make.rule([pictures, pictures, grid], results)
    return make.rule([pictures, grid], [pictures], [{0}])


@lifts(aten.affine_grid_generator.default)
def _affine_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """(n, *image, d) of theta: (n, d, d + 1), a product with the places of one image, which all samples have."""
    image = size[2:]
    places = [_places(n, align_corners, theta) for n in image]
    grid = torch.meshgrid(*places, indexing="ij")[::-1]  # columns come first
    base = torch.stack([*grid, torch.ones_like(grid[0])], -1).reshape(-1, len(image) + 1)
    return torch.matmul(base, theta.mT).reshape(theta.shape[0], *image, len(image))


def _places(n: int, align_corners: bool, like: Tensor) -> Tensor:
    """Where n pixels are between -1 and 1: from corner to corner, or in the middle of their own parts; one is in the middle."""
    if n == 1:
        return torch.zeros([1], dtype=like.dtype, device=like.device)
    places = torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device)
    return places if align_corners else places * ((n - 1) / n)
