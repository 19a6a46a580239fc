"""Resampling and padding of images. Batch and channels shard, and so do the image's dims: what a block of the result reads of
other blocks is sent (`rows.py`), but for nearest neighbours, which lie in the same block.

Not in blocks: dims whose corners are aligned, or whose scale is not that of their sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.call import OpCall
from autopar.ir.rule import Carried, Labels, Rule
from autopar.ops import rows
from autopar.ops.labels import Maker, all_float, leading
from autopar.ops.registry import Block, define, named, register, resized
from autopar.runtime.kernels.images.images import CUBIC, LINEAR, pad_window, resampled_window

define(*named("upsample_nearest1d upsample_nearest2d upsample_nearest3d"), precision="follow")


def _backward(call: OpCall) -> bool:
    return call.op.split(".")[1].endswith("_backward")


def _sides(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the image and of what is made of it."""
    return (call.out_shape, call.shapes[0]) if _backward(call) else (call.shapes[0], call.out_shape)


# --- resampling


def _scales(call: OpCall, dim: int) -> float | None:
    """The scale of a dim that the caller gives; None where there is none."""
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
    rank = len(call.shapes[0]) - 2
    value = call.get(names[rank][dim - 2])
    return None if value is None else float(value)


def _true_scale(call: OpCall, dim: int) -> bool:
    image, made = _sides(call)
    scale = _scales(call, dim)
    return scale is None or scale * image[dim] == made[dim]


def _nearest_aligned(image: int, made: int) -> bool:
    """Whether torch, which multiplies in float32, finds the nearest row of every row in its own block."""
    if image % made and made % image:
        return False
    rows_made = torch.arange(made)
    exact = rows_made * image // made
    return all(
        torch.equal((rows_made.to(dtype) * torch.tensor(image / made, dtype=dtype)).floor().long(), exact)
        for dtype in (torch.float32, torch.float64)
    )


def resample(call: OpCall) -> Rule:
    """Dims in blocks where a block of the result is made of a block of the image and a few rows beyond."""
    if "scale_factors" in call.arguments:
        return leading(call, 2)
    make, (image, made) = Maker(), _sides(call)
    nearest = "nearest" in call.op
    pairs, lead = [], tuple(make.add(f"d{i}", n) for i, n in enumerate(image[:2]))
    for dim in range(2, len(image)):
        whole = not _true_scale(call, dim) or bool(call.get("align_corners"))
        if nearest and not whole and _nearest_aligned(image[dim], made[dim]):
            pairs.append(rows.aligned(make, dim, image[dim], made[dim]))
        elif nearest or whole:
            pairs.append(((), ()))
        else:
            pairs.append(rows.paired(make, dim, image[dim], made[dim]))
    x, y = rows.labelled(lead, pairs)
    before, after = (y, x) if _backward(call) else (x, y)
    return make.rule([before], [after], carried=rows.in_blocks(make, range(2, len(image))))


def _wide_image(call: OpCall, dim: int, ranks: int) -> rows.Wide:
    image, made = _sides(call)
    taps = CUBIC if "bicubic" in call.op else LINEAR
    window = resampled_window(image[dim] // ranks, made[dim] // ranks, taps)
    return window, image[dim], "result" if _backward(call) else 0


def _nearest(block: Block) -> dict[str, Any]:
    """Sizes of the blocks."""
    if "scale_factors" in block.call.arguments:
        return {}
    if not _backward(block.call):
        return {"output_size": block.result_shape()[2:]}
    spec = block.rule.operand_spec(0, block.strategy, block.mesh)
    assert spec is not None
    return {
        "output_size": list(spec.local_shape(block.call.shapes[0], block.mesh)[2:]),
        "input_size": block.result_shape(),
    }


def _nearest_whole(call: OpCall) -> dict[str, Any]:
    if "scale_factors" in call.arguments:
        return {}
    sizes = {"output_size": list(_sides(call)[1][2:])}
    return sizes | ({"input_size": list(call.out_shape)} if _backward(call) else {})


_size = resized("input_size")
for _rank, _modes in ((1, "linear nearest"), (2, "bilinear nearest bicubic"), (3, "trilinear nearest")):
    for _name in (f"upsample_{mode}{_rank}d" for mode in _modes.split()):
        for _op in (_name, f"{_name}_backward"):
            if "nearest" in _name:
                register(f"aten.{_op}", localize=_nearest, globalize=_nearest_whole)(resample)
                continue
            _facts: dict[str, Any] = {"localize": rows.told}
            if _op != _name:
                _facts = {
                    "localize": lambda block: {**rows.told(block), **_size["localize"](block)},
                    "globalize": _size["globalize"],
                }
            register(f"aten.{_op}", carrier=f"images.{_op}", sends=rows.sends_rows(_wide_image), **_facts)(resample)


# --- pads


def _pads(call: OpCall) -> dict[int, tuple[int, int]]:
    """Rows before and after of every dim that is padded (negative: cut)."""
    sides, rank = list(call.get("pad") or call.get("padding") or []), len(_sides(call)[0])
    by_dim = {rank - 1 - k: (sides[2 * k], sides[2 * k + 1]) for k in range(len(sides) // 2)}
    return {dim: pair for dim, pair in by_dim.items() if pair != (0, 0)}


def pad(call: OpCall) -> Rule:
    """Dims that are not padded pass; of those in blocks only the first and the last are padded, and borders move."""
    make, (image, made), pads = Maker(), _sides(call), _pads(call)
    pairs: list[tuple[rows.Dim, rows.Dim]] = []
    for dim, n in enumerate(image):
        label = make.add(f"d{dim}", n) if dim not in pads else ()
        pairs.append(rows.paired(make, dim, n, made[dim]) if dim in pads else (label, label))
    x, y = rows.labelled((), pairs)
    carried: list[Carried] = rows.in_blocks(make, pads)
    linear = [{0}] if call.get("value") in (None, 0, 0.0) and all_float(call) else []
    if _backward(call):
        return make.rule([y, x], [x], carried=carried)
    operands: list[Labels | None] = [x]
    return make.rule(operands, [y], linear, carried)


def _wide_pad(call: OpCall, dim: int, ranks: int) -> rows.Wide:
    image, _ = _sides(call)
    window = pad_window(image[dim], ranks, *_pads(call)[dim], _outside(call))
    return window, image[dim], "result" if _backward(call) else 0


def _outside(call: OpCall) -> str:
    name = call.op.split(".")[1]
    return "reflect" if name.startswith("reflection") else "edge" if name.startswith("replication") else "fill"


for _name in (
    "constant_pad_nd",
    *(f"{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)),
):
    for _op in (_name, f"{_name}_backward") if _name != "constant_pad_nd" else (_name,):
        register(f"aten.{_op}", localize=rows.told, carrier=f"images.{_op}", sends=rows.sends_rows(_wide_pad))(pad)
