"""Image dims in blocks: what ranks get of each other, and that every op over windows then makes what eager makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.program import is_getitem, op_call
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.sends import sent_by
from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.kernels.images import halos
from autopar.runtime.kernels.images.halos import Window
from tests.ops.execution import Case, as_node, check_strategy
from tests.ops.generators import Draw
from tests.ops.traced import Function, check_gradients

Tensor = torch.Tensor
RANKS = (2, 4, 8)
RULES = RuleBook()

# --- what ranks get


def whole_window(x: Tensor, window: Window, rank: int) -> Tensor:
    """The rows that a rank wants, from the whole: the definition. x: (rows, …)."""
    rows, size = [], len(x)
    for position in range(rank * window.step - window.before, rank * window.step - window.before + window.length):
        if 0 <= position < size:
            rows.append(x[position])
        elif window.outside == "fill":
            rows.append(torch.full_like(x[0], 7.0))
        elif window.outside == "edge":
            rows.append(x[0 if position < 0 else size - 1])
        elif window.outside == "wrap":
            rows.append(x[position % size])
        else:
            rows.append(x[-position if position < 0 else 2 * (size - 1) - position])
    return torch.stack(rows)


def windows(draw: Draw) -> tuple[int, int, Window]:
    """Ranks, rows of a block, and any window, wider than blocks or beside them too."""
    ranks, block = draw.pick(*RANKS), draw.pick(1, 2, 3, 5)
    outside = draw.pick("fill", "edge", "reflect", "wrap")
    step, length = draw.pick(block, block, 1, block + 1), draw.pick(block, block + 2, 2 * block + 1, 1)
    before = draw.pick(0, 1, 2, -1)
    if outside == "reflect" and (
        before >= ranks * block or (ranks - 1) * step - before + length > 2 * ranks * block - 1
    ):
        outside = "edge"
    return ranks, block, Window(step, before, length, outside)


def with_messages(ranks: int, run: Callable[[Along], Any]) -> list[tuple[Any, int]]:
    """The result of every rank, and how many numbers it receives."""

    def on_rank(comm: Comm) -> tuple[Any, int]:
        start, got = comm._start, []

        def counted(call: Any) -> Any:
            got.append(call.out.numel())
            return start(call)

        comm._start = counted  # type: ignore[method-assign]
        return run(Along(comm, "sp")), sum(got)

    return run_threads(ranks, {"sp": ranks}, on_rank, timeout_s=60.0)


def check_windows(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw = Draw(data)
        ranks, block, window = windows(draw)
        dim, x = draw.pick(0, 1, 2), draw.f(ranks * block, 2, 3)
        gradients = [draw.f(window.length, 2, 3) for _ in range(ranks)]

        def run(along: Along) -> tuple[Tensor, Tensor]:
            own = x[along.index * block :][:block].movedim(0, dim)
            back = halos.overlapped(gradients[along.index].movedim(0, dim), dim, window, along, block)
            return halos.extended(own, dim, window, along, 7.0).movedim(dim, 0), back.movedim(dim, 0)

        leaf = x.clone().requires_grad_(True)
        expected = [whole_window(leaf, window, rank) for rank in range(ranks)]
        pulled = [(rows, g) for rows, g in zip(expected, gradients, strict=True) if rows.requires_grad]
        torch.autograd.backward([rows for rows, _ in pulled], [g for _, g in pulled])
        back = torch.zeros_like(x) if leaf.grad is None else leaf.grad
        got = with_messages(ranks, run)
        for rank, ((rows, own_back), _) in enumerate(got):
            assert torch.equal(rows, expected[rank].detach())
            torch.testing.assert_close(own_back, back[rank * block :][:block], rtol=0, atol=1e-12)
        once = with_messages(ranks, lambda along: halos.extended(x[along.index * block :][:block], 0, window, along))
        assert max(count for _, count in once) == 6 * halos.most_rows(window, ranks, block)

    check()


def test_ranks_get_the_rows_that_they_want_and_gradients_go_back() -> None:
    check_windows(40)


@pytest.mark.slow
def test_ranks_get_the_rows_that_they_want_and_gradients_go_back_at_length() -> None:
    check_windows(600)


def test_a_halo_is_the_rows_beyond_the_block_and_nothing_else() -> None:
    three = Window(4, 1, 6)
    assert halos.runs(three, 0, 2, 4) == ((-1, 0, 1), (0, 0, 4), (1, 0, 1))
    assert halos.runs(three, 1, 2, 4) == ((0, 3, 1), (1, 0, 4), (-1, 0, 1))
    assert halos.most_rows(three, 2, 4) == 1
    assert halos.most_rows(three, 4, 4) == 2
    assert halos.most_rows(Window(4, 0, 4), 4, 4) == 0


# --- ops: forward and backward against eager


def _sizes(draw: Draw, rank: int, ranks: int, stride: int) -> list[int]:
    """The sizes of an image of which one dim at least is cut into so many blocks."""
    sizes = [draw.pick(4, 6) for _ in range(rank)]
    sizes[draw.pick(*range(rank))] = ranks * draw.pick(*((2, 3) if ranks == 2 else (1, 2))) * stride
    return sizes


def convolution(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank, stride, dilation = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 3), draw.pick(1, 2)
    groups, kernel = draw.pick(1, 2), draw.pick(1, 2, 3, 4, 5)
    padding = draw.pick(dilation * (kernel - 1) // 2, (dilation * (kernel - 1) + 1) // 2)
    x = draw.f(1, 2 * groups, *_sizes(draw, rank, ranks, stride))
    w, b = draw.f(3 * groups, 2, *[kernel] * rank), draw.f(3 * groups)
    padding = max(padding, -(-(dilation * (kernel - 1) + 1 - min(x.shape[2:])) // 2))
    conv: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return lambda x, w, b: conv(x, w, b, stride, padding, dilation, groups), [x, w, b]


def transposed(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank, stride, groups = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 3), draw.pick(1, 2)
    kernel = draw.pick(*range(stride, stride + 4))
    padding, more = (kernel - stride + 1) // 2, (kernel - stride) % 2
    more = more if more < stride else 0
    x = draw.f(1, 2 * groups, *_sizes(draw, rank, ranks, 1))
    w, b = draw.f(2 * groups, 3, *[kernel] * rank), draw.f(3 * groups)
    conv: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    return lambda x, w, b: conv(x, w, b, stride, padding, more, groups), [x, w, b]


def max_pool(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank, stride, kernel, ceil = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 3), draw.pick(2, 3), draw.pick(False, True)
    x, padding = draw.f(2, 2, *_sizes(draw, rank, ranks, stride)), draw.pick(0, 1)
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    if draw.pick(False, True) and rank > 1:
        return lambda x: pool(x, kernel, stride, padding, 1, ceil, return_indices=True), [x]
    return lambda x: pool(x, kernel, stride, padding, 1, ceil), [x]


def avg_pool(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank, stride, kernel = draw.pick(1, 2, 2, 3), draw.pick(1, 2, 3), draw.pick(2, 3, 4)
    padding, ceil, counts = (kernel - draw.pick(0, 1)) // 2, draw.pick(False, True), draw.pick(False, True)
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    x = draw.f(2, 2, *_sizes(draw, rank, ranks, stride))
    return lambda x: pool(x, kernel, stride, padding, ceil, counts), [x]


def pad(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank, mode = draw.pick(1, 2), draw.pick("constant", "reflect", "replicate")
    x = draw.f(2, 2, *_sizes(draw, rank, ranks, 2))
    sides = [
        n for size in reversed(x.shape[2:]) for n in draw.pick((ranks // 2, ranks // 2), (1, -1), (0, ranks), (0, 0))
    ]
    if mode == "reflect" and any(n >= size for n, size in zip(sides[1::2], reversed(x.shape[2:]), strict=True)):
        mode = "replicate"
    return lambda x: F.pad(x, sides, mode), [x]


def interpolation(draw: Draw, ranks: int) -> tuple[Function, list[Tensor]]:
    rank = draw.pick(1, 2, 2, 3)
    mode = draw.pick(*(("linear",), ("bilinear", "bicubic"), ("trilinear",))[rank - 1])
    before, after = draw.pick((1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (4, 6))
    sizes = [ranks * before for _ in range(rank)] if rank < 3 else [ranks * before, 2, 2]
    out = [ranks * after for _ in range(rank)] if rank < 3 else [ranks * after, 4, 3]
    return lambda x: F.interpolate(x, out, mode=mode), [draw.f(1, 2, *sizes)]


LAYERS = {f.__name__: f for f in (convolution, transposed, max_pool, avg_pool, pad, interpolation)}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def check_in_blocks(function: Function, tensors: list[Tensor], ranks: int) -> int:
    """Values and gradients of the captured function are eager's, and each op that can is run with its image in blocks."""
    template, values = check_gradients(function, [t.requires_grad_(True) for t in tensors])
    mesh, generator, tried = Mesh.of(sp=ranks), torch.Generator().manual_seed(2), 0
    for node in template.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
        value, case = values[node.name], Case(node.target, args, kwargs)
        whole = [t if isinstance(t, Tensor) else None for t in (value if isinstance(value, (tuple, list)) else [value])]
        rule = RULES.rule(op_call(as_node(case, whole)[0]))
        for strategy in rule.strategies(mesh):
            if strategy[0].startswith("+"):
                check_strategy(case, whole, mesh, strategy, generator, rule)
                tried += 1
    return tried


def sweep(layer: str, examples: int) -> int:
    tried = 0

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal tried
        ranks = data.draw(st.sampled_from(RANKS))
        tried += check_in_blocks(*LAYERS[layer](Draw(data), ranks), ranks)

    check()
    return tried


@pytest.mark.few(1)
@every_layer
def test_layers_on_blocks_of_an_image_equal_eager(layer: str) -> None:
    assert sweep(layer, 25) > 10


@pytest.mark.slow
@every_layer
def test_layers_on_blocks_of_an_image_equal_eager_at_length(layer: str) -> None:
    assert sweep(layer, 400) > 300


def test_blocks_of_rows_and_columns_at_once_bring_corners() -> None:
    shapes, generator = ((1, 2, 4, 6), (3, 2, 3, 3), (3,)), torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    template, values = check_gradients(lambda x, w, b: F.conv2d(x, w, b, 1, 1), [x.requires_grad_(True), w, b])
    mesh, tried = Mesh.of(a=2, b=3), 0
    for node in template.graph.nodes:
        if node.op == "call_function" and "conv" in str(node.target):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            case = Case(node.target, args, kwargs)
            strategy = ("+h2+y2", "+h3+y3")
            check_strategy(case, [values[node.name]], mesh, strategy, generator)
            tried += 1
    assert tried == 2


# --- which choices there are


def rule_of(function: Function, *tensors: Tensor) -> Any:
    """The rule of the first op over an image."""
    template, _ = check_gradients(function, list(tensors))
    calls = [template.op_calls[n.name] for n in template.ops]
    return next(RULES.rule(call) for call in calls if any(w in call.op for w in ("conv", "pool", "pad", "upsample")))


def test_kernels_of_one_row_and_patches_need_no_messages() -> None:
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    for function in (
        lambda x: F.conv2d(x, x.new_ones(3, 2, 1, 1)),
        lambda x: F.conv2d(x, x.new_ones(3, 2, 2, 2), stride=2),
        lambda x: F.conv_transpose2d(x, x.new_ones(2, 3, 2, 2), stride=2),
        lambda x: F.adaptive_avg_pool2d(x, 4),
        lambda x: F.interpolate(x, scale_factor=2),
    ):
        rule = rule_of(function, x)
        assert {"s2", "s3"} <= set(rule.shardable)
        assert not rule.carries


def test_what_is_not_the_same_on_blocks_is_not_offered() -> None:
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    for function in (
        lambda x: F.interpolate(x, (16, 16), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=1.6, mode="bilinear"),
        lambda x: F.interpolate(x, (12, 12)),
    ):
        rule = rule_of(function, x)
        assert not rule.carries
        assert set(rule.shardable) <= {"d0", "d1"}


def test_the_message_is_the_rows_of_both_neighbours() -> None:
    x, w = torch.randn(1, 2, 8, 5), torch.randn(3, 2, 3, 3)
    template, _ = check_gradients(lambda x, w: F.conv2d(x, w, None, 1, 1), [x, w])
    call = next(template.op_calls[n.name] for n in template.ops)
    for ranks, rows in ((2, 1), (4, 2)):
        (sent,) = sent_by(call, RULES.rule(call), ("+h2+y2",), Mesh.of(sp=ranks))
        assert (sent.kind, sent.axis, sent.nbytes) == ("shift", "sp", rows * 2 * 5 * 4)
