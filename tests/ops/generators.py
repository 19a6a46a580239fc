"""Random small calls of every op that has a rule: `GENERATORS[op](draw)` makes one Case."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from autopar.ops import random
from tests.ops.execution import Case

Tensor = torch.Tensor
aten = torch.ops.aten


class Draw:
    """A source that generators draw from: sizes that meshes divide, and random tensors."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), label="seed"))

    def pick(self, *options: Any) -> Any:
        return self._data.draw(st.sampled_from(options))

    def size(self) -> int:
        return self.pick(4, 2, 6, 3, 1, 12)

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        """A shape of any sizes, or of one size, which no rule may take for a sign that dims belong together."""
        rank = self.pick(*range(least, most + 1))
        return [self.size()] * rank if self.pick(False, False, True) else [self.size() for _ in range(rank)]

    def f(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) + 0.1

    def c(self, *shape: int) -> Tensor:
        return torch.complex(self.f(*shape), self.f(*shape))

    def i(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def b(self, *shape: int) -> Tensor:
        return self.f(*shape) > 0

    def any(self, *shape: int) -> Tensor:
        return self.pick(self.f, lambda *s: self.i(5, *s), self.b)(*shape)

    def dim(self, rank: int) -> int:
        return self.pick(*range(-rank, rank))

    def order(self, rank: int) -> list[int]:
        return list(self._data.draw(st.permutations(range(rank))))

    def dims(self, rank: int) -> list[int]:
        return [i for i in range(rank) if self.pick(True, False)] or [self.pick(*range(rank))]


Generator = Callable[[Draw], Case]
GENERATORS: dict[str, Generator] = {}


def makes(*names: str) -> Callable[[Callable[[Draw, str], Case]], Callable[[Draw, str], Case]]:
    """The decorated function makes calls of these ops; it is told which."""

    def add(f: Callable[[Draw, str], Case]) -> Callable[[Draw, str], Case]:
        for name in names:
            GENERATORS[name] = lambda draw, name=name: f(draw, name)  # type: ignore[misc]
        return f

    return add


def call(target: Any, *args: Any, shapes_only: bool = False, **kwargs: Any) -> Case:
    return Case(target, args, kwargs, shapes_only)


def overload(name: str, *wanted: str) -> Any:
    """The first of the wanted overloads that the op called `aten.x` has."""
    packet = getattr(aten, name.removeprefix("aten."))
    return getattr(packet, next(o for o in (*wanted, "default") if o in packet.overloads()))


# --- pointwise --------------------------------------------------------------------------------------------------------


def broadcast(draw: Draw, shape: list[int]) -> list[int]:
    """A shape that broadcasts to `shape`."""
    return [1 if draw.pick(False, False, True) else n for n in shape[draw.pick(*range(len(shape))) :]]


@makes("pointwise")
def _pointwise(draw: Draw, _: str) -> Case:
    shape = draw.shape(1, 3)
    x, y = draw.f(*shape), draw.f(*broadcast(draw, shape))
    unary = [
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.tanh,
        aten.sigmoid,
        aten.exp,
        aten.neg,
        aten.abs,
        aten.cos,
        aten.sgn,
        aten.logical_not,
        aten.hardsigmoid,
        aten.softplus,
        aten.isinf,
        aten.reciprocal,
    ]
    kind = draw.pick("unary", "binary", "scalar", "alpha", "ternary", "compare", "integer", "complex")
    if kind == "unary":
        return call(draw.pick(*unary).default, x)
    if kind == "binary":
        op = draw.pick(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default)
        return call(op, *draw.pick((x, y), (y, x)))
    if kind == "scalar":
        return call(
            draw.pick(
                aten.add.Tensor,
                aten.mul.Tensor,
                aten.div.Tensor,
                aten.sub.Tensor,
                aten.rsub.Scalar,
                aten.pow.Tensor_Scalar,
            ),
            x,
            draw.pick(2, 3.0),
        )
    if kind == "alpha":
        return call(aten.add.Tensor, x, y, alpha=draw.pick(2, -1))
    if kind == "ternary":
        return call(aten.addcmul.default, x, y, draw.f(*shape), value=0.5)
    if kind == "compare":
        return call(draw.pick(aten.lt.Tensor, aten.ge.Tensor, aten.ne.Tensor), x, y)
    if kind == "complex":
        return call(draw.pick(aten.mul.Tensor, aten.add.Tensor), draw.c(*shape), draw.c(*shape))
    return call(
        draw.pick(aten.bitwise_and.Tensor, aten.add.Tensor, aten.mul.Tensor), draw.i(5, *shape), draw.i(5, *shape)
    )


@makes("aten._to_copy")
def _to_copy(draw: Draw, _: str) -> Case:
    return call(aten._to_copy.default, draw.any(*draw.shape()), dtype=draw.pick(torch.float64, torch.int64, torch.bool))


@makes("aten.copy", "aten.floor_divide")
def _two(draw: Draw, name: str) -> Case:
    shape = draw.shape()
    return call(overload(name), draw.f(*shape), draw.f(*broadcast(draw, shape)))


@makes("aten.fill")
def _fill(draw: Draw, _: str) -> Case:
    return call(aten.fill.Scalar, draw.f(*draw.shape()), 2.0)


@makes(
    "aten.zeros_like",
    "aten.ones_like",
    "aten.empty_like",
    "aten.nan_to_num",
    "aten.clone",
    "aten.hardswish",
    "aten.log_sigmoid_forward",
)
def _like(draw: Draw, name: str) -> Case:
    return call(overload(name), draw.f(*draw.shape()), shapes_only=name == "aten.empty_like")


@makes("aten.full_like")
def _full_like(draw: Draw, _: str) -> Case:
    return call(aten.full_like.default, draw.f(*draw.shape()), 3)


@makes("aten.masked_fill")
def _masked_fill(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    return call(aten.masked_fill.Scalar, draw.f(*shape), draw.b(*broadcast(draw, shape)), draw.pick(0, -math.inf))


@makes("aten.where")
def _where(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    mask = draw.b(*shape) if draw.pick(True, False) else draw.b(*broadcast(draw, shape))
    return call(aten.where.self, mask, draw.f(*shape), draw.f(*broadcast(draw, shape)))


@makes("aten.lerp")
def _lerp(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    return call(aten.lerp.Scalar, draw.f(*shape), draw.f(*shape), 0.3)


@makes("aten.polar")
def _polar(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    return call(aten.polar.default, draw.positive(*shape), draw.f(*shape))


@makes("aten._prelu_kernel", "aten._prelu_kernel_backward")
def _prelu(draw: Draw, name: str) -> Case:
    shape = [draw.size(), draw.size(), draw.size()]
    x, w = draw.f(*shape), draw.f(1, draw.pick(1, shape[1]), 1)
    return call(overload(name), *((draw.f(*shape),) if name.endswith("backward") else ()), x, w)


_BACKWARD_ARGS = {
    "softplus": (1.0, 20.0),
    "leaky_relu": (0.1, False),
    "elu": (1.0, 1.0, 1.0, False),
    "hardtanh": (-1.0, 1.0),
    "hardswish": (),
    "hardsigmoid": (),
    "hardshrink": (0.5,),
    "softshrink": (0.5,),
    "mish": (),
    "threshold": (0.0,),
}


@makes(*(f"aten.{name}_backward" for name in _BACKWARD_ARGS))
def _pointwise_backward(draw: Draw, name: str) -> Case:
    shape = draw.shape()
    args = _BACKWARD_ARGS[name.removeprefix("aten.").removesuffix("_backward")]
    if name == "aten.elu_backward":
        return call(aten.elu_backward.default, draw.f(*shape), *args, draw.f(*shape))
    return call(overload(name), draw.f(*shape), draw.f(*shape), *args)


@makes("aten.log_sigmoid_backward")
def _log_sigmoid_backward(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    x = draw.f(*shape)
    return call(aten.log_sigmoid_backward.default, draw.f(*shape), x, aten.log_sigmoid_forward(x)[1])


@makes("aten.full", "aten.zeros", "aten.ones", "aten.empty")
def _constant(draw: Draw, name: str) -> Case:
    args = (draw.shape(), 2.5) if name == "aten.full" else (draw.shape(),)
    return call(overload(name, "memory_format"), *args, dtype=torch.float64, shapes_only=name == "aten.empty")


@makes("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")
def _new(draw: Draw, name: str) -> Case:
    x, shape = draw.f(*draw.shape()), draw.shape()
    if name == "aten.new_empty_strided":
        return call(overload(name), x, shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], shapes_only=True)
    more = (2.5,) if name == "aten.new_full" else ()
    return call(overload(name), x, shape, *more, shapes_only=name == "aten.new_empty")


@makes("aten.arange", "aten.linspace", "aten.eye", "aten.scalar_tensor", "aten.tril_indices", "aten.triu_indices")
def _made_whole(draw: Draw, name: str) -> Case:
    args = {"linspace": (0, 1, 4), "eye": (4,), "scalar_tensor": (2.0,), "arange": (6,)}
    return call(overload(name), *args.get(name.removeprefix("aten."), (4, 4)))


@makes("autopar.dropout")
def _dropout(draw: Draw, _: str) -> Case:
    return call(random.dropout, draw.f(*draw.shape(1, 4)), draw.pick(0.3, 0.9), draw.pick(0, 7))


@makes("autopar.random_uniform", "autopar.random_normal")
def _random(draw: Draw, name: str) -> Case:
    op = random.random_uniform if name.endswith("uniform") else random.random_normal
    return call(op, draw.shape(1, 4), torch.float64, draw.pick(0, 7))


# --- reductions, ops along a dim -----------------------------------------------------------------------------------------


@makes(
    "aten.sum",
    "aten.amax",
    "aten.amin",
    "aten.nansum",
    "aten.mean",
    "aten.logsumexp",
    "aten.linalg_vector_norm",
    "aten.var",
    "aten.std",
    "aten.norm",
    "aten.count_nonzero",
    "aten.any",
    "aten.all",
)
def _reduction(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape())
    dims, keep = draw.dims(x.ndim), draw.pick(False, True)
    if name == "aten.norm":
        return call(aten.norm.ScalarOpt_dim, x, 2, dims, keep)
    if name == "aten.linalg_vector_norm":
        return call(aten.linalg_vector_norm.default, x, 3, draw.pick(dims, None), keep)
    if name in ("aten.var", "aten.std"):
        return call(overload(name, "correction"), x, dims, correction=0, keepdim=keep)
    if name == "aten.count_nonzero":
        return call(aten.count_nonzero.dim_IntList, draw.any(*x.shape), dims)
    if name in ("aten.any", "aten.all"):
        return (
            call(overload(name, draw.pick("dims", "default")), draw.b(*x.shape))
            if draw.pick(True, False)
            else call(overload(name, "dims"), draw.b(*x.shape), dims, keep)
        )
    if name == "aten.sum":
        x = draw.any(*x.shape)
        return call(aten.sum.default, x) if draw.pick(False, False, True) else call(aten.sum.dim_IntList, x, dims, keep)
    if name in ("aten.amax", "aten.amin"):
        return call(overload(name), draw.pick(x, draw.i(9, *x.shape)), draw.pick(dims, []), keep)
    return call(overload(name, "dim_IntList", "dim"), x, dims, keep)


@makes("aten.prod", "aten.argmax", "aten.argmin", "aten.max", "aten.min", "aten.mode", "aten.median")
def _one_dim(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape())
    dim, keep = draw.dim(x.ndim), draw.pick(False, True)
    if name == "aten.prod":
        return call(aten.prod.dim_int, x, dim, keep)
    if name in ("aten.max", "aten.min") and draw.pick(False, False, True):
        return call(overload(name, "other"), x, draw.f(*broadcast(draw, list(x.shape))))
    if name in ("aten.max", "aten.min", "aten.median") and draw.pick(False, True):
        return call(overload(name), x)
    return call(overload(name, "dim"), x, dim, keep)


@makes("aten.cumsum", "aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp")
def _scan(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape())
    return call(overload(name), x, draw.dim(x.ndim))


@makes("aten._softmax", "aten._log_softmax", "aten._safe_softmax")
def _softmax(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape())
    return call(overload(name), x, draw.dim(x.ndim), *((False,) if name != "aten._safe_softmax" else ()))


@makes("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def _softmax_backward(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape())
    return call(overload(name), draw.f(*x.shape), x.softmax(-1), draw.dim(x.ndim), torch.float64)


@makes("aten.sort", "aten.topk", "aten.kthvalue", "aten.flip", "aten.roll", "aten.renorm")
def _order(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(2 if name == "aten.renorm" else 1, 3))
    dim = draw.dim(x.ndim)
    more: dict[str, tuple[Any, ...]] = {
        "aten.sort": (dim, draw.pick(False, True)),
        "aten.topk": (draw.pick(1, x.shape[dim]), dim),
        "aten.kthvalue": (1, dim),
        "aten.flip": (draw.dims(x.ndim),),
        "aten.renorm": (2, dim, 0.5),
        "aten.roll": draw.pick(([1], [dim]), ([1], [])),
    }
    return call(overload(name), x, *more[name])


@makes("aten.tril", "aten.triu")
def _triangle(draw: Draw, name: str) -> Case:
    return call(overload(name), draw.any(*draw.shape(2, 4)), draw.pick(0, 1, -1))
