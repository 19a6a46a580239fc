"""Pools. Batch and channels shard, and so do the image's dims: a window that reads rows of other blocks gets them (`rows.py`)."""

from __future__ import annotations

from typing import Any

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops import rows
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, define, named, register
from autopar.runtime.kernels.images.images import conv_window
from autopar.runtime.kernels.images.pools import each

define(
    *named("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d"),
    precision="follow",
)
define("aten.max_pool2d_with_indices", result_names=("pooled", "argmax"), always_carried=True)


def _rank(call: OpCall) -> int:
    """How many dims the pool's image has: `aten.avg_pool2d.default` has two."""
    name = call.op.split(".")[1]
    return int(name[name.index("pool") + 4])


def _backward(call: OpCall) -> bool:
    return call.op.split(".")[1].endswith("_backward")


def _sides(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the image and of what is made of it."""
    if _backward(call):
        return call.shapes[1], call.shapes[0]
    return call.shapes[0], call.out_shape


def _rule(call: OpCall, pair: rows.Pair) -> Rule:
    """pair: how a dim of the image and of the pooled one are labelled."""
    make, rank, (image, pooled) = Maker(), _rank(call), _sides(call)
    first = len(image) - rank
    lead = tuple(make.add(f"d{i}", n) for i, n in enumerate(image[:first]))
    spatial = range(first, len(image))
    x, y = rows.labelled(lead, [pair(make, dim, image[dim], pooled[dim]) for dim in spatial])
    operands: list[Labels | None] = [y, x, y] if _backward(call) else [x]
    return make.rule(
        operands[: len(call.shapes)],
        [x if _backward(call) else y] * len(call.results),
        carried=rows.in_blocks(make, spatial),
    )


def _wide(call: OpCall, dim: int, ranks: int) -> rows.Wide:
    """The image, and what its ranks want."""
    image, pooled = _sides(call)
    rank, i = _rank(call), dim - len(image)
    kernel = each(call["kernel_size"], rank)
    stride = each(call.get("stride") or kernel, rank)
    padding, dilation = (each(call.get(name, default), rank) for name, default in (("padding", 0), ("dilation", 1)))
    window = conv_window(pooled[dim] // ranks, kernel[i], stride[i], padding[i], dilation[i])
    return window, image[dim], "result" if _backward(call) else 0


def _no_rows(call: OpCall, dim: int, ranks: int) -> rows.Wide:
    """Blocks of the result are made of blocks of the image: only places must be told where a block begins."""
    image, _ = _sides(call)
    return conv_window(image[dim] // ranks, 1, 1, 0, 1), image[dim], 0


def pool(call: OpCall) -> Rule:
    """A pool that reads rows of other blocks, or says places, which are told where a block begins."""
    return _rule(call, rows.paired)


def adaptive_average(call: OpCall) -> Rule:
    """Blocks of the result are means of blocks of the image."""
    return _rule(call, rows.aligned)


def _averaged(block: Block) -> dict[str, Any]:
    return {"output_size": block.result_shape()[-_rank(block.call) :]}


for _dims in (2, 3):
    for _name in (f"max_pool{_dims}d_with_indices", f"avg_pool{_dims}d", f"adaptive_max_pool{_dims}d"):
        for _op in (_name, f"{_name}_backward"):
            _sends = rows.sends_rows(_no_rows if "adaptive" in _op else _wide)
            register(f"aten.{_op}", localize=rows.told, carrier=f"pools.{_op}", sends=_sends)(pool)
    register(
        f"aten._adaptive_avg_pool{_dims}d",
        localize=_averaged,
        globalize=lambda call: {"output_size": list(call.out_shape[-_rank(call) :])},
    )(adaptive_average)
    register(f"aten._adaptive_avg_pool{_dims}d_backward")(adaptive_average)
