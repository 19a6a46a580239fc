"""The results and the scratch of one line and of one gather, against bytes counted by hand on small tensors of float32.

A collective's result is counted with the buffer that it arrives in, which is another one wherever the dim that is joined
is not the first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.ir.lines import Compute, Convert, Ref, Site
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.ir.types import TensorType
from autopar.passes.memory import probe
from autopar.passes.memory.probe import GatheredShard, Probe, local, needs_data
from autopar.passes.played.tensors import Effect, Layout, Out
from autopar.passes.rules.memo import Memo
from autopar.runtime.comm.devices import CPU, Device
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.kernels import ops
from autopar.runtime.kernels.attention import attention as attention_runtime

F32, BF16 = torch.float32, torch.bfloat16
A100 = Device("cuda", (8, 0))
ALONE, TWO = Mesh.of(), Mesh.of(dp=2)
X = Layout.dense((8, 6), F32)
XB = 8 * 6 * 4
"""Bytes of X."""
SHARD = Layout.dense((4, 6), F32)
B = 4 * 6 * 4
"""Bytes of SHARD."""


def compute(op: str, outs: tuple[str, ...] = ("y",), **kwargs: object) -> Compute:
    return Compute(op, kwargs, outs=outs)


def effect(line: Compute | Convert, mesh: Mesh = ALONE, **layouts: Layout | None) -> Effect:
    return Probe(mesh).effect(line, layouts)[1]


def made(one: Effect) -> tuple[tuple[int, ...], int]:
    """Bytes of the storages that a line brings, and the most at once."""
    return one.fresh, one.peak


# --- layouts


def test_a_dense_layout_is_the_one_of_a_new_tensor() -> None:
    for shape in ((), (5,), (2, 3, 4), (3, 1, 2), (2, 0, 3)):
        assert Layout.dense(shape, F32) == Layout.of(torch.empty(shape))


def test_a_layout_gives_back_the_tensor_that_it_describes() -> None:
    turned = Layout.of(torch.empty(8, 6, dtype=BF16).t())
    assert (turned.shape, turned.stride, turned.nbytes) == ((6, 8), (1, 6), 96)
    assert Layout.of(turned.tensor()) == turned
    assert turned.tensor().is_meta


def test_a_sharded_type_has_the_layout_of_its_block() -> None:
    type_ = TensorType((8, 6), F32)
    assert local(type_, Spec((("dp",), ())), TWO) == Layout.dense((4, 6), F32)
    assert local(type_, Spec(((), ("dp",))), TWO) == Layout((8, 3), (3, 1), F32)


# --- ops


def test_a_view_makes_no_bytes() -> None:
    assert effect(compute("aten.t.default", self=Ref("x")), x=X) == Effect(
        (Out(0, -1, Layout((6, 8), (1, 6), F32)),), (), 0
    )


def test_a_copy_makes_the_bytes_of_its_result() -> None:
    assert effect(compute("aten.clone.default", self=Ref("x")), x=X) == Effect((Out(-1, 0, X),), (XB,), XB)


def test_a_reshape_is_a_view_of_what_is_dense_and_a_copy_of_what_is_turned() -> None:
    line = compute("aten.reshape.default", self=Ref("x"), shape=[48])
    assert made(effect(line, x=X)) == ((), 0)
    assert made(effect(line, x=Layout((6, 8), (1, 6), F32))) == ((XB,), XB)


def test_a_view_names_the_operand_that_it_is_of() -> None:
    line = compute("aten.expand_as.default", self=Ref("small"), other=Ref("x"))
    names, one = Probe(ALONE).effect(line, {"x": X, "small": Layout.dense((8, 1), F32)})
    assert names[one.outs[0].alias] == "small"
    assert one.outs[0].layout == Layout((8, 6), (1, 0), F32)


def test_the_parts_of_a_split_are_views_of_one_operand() -> None:
    line = compute("aten.split.Tensor", ("a", "b", "c"), self=Ref("x"), split_size=2, dim=1)
    one = effect(line, x=X)
    assert made(one) == ((), 0)
    assert [out.alias for out in one.outs] == [0, 0, 0]


def test_every_fresh_result_has_its_own_storage() -> None:
    one = effect(compute("aten.max.dim", ("values", "indices"), self=Ref("x"), dim=1), x=X)
    assert made(one) == ((8 * 4, 8 * 8), 8 * 4 + 8 * 8)
    assert [out.fresh for out in one.outs] == [0, 1]


DROPOUT = compute("autopar.dropout", x=Ref("x"), p=0.5, site=Site(0))


def test_dropout_needs_a_tile_of_hashes_beside_its_result() -> None:
    assert effect(DROPOUT, x=X).fresh == (XB,)
    large = effect(DROPOUT, x=Layout.dense((64, 1 << 20), F32))
    assert large.fresh == (4 << 26,)
    assert large.peak < large.fresh[0] + (8 << 20)


@pytest.mark.parametrize("shape", [(8, 6), (), (1000, 300), (3, 300_001)])
def test_scratch_on_meta_is_what_real_tensors_need(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with ByteCounter() as counter:
        ops.dropout(x, 0.5, 1)
    assert effect(DROPOUT, x=Layout.dense(shape, F32)).peak == counter.peak


def attention(p: float) -> Effect:
    line = compute(
        "autopar.attention", ("out", "lse"), q=Ref("q"), k=Ref("q"), v=Ref("q"), mask=None, p=p, causal=False, scale=1.0,
        key=Site(0),
    )  # fmt: skip
    return effect(line, q=Layout.dense((2, 3, 8, 4), F32))


def test_fused_attention_needs_nothing_beside_its_results() -> None:
    out, lse = 2 * 3 * 8 * 4 * 4, 2 * 3 * 8 * 4
    assert made(attention(0.0)) == ((out, lse), out + lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [64, 500])
def test_attention_with_dropout_needs_tiles_of_scores_on_meta_as_on_real_tensors(rows: int, causal: bool) -> None:
    """Never all scores: forward, gradients of queries, keys and values."""
    heads, scores = (2, 6, rows, 16), 2 * 6 * rows * rows * 4
    q, k = torch.randn(heads), torch.randn(2, 3, rows, 16)
    config: dict[str, Any] = {"mask": None, "p": 0.1, "causal": causal, "scale": 0.25}
    forward: dict[str, Any] = {"q": q, "k": k, "v": k}
    with ByteCounter() as counter:
        out, lse = attention_runtime.attention(**forward, **config)
        forward_peak = counter.peak
        counter.restart()
        before = counter.alive
        attention_runtime.attention_grad(out, **forward, out=out, lse=lse, **config)
        backward_peak = counter.peak - before
    line = compute("autopar.attention", ("out", "lse"), **{n: Ref(n) for n in forward}, **config, key=Site(0))
    layouts = {name: Layout.of(value) for name, value in forward.items()}
    assert effect(line, **layouts).peak == forward_peak
    backward = {"g": out, **forward, "out": out, "lse": lse}
    line = compute("autopar.attention_grad", ("a", "b", "c"), **{n: Ref(n) for n in backward}, **config, key=Site(0))
    layouts = {name: Layout.of(value) for name, value in backward.items()}
    assert backward_peak <= effect(line, **layouts).peak <= 1.05 * backward_peak
    assert rows < 500 or max(forward_peak, backward_peak) < scores


def test_an_op_that_looks_at_data_is_believed_its_declared_type() -> None:
    """`nonzero` has no meta form; the line states i64[8@dp, 2], of which a rank has half."""
    type_, spec = TensorType((8, 2), torch.int64), Spec((("dp",), ()))
    line = Compute("aten.nonzero.default", {"self": Ref("x")}, outs=("y",), types=(type_,), specs=(spec,))
    assert effect(line, TWO, x=X) == Effect((Out(-1, 0, Layout.dense((4, 2), torch.int64)),), (64,), 64)
    memo = Memo()
    of_meshes = [Probe(Mesh.of(dp=n), memo=memo).effect(line, {"x": X})[1].fresh for n in (2, 4)]
    assert of_meshes == [(64,), (32,)], "the types' blocks are those of each mesh"


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: torch.unique(x),
        lambda x: x.sum().item(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.tolist(),
        lambda x: without_meta(x),
    ],
    ids=["no function", "item", "sizes", "copy", "an op of users"],
)
def test_torch_says_that_it_needs_data(asked: Any) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)) as raised:
        asked(torch.empty(4, device="meta"))
    assert needs_data(raised.value)


@torch.library.custom_op("autopar_test_probe::without_meta", mutates_args=())
def without_meta(x: torch.Tensor) -> torch.Tensor:
    """An op of a user who wrote no meta function."""
    return x.clone()


def test_an_error_of_another_kind_is_none_of_missing_data() -> None:
    """Operands that do not fit are a fault of the compiler; the declared type would hide it."""
    line = compute("aten.mm.default", ("y",), self=Ref("x"), mat2=Ref("x"))
    with pytest.raises(RuntimeError, match="reduction dim"):
        effect(line, x=Layout.dense((4, 5), F32))


def test_the_same_line_of_other_names_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = probe.watch
    monkeypatch.setattr(probe, "watch", lambda *args: (asked.append(args), real(*args))[1])
    alone = Probe(ALONE)
    for name in ("a", "b"):
        names, _ = alone.effect(compute("aten.cumsum.default", (f"{name}_sum",), self=Ref(name), dim=0), {name: X})
        assert names == [name]
    assert len(asked) == 1
    alone.effect(compute("aten.relu.default", self=Ref("a")), {"a": SHARD})
    assert len(asked) == 2


def test_a_number_among_the_arguments_tells_lines_apart() -> None:
    repeats = [effect(compute("aten.repeat.default", self=Ref("x"), repeats=[n, 1]), x=X) for n in (2, 3)]
    assert [one.fresh for one in repeats] == [(2 * XB,), (3 * XB,)]


# --- conversions


@pytest.mark.parametrize(
    ("step", "shape", "peak"),
    [
        (Step("all_gather", "dp", 0), (16, 6), 2 * XB),
        (Step("all_gather", "dp", 1), (8, 12), 4 * XB),  # the chunks, and these joined
        (Step("reduce_scatter", "dp", 0), (4, 6), XB // 2),
        (Step("reduce_scatter", "dp", 1), (8, 3), XB + XB // 2),  # what is sent is cut into chunks before
        (Step("all_reduce", "dp"), (8, 6), XB),
        (Step("shard", "dp", 1), (8, 3), XB // 2),
        (Step("all_to_all", "dp", 0, 1), (16, 3), 2 * XB),
    ],
    ids=lambda value: f"{value.kind}{value.dim}" if isinstance(value, Step) else "",
)
def test_a_conversion_makes_its_result_and_the_buffers_of_its_message(
    step: Step, shape: tuple[int, ...], peak: int
) -> None:
    result = Layout.dense(shape, F32)
    assert effect(Convert("x", step, outs=("y",)), TWO, x=X) == Effect((Out(-1, 0, result),), (result.nbytes,), peak)


def test_a_slice_of_the_first_dim_is_a_view() -> None:
    one = effect(Convert("x", Step("shard", "dp", 0), outs=("y",)), TWO, x=X)
    assert one == Effect((Out(0, -1, SHARD),), (), 0)


def test_equal_shards_of_dims_of_unequal_length_are_gathered_to_either_length() -> None:
    """By shares (3, 1) the longest block of 4 elements has 3, and so has either half of 6, which no shares fit."""
    probe, shard = Probe(Mesh.of(dp=Shares((3, 1)))), Layout.dense((3,), F32)
    for length, whole in ((4, 4), (6, None)):
        line = Convert("x", Step("all_gather", "dp", 0), outs=("y",), whole=whole)
        result = probe.effect(line, {"x": shard})[1].outs[0].layout
        assert result == Layout.dense((length,), F32)


def test_a_conversion_over_an_axis_of_one_is_its_operand() -> None:
    one = effect(Convert("x", Step("all_gather", "dp", 1), outs=("y",)), Mesh.of(dp=1), x=X)
    assert one == Effect((Out(0, -1, X),), (), 0)


# --- gathers of parameters


def gather(dim: int) -> tuple[RuntimeStep, ...]:
    return (RuntimeStep("all_gather", ("dp",), (dim,)),)


def gathered(n: int, *shards: GatheredShard) -> tuple[int, int, int, tuple[int, ...]]:
    """started, starting_peak, ending_peak and what the results bring."""
    one = Probe(Mesh.of(dp=n)).gathered(shards)
    return one.started, one.starting_peak, one.ending_peak, one.effect.fresh


@pytest.mark.parametrize("n", [2, 4])
def test_a_parameter_is_gathered_straight_along_its_first_dim(n: int) -> None:
    full = n * B
    assert gathered(n, GatheredShard(SHARD, gather(0))) == (full, full, full, (full,))


@pytest.mark.parametrize("n", [2, 4])
def test_a_parameter_gathered_along_another_dim_is_there_twice_for_a_moment(n: int) -> None:
    full = n * B
    assert gathered(n, GatheredShard(SHARD, gather(1))) == (full, full, 2 * full, (full,))
    (out,) = Probe(Mesh.of(dp=n)).gathered((GatheredShard(SHARD, gather(1)),)).effect.outs
    assert out == Out(-1, 0, Layout.dense((4, 6 * n), F32))


@pytest.mark.parametrize("n", [2, 4])
def test_a_gather_in_16_bits_holds_the_cast_shard_until_its_end(n: int) -> None:
    cast, full = B // 2, n * B // 2
    assert gathered(n, GatheredShard(SHARD, gather(0), BF16)) == (cast + full, cast + full, cast + full, (full,))


@pytest.mark.parametrize("n", [2, 4])
def test_a_shard_from_a_tier_is_on_the_device_until_the_gather_ends(n: int) -> None:
    held = B + n * B
    assert gathered(n, GatheredShard(SHARD, gather(0), tier="ddr")) == (held, held, held, (n * B,))


@pytest.mark.parametrize("n", [2, 4])
def test_small_parameters_travel_in_one_message_which_they_are_copied_to_and_from(n: int) -> None:
    flat, arrived = 2 * B, n * 2 * B
    both = gathered(n, GatheredShard(SHARD, gather(0)), GatheredShard(SHARD, gather(1)))
    assert both == (flat + arrived, flat + arrived, arrived + 2 * n * B, (n * B, n * B))


def test_a_parameter_that_rests_whole_is_used_where_it_lies() -> None:
    assert Probe(TWO).gathered((GatheredShard(SHARD, ()),)).effect == Effect((Out(0, -1, SHARD),), (), 0)


def test_a_whole_parameter_in_16_bits_is_cast_when_it_is_taken() -> None:
    assert gathered(2, GatheredShard(SHARD, (), BF16)) == (0, 0, B // 2, (B // 2,))


def test_a_gather_over_an_axis_of_one_makes_nothing() -> None:
    assert gathered(1, GatheredShard(SHARD, gather(1))) == (0, 0, 0, ())


# --- updated shards on their way back to storage


def returning(n: int, dim: int) -> tuple[Layout, tuple[RuntimeStep, ...], Layout]:
    shape = [4, 6]
    shape[dim] *= n
    return SHARD, gather(dim), Layout.dense(shape, F32)


@pytest.mark.parametrize("n", [2, 4])
def test_a_shard_of_the_first_dim_goes_back_without_a_byte_beside_storage(n: int) -> None:
    assert Probe(Mesh.of(dp=n)).regather_peak((returning(n, 0),)) == 0


@pytest.mark.parametrize("n", [2, 4])
def test_a_shard_of_another_dim_arrives_beside_storage(n: int) -> None:
    assert Probe(Mesh.of(dp=n)).regather_peak((returning(n, 1),)) == n * B


@pytest.mark.parametrize("n", [2, 4])
def test_shards_that_go_back_together_need_what_they_send_and_receive(n: int) -> None:
    assert Probe(Mesh.of(dp=n)).regather_peak((returning(n, 0), returning(n, 1))) == 2 * B + n * 2 * B


# --- by device


def attention_bytes(device: Device, dtype: torch.dtype, rows: int = 256, p: float = 0.0) -> tuple[int, int]:
    """The most bytes of attention, and of its gradient, of two heads of 64."""
    layout, rest = Layout.dense((1, 2, rows, 64), dtype), {"p": p, "causal": True, "scale": 0.5, "key": Site(0)}
    operands = {name: Ref(name) for name in "qkv"} | {"mask": None}
    forward = compute("autopar.attention", ("out", "lse"), **operands, **rest)
    backward = compute(
        "autopar.attention_grad", ("dq", "dk", "dv"), g=Ref("g"), **operands, out=Ref("out"), lse=Ref("lse"), **rest
    )
    layouts = dict.fromkeys(("q", "k", "v", "g", "out"), layout) | {"lse": Layout.dense((1, 2, rows), F32)}
    return tuple(Probe(ALONE, device).effect(line, layouts)[1].peak for line in (forward, backward))  # type: ignore[return-value]


def test_attention_needs_what_the_kernel_of_the_device_needs() -> None:
    x, lse, delta = 2 * 256 * 64 * 2, 2 * 256 * 4, 2 * 256 * 4
    copies = 2 * x  # of the gradient and the result, which the kernel reads by rows
    forward, backward = attention_bytes(A100, BF16)
    assert forward - (x + lse) in range(64)
    assert backward - (copies + 3 * x + 2 * x + delta) in range(64)
    assert attention_bytes(A100, F32)[0] - (2 * x + lse) in range(64)
    assert attention_bytes(CPU, BF16)[0] == x + lse


def test_tiles_are_as_large_as_those_of_the_device() -> None:
    """The plain formula has tiles; a GPU that is too old for our kernel has it too."""
    on_cpu, on_gpu = (attention_bytes(device, F32, rows=4096, p=0.5)[0] for device in (CPU, Device("cuda", (7, 0))))
    assert on_cpu < 3 << 22
    assert on_gpu > 2 * (1 << 24) * 4


def test_the_kernel_that_draws_for_itself_needs_results_and_a_number_a_row() -> None:
    x, lse, delta = 2 * 256 * 64 * 2, 2 * 256 * 4, 2 * 256 * 4
    assert attention_bytes(A100, BF16, p=0.5) == (x + lse, 3 * x + delta)


def test_a_fused_norm_needs_its_result_alone() -> None:
    line = compute("autopar.rms_norm", ("y", "rstd"), x=Ref("x"), w=None, eps=1e-5, ndim=1)
    on_cpu, on_gpu = (
        Probe(ALONE, device).effect(line, {"x": Layout.dense((8, 64), BF16)})[1] for device in (CPU, A100)
    )
    assert (on_gpu.peak, on_gpu.fresh) == (8 * 64 * 2 + 8 * 4, (8 * 64 * 2, 8 * 4))
    assert on_gpu.fresh == on_cpu.fresh
    assert on_cpu.peak > on_gpu.peak


def test_a_line_that_asks_nothing_of_the_mesh_is_asked_once_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    memo, asked, standing = Memo(), list[tuple[type, int]](), Probe._standing

    def noted(one: Probe, make: Any, line: Any, layouts: Any) -> Any:
        asked.append((type(line), one.mesh.size))
        return standing(one, make, line, layouts)

    lines = compute("aten.clone.default", self=Ref("x")), Convert("x", Step("all_gather", "dp", 1), outs=("y",))
    meshes = [Mesh.of(dp=n) for n in (2, 4)]
    alone = [[effect(line, mesh, x=X) for line in lines] for mesh in meshes]
    monkeypatch.setattr(Probe, "_standing", noted)
    together = [[Probe(mesh, memo=memo).effect(line, {"x": X})[1] for line in lines] for mesh in meshes]
    assert together == alone
    assert asked == [(Compute, 2), (Convert, 2), (Convert, 4)]
