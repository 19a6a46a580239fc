"""Nodes that compute nothing are left out of a captured graph, and nodes that compute something stay."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.capture.build import capture_program
from autopar.capture.exported import Exported
from autopar.capture.graph.position_masks import known_values, without_position_masks
from autopar.capture.graph.tidy import tidied
from autopar.ir.program import Program
from autopar.proof.verify import verify

SGD = functools.partial(torch.optim.SGD, lr=0.1)
B, H, S, D = 2, 4, 6, 8


class Step(nn.Module):
    """A linear layer, something, and a loss."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.up, self.down = f, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.f(self.up(x))).square().mean()


def ops_of(program: Program) -> list[str]:
    return [str(call.op) for template in program.templates.values() for call in template.op_calls.values()]


def ops(f: Callable[[Tensor], Tensor], x: Tensor | None = None) -> list[str]:
    program, _ = capture_program(Step(f), (torch.randn(4, 8) if x is None else x,))
    return ops_of(program)


@functools.cache
def plain() -> list[str]:
    """The ops of the step that does nothing more."""
    return sorted(ops(lambda x: x))


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "an empty tensor before": lambda x: torch.cat([x.new_zeros(0, 8), x]),
    "an empty tensor of one dim": lambda x: torch.cat([torch.tensor([]), x], 1),
    "times one": lambda x: x * 1.0,
    "over one": lambda x: x / 1,
    "minus zero": lambda x: x - 0.0,
    "the first power": lambda x: x**1,
    "a whole slice": lambda x: x[:, :],
    "wider and back": lambda x: x.double().float(),
    "expanded to its own shape": lambda x: x.expand(4, 8),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_computes_nothing_is_left_out(name: str) -> None:
    assert sorted(ops(NOTHING[name])) == plain()


SOMETHING: dict[str, Callable[[Tensor], Tensor]] = {
    "plus zero, which turns -0.0 into 0.0": lambda x: x + 0.0,
    "minus minus zero, which does too": lambda x: x - -0.0,
    "narrower and back": lambda x: x.half().float(),
    "times one and a bit": lambda x: x * 1.0000001,
    "two tensors": lambda x: torch.cat([x, x])[:4],
    "a slice": lambda x: F.pad(x[:, 1:], (1, 0)),
}


@pytest.mark.parametrize("name", SOMETHING)
def test_what_computes_something_stays(name: str) -> None:
    assert sorted(ops(SOMETHING[name])) != plain()


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("last", FLOATS)
@pytest.mark.parametrize("between", FLOATS)
@pytest.mark.parametrize("first", FLOATS)
def test_of_two_casts_one_is_left_only_where_no_number_is_rounded_twice(
    first: torch.dtype, between: torch.dtype, last: torch.dtype
) -> None:
    """Numbers beside the middle of two that the last dtype has: rounded in between, they go the other way, or over the edge."""
    ulp = torch.finfo(last).eps
    values = [1 + ulp / 2 * (1 + sign * 2.0**-power) for sign in (1, -1) for power in range(2, 40)]
    x = torch.tensor([*values, 1e5, 1e39, 1e-9, 1e-42, -0.0], dtype=torch.float64).to(first)
    cast = torch.ops.aten.to.dtype
    module = make_fx(lambda x: cast(cast(x, between), last), tracing_mode="fake", pre_dispatch=True)(x)
    want = module(x)
    kinds = {node.name: ("input", 0) for node in module.graph.nodes if node.op == "placeholder"}
    tidied(Exported(module.graph, kinds, {}, (), None, None, ("x",), False, {}, frozenset(), {}, ()))
    module.recompile()
    got = module(x)
    made = [node.meta["val"].dtype for node in module.graph.nodes if node.op == "call_function"]
    if not torch.equal(x.to(between).to(first), x):
        assert between in made
    assert got.dtype == want.dtype
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_of_two_empty_operands_the_rest_is_concatenated() -> None:
    f = lambda x: torch.cat([x.new_zeros(0, 8), x, x.new_zeros(0, 8), x])[2:6]  # noqa: E731
    assert ops(f) == ops(lambda x: torch.cat([x, x])[2:6])


# --- attention


def causal_by_positions(x: Tensor) -> Tensor:
    positions = torch.arange(S) + 0
    return (positions[None, None, None, :] <= positions[None, None, :, None]).expand(B, 1, S, S)


def causal_by_packed_sequences(x: Tensor) -> Tensor:
    """A causal mask as libraries find sequences that are packed into one: positions that do not follow each other start
    a new one."""
    positions = torch.arange(S).expand(B, S)
    number = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(B)[:, None, None, None]
    queries, keys = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    return (number[batch, queries] == number[batch, keys]) & (keys <= queries)


def windowed(x: Tensor) -> Tensor:
    positions = torch.arange(S)
    return (positions[None, :] <= positions[:, None]) & (positions[None, :] > positions[:, None] - 3)


def everything(x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).expand(B, 1, S, S)


def two_sequences(x: Tensor) -> Tensor:
    number = torch.arange(S) // 3
    return (number[None, :] == number[:, None]).expand(B, 1, S, S)


def from_data(x: Tensor) -> Tensor:
    return causal_by_positions(x) & (x.sum((1, 3)) < 1e9)[:, None, None, :]


MASKS = {
    causal_by_positions: (None, True),
    causal_by_packed_sequences: (None, True),
    lambda x: torch.ones(S, S).tril().bool(): (None, True),
    lambda x: ~torch.ones(S, S).triu(1).bool(): (None, True),
    everything: (None, False),
    windowed: ("mask", False),
    two_sequences: ("mask", False),
    from_data: ("mask", False),
    lambda x: torch.arange(S)[:, None] < torch.arange(S)[None, :] + 2: ("mask", False),
    lambda x: torch.arange(S)[:, None] <= torch.arange(S)[None, :]: ("mask", False),
}


class Attending(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor | None], times: int = 1) -> None:
        super().__init__()
        self.mask, self.times = mask, times
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.k(x), self.v(x)
        if self.times > 1:
            k, v = (t[:, :, None, :, :].expand(B, H, self.times, S, D).reshape(B, H * self.times, S, D) for t in (k, v))
        q = self.q(x).repeat_interleave(self.times, 1) if self.times > 1 else self.q(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x)).square().mean()


def attention(model: nn.Module) -> fx.Node:
    program, _ = capture_program(model, (torch.randn(B, H, S, D),))
    found = [
        n for t in program.templates.values() for n in t.graph.nodes if "autopar.attention.default" in str(n.target)
    ]
    (node,) = found
    return node


@pytest.mark.few(4)
@pytest.mark.parametrize("index", range(len(MASKS)))
def test_a_mask_of_positions_is_a_flag(index: int) -> None:
    make, (mask, causal) = list(MASKS.items())[index]
    given = attention(Attending(make)).args
    assert (given[3] is None) == (mask is None)
    assert given[5] is causal


@pytest.mark.few(4)
@pytest.mark.parametrize("limit", [40, 1 << 20], ids=["intervals", "values"])
@pytest.mark.parametrize("index", range(len(MASKS)))
def test_a_mask_that_is_followed_is_the_mask_that_is_computed(index: int, limit: int) -> None:
    """The oracle is the mask itself: what is said of it must give it back, whether values were followed or computed."""
    make = list(MASKS)[index]
    exported = torch.export.export(Attending(make), (torch.randn(B, H, S, D),), strict=False)
    graph = exported.graph_module.graph
    (call,) = (n for n in graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default)
    mask = call.args[3] if len(call.args) > 3 else call.kwargs["attn_mask"]
    value = known_values(graph, [mask], limit)[mask]
    want = make(torch.randn(B, H, S, D)).expand(B, 1, S, S)
    if value is None:
        assert make is from_data or limit == 40
    elif isinstance(value, Tensor):
        assert torch.equal(value.expand(B, 1, S, S), want)
    else:
        keys = torch.arange(S)
        table = (keys >= value.first[:, None]) & (keys < value.end[:, None])
        assert torch.equal(table.expand(B, 1, S, S), want)
    without_position_masks(graph, limit)


def test_long_masks_are_followed_without_being_computed() -> None:
    exported = torch.export.export(Attending(causal_by_packed_sequences), (torch.randn(B, H, S, D),), strict=False)
    graph = exported.graph_module.graph
    without_position_masks(graph, computed=40)
    (call,) = (n for n in graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default)
    assert call.args[3] is None
    assert call.args[5] is True


class Grouped(nn.Module):
    """Grouped queries as libraries write them: heads out of one product, moved before positions, repeated by a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, 2 * H * D), nn.Linear(D, H * D), nn.Linear(D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, S, 2 * H, D).transpose(1, 2)
        k, v = (layer(x).view(B, S, H, D).transpose(1, 2) for layer in (self.k, self.v))
        k, v = (t[:, :, None, :, :].expand(B, H, 2, S, D).reshape(B, 2 * H, S, D) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).square().mean()


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_heads_that_are_repeated_by_a_copy_are_read_as_they_are(precision: str | None) -> None:
    model, x = Grouped(), torch.randn(B, S, D)
    program, _ = capture_program(model, (x,), precision=precision)
    nodes = [
        n for t in program.templates.values() for n in t.graph.nodes if "autopar.attention.default" in str(n.target)
    ]
    assert [n.args[1].meta["type"].shape for n in nodes] == [(B, H, S, D)]  # type: ignore[union-attr]
    options = autopar.Options(precision=precision)
    compiled = autopar.compile(model, autopar.ClusterSpec.local(2), (x,), optimizer=SGD, options=options)
    assert verify(compiled, model, (x,)).ok


def test_a_view_of_a_copy_stays_possible_without_the_copy() -> None:
    model = Step(lambda x: x.t().contiguous().view(2, 4, 4).transpose(1, 2).contiguous().view(8, 4).t())
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (torch.randn(4, 8),), optimizer=SGD)
    assert verify(program, model, (torch.randn(4, 8),)).ok


def test_repeated_heads_are_read_as_they_are() -> None:
    keys, values = attention(Attending(lambda x: None, times=2)).args[1:3]
    assert keys.meta["type"].shape == values.meta["type"].shape == (B, H, S, D)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make", [causal_by_packed_sequences, windowed, everything], ids=["causal", "windowed", "everything"]
)
def test_programs_equal_eager(make: Callable[[Tensor], Tensor]) -> None:
    model, x = Attending(make, times=2), torch.randn(B, H, S, D)
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (x,), optimizer=SGD)
    assert verify(program, model, (x,)).ok


class Unbound(nn.Module):
    """Attention whose queries, keys and values are parts of one product, in the order of timm's ViT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.qkv, self.out = dim, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 3, 1, 4]
        order.insert(self.dim, 2)
        parts = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(order).unbind(self.dim - len(order))
        q, k, v = parts
        mixed = (q @ k.mT).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", [0, 2, 4])
def test_gradients_of_parts_of_a_permuted_tensor_are_joined_where_they_lie(dim: int) -> None:
    model = Unbound(dim)
    program, _ = capture_program(model, (torch.randn(2, 5, 8),))
    (joined,) = [call for t in program.templates.values() for call in t.op_calls.values() if "stack" in str(call.op)]
    shapes = {t.shape for t in joined.results if t is not None}
    assert shapes == {(2, 5, 3, 2, 4)}
    compiled = autopar.compile(model, autopar.ClusterSpec.local(2), (torch.randn(2, 5, 8),), optimizer=SGD)
    assert verify(compiled, model, (torch.randn(2, 5, 8),)).ok
