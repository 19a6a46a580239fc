"""Times the ops of emitted programs on a CPU, one by one, as a step meets them.

Ops take turns, so that each finds its code and its operands where a step leaves them: in caches only if they are small. Sizes are
those of tensors in small models up to what no cache holds. All ranks of a machine measure at the same time, because they
share its memory. The rows below are data: an op of the runtime or of torch, its operands, and how often they are read is the op's
own affair; bytes are those of operands and results, as the planner counts them.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch

from autopar.cluster.kernels import COPY, FILL, KernelTimes, Product
from autopar.runtime.data.schema import MOST_SIZE, integer, number
from autopar.runtime.kernels import ops
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.experts import experts
from autopar.runtime.memory.heap import keep_freed_memory

Tensor = torch.Tensor
T = TypeVar("T", bound=Any)
aten = torch.ops.aten
WIDTH = 256
ROWS = {True: (4, 64, 1024, 8192), False: (1, 16, 128, 1024, 8192)}
"""Rows of WIDTH floats that passes run on, by whether the calibration is to be quick. The last are more than caches hold: there a
byte takes several times as long."""
LONG = (1, 4, 1024, 32)
"""Batch, heads, rows and keys, head width of attention that is measured with a causal mask too."""
CAUSAL = "autopar.attention causal"


AtLeastZero = Annotated[float, number(0)]


class Timed(NamedTuple):
    """An op that is measured. operands: tensors whose bytes count; flops, dims: of a product, as its formula takes them; times:
    how often a run does it."""

    kind: str
    op: str
    operands: tuple[Tensor, ...]
    run: Callable[[], Any]
    flops: float = 0.0
    dims: tuple[int, ...] = ()
    times: int = 1


class Measured(NamedTuple):
    """Seconds that one kernel took. nbytes: read and written."""

    kind: str
    op: str
    nbytes: AtLeastZero
    flops: AtLeastZero
    dims: tuple[Annotated[int, integer(0, MOST_SIZE)], ...]
    seconds: AtLeastZero


def passes(rows: int) -> Iterator[Timed]:
    """Ops that pass over (4, rows / 4, WIDTH) floats."""
    lead = (4, rows // 4) if rows >= 4 else (1, rows)
    x, g = torch.randn(*lead, WIDTH), torch.randn(*lead, WIDTH)
    w, b = torch.randn(WIDTH), torch.randn(WIDTH)
    index = torch.randint(0, WIDTH, lead)
    row, gate = torch.randn(lead), x > 0
    _, mean, rstd = ops.layer_norm(x, w, b, 1e-5, 1)
    table = torch.randn(1024, WIDTH)
    places, rows_read = torch.randint(0, 1024, lead), torch.randint(0, rows, lead)
    key = 12345

    def of(op: str, operands: tuple[Tensor, ...], run: Callable[[], Any]) -> Timed:
        return Timed("pass", op, operands, run)

    yield of(COPY, (x,), x.clone)
    yield of("aten.add", (x, g), lambda: x + g)
    yield of("aten.sub", (x, g), lambda: x - g)
    yield of("aten.mul", (x, g), lambda: x * g)
    yield of("aten.div", (x, g), lambda: x / g)
    yield of("aten.neg", (x,), lambda: -x)
    yield of("aten.where", (gate, x, g), lambda: torch.where(gate, x, g))
    yield of("aten.masked_fill", (x, gate), lambda: x.masked_fill(gate, 0.0))
    yield of("aten.ne", (index,), lambda: index != -100)
    yield of(FILL, (), lambda: torch.full(x.shape, 0.0))
    yield of("aten._to_copy", (gate,), lambda: gate.to(torch.float32))
    yield of("aten.cat", (x, g), lambda: torch.cat([x, g], 2))
    yield of("aten.split", (x,), lambda: aten.split.Tensor(x, WIDTH // 4, -1))
    yield of("aten.slice", (x,), lambda: aten.slice.Tensor(x, 2, 0, WIDTH // 2))
    yield of("aten.sum", (x,), lambda: x.sum([0, 1]))
    yield of("aten.amax", (x,), lambda: x.amax([2]))
    yield of("aten.rsqrt", (g,), lambda: g.rsqrt())
    for name in ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "log"):
        function = getattr(aten, name)
        yield of(f"aten.{name}", (x,), functools.partial(function, x))
    for name in ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"):
        function = getattr(aten, name)
        yield of(f"aten.{name}", (g, x), functools.partial(function, g, x))
    yield of("aten.threshold_backward", (g, x), lambda: aten.threshold_backward(g, x, 0))
    yield of("autopar.layer_norm", (x, w, b), lambda: ops.layer_norm(x, w, b, 1e-5, 1))
    yield of("autopar.layer_norm_dx", (g, x, mean, rstd, w), lambda: ops.layer_norm_dx(g, x, mean, rstd, w, 1))
    yield of("autopar.rms_norm", (x, w), lambda: ops.rms_norm(x, w, 1e-5, 1))
    yield of("autopar.rms_norm_dx", (g, x, rstd, w), lambda: ops.rms_norm_dx(g, x, rstd, w, 1))
    yield of("autopar.norm_dw", (g, x, mean, rstd), lambda: ops.norm_dw(g, x, mean, rstd, 1))
    yield of(
        "autopar.layer_norm_backward", (g, x, mean, rstd, w), lambda: ops.layer_norm_backward(g, x, mean, rstd, w, 1)
    )
    yield of("autopar.dropout", (x,), lambda: ops.dropout(x, 0.1, key))
    yield of("autopar.embedding", (places,), lambda: ops.embedding(table, places))
    yield of("autopar.embedding_grad", (g, rows_read), lambda: ops.embedding_grad(g, rows_read, rows, -1))
    yield of("autopar.sumexp", (x, row), lambda: ops.sumexp(x, row, 2))
    yield of("autopar.pick", (x, index), lambda: ops.pick(x, index, 2))
    yield of("autopar.pick_grad", (row, index), lambda: ops.pick_grad(row, index, 2, WIDTH))
    yield of("autopar.cross_entropy_grad", (x, row, index, row), lambda: ops.cross_entropy_grad(x, row, index, row, 2))


def products(quick: bool) -> Iterator[Timed]:
    """Products forward and backward, attention, convolutions and mixtures of experts, of the shapes of small models."""
    shapes = [(512, 256, 256), (512, 1024, 256), (512, 256, 1024), (128, 128, 128), (16, 64, 64), (512, 2048, 256)]
    for m, n, k in shapes if quick else [*shapes, (2048, 512, 512), (1024, 1024, 1024), (64, 512, 512), (256, 64, 256)]:
        x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        flops, dims = 2.0 * m * n * k, (m, n, k)
        yield Timed("product", "autopar.linear", (x, w), functools.partial(ops.linear, x, w), flops, dims)
        yield Timed("product", "autopar.linear_dx", (g, w), functools.partial(ops.linear_dx, g, w), flops, dims)
        yield Timed("product", "autopar.linear_dw", (g, x), functools.partial(ops.linear_dw, g, x), flops, dims)
    for b, h, s, d in ((4, 8, 128, 32), (2, 8, 256, 64), (4, 4, 64, 32), LONG, *(() if quick else ((1, 8, 512, 64),))):
        q, k_, v, g = (torch.randn(b, s, h, d).transpose(1, 2) for _ in range(4))
        once = 2.0 * b * h * s * s * d
        form = (0.0, False, d**-0.5)
        forward = functools.partial(attention.attention, q, k_, v, None, *form)
        out, lse = forward()
        backward = functools.partial(attention.attention_grad, g, q, k_, v, None, out, lse, *form)
        yield Timed("product", "autopar.attention", (q, k_, v), forward, 2 * once, (s, d))
        yield Timed("product", "autopar.attention_grad", (g, q, k_, v), backward, 5 * once, (s, d))
        if (b, h, s, d) == LONG:
            causal = functools.partial(attention.attention, q, k_, v, None, 0.0, True, d**-0.5)
            yield Timed("causal", CAUSAL, (q, k_, v), causal, 2 * once, (s, d))
    for batch, inner, outer, side in ((8, 32, 32, 32), (8, 16, 32, 16), *(() if quick else ((4, 64, 64, 16),))):
        image, kernel = torch.randn(batch, inner, side, side), torch.randn(outer, inner, 3, 3)
        g = torch.randn(batch, outer, side, side)
        flops = 2.0 * batch * side * side * outer * inner * 9
        window: Any = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        forms: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
            ("conv", ops.conv, (image, kernel, None)),
            ("conv_dx", ops.conv_dx, (g, kernel, list(image.shape))),
            ("conv_dw", ops.conv_dw, (g, image, list(kernel.shape))),
        )
        for name, run, operands in forms:
            yield Timed("product", f"autopar.{name}", operands[:2], functools.partial(run, *operands, *window), flops)
    yield from mixtures(quick)


def mixtures(quick: bool) -> Iterator[Timed]:
    """Mixtures of experts, from few rows an expert, where weights are what is moved, to many. Their dims: those rows, inner dim
    and width."""
    sizes = [(64, 8, 64, 128), (256, 4, 128, 128), (1024, 4, 128, 64), (64, 4, 256, 256), (512, 2, 256, 256)]
    sizes += [(128, 8, 256, 512), (4096, 4, 64, 64)]
    for tokens, count, d, f in sizes if quick else [*sizes, (256, 16, 64, 64), (4096, 4, 128, 128)]:
        x, g, shares = torch.randn(tokens, d), torch.randn(tokens, d), torch.rand(tokens, 2)
        w_in, w_out = torch.randn(count, d, 2, f), torch.randn(count, f, d)
        chosen = torch.randint(0, count, (tokens, 2))
        once, dims = 2.0 * chosen.numel() * d * f, (max(chosen.numel() // count, 1), f, d)
        operands = (x, w_in, w_out, chosen, shares)
        forward: tuple[Any, ...] = (x, w_in, None, w_out, None, chosen, shares)
        backward, gate = (g, *forward, True), ("silu", 1.0, None, 0.0)
        for op, function, given, flops, read in (
            ("experts", experts.experts, forward, 3 * once, operands),
            ("experts_grad", experts.experts_grad, backward, 8 * once, (g, *operands)),
        ):
            run: Callable[..., Any] = function
            yield Timed("product", f"autopar.{op}", read, functools.partial(run, *given, *gate), flops, dims)


OPTIMIZERS: Mapping[int, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    0: lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    1: lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    2: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
"""One for every number of elements of state per element of a parameter."""
PARAMETERS, LARGE = 8, 1 << 21
"""How many parameters updates are measured on; and floats of one that no cache holds, of which a quarter as many will do. Updates
pass over a parameter several times: its bytes take longer where the next pass does not find them in a cache."""


def updates(numel: int) -> Iterator[Timed]:
    """Optimizers' steps over parameters of so many floats."""
    count = PARAMETERS // 4 if numel >= LARGE else PARAMETERS
    for states, make in OPTIMIZERS.items():
        parameters = [torch.zeros(numel, requires_grad=True) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(numel)
        yield Timed("update", f"update {states}", tuple(parameters), make(parameters).step, times=count)


def measured(timed: Sequence[Timed], rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[Measured]:
    """Seconds of every op over rounds in which all take turns, after one that is not counted."""
    times: list[list[float]] = [[] for _ in timed]
    results: list[float] = [0.0] * len(timed)
    for turn in range(rounds + 1):
        for i, one in enumerate(timed):
            start = clock()
            result = one.run()
            taken = clock() - start
            if turn:
                times[i].append(taken)
            else:
                results[i] = nbytes_of(result)
            del result
    return [
        Measured(one.kind, one.op, _moved(one, made), one.flops, one.dims, usual_s(seconds) / one.times)
        for one, made, seconds in zip(timed, results, times, strict=True)
    ]


def usual_s(seconds: Sequence[float] | np.ndarray) -> float:
    """The mean, which is what many of them take together, but none counts for more than three medians: what the machine does
    beside them belongs to it, and what somebody else started does not."""
    return float(np.minimum(seconds, 3 * np.median(seconds)).mean())


def middle(sweeps: Sequence[Sequence[T]]) -> list[T]:
    """Rows that were measured in every sweep, each with the median of its seconds."""
    return [
        alike[0]._replace(seconds=float(np.median([one.seconds for one in alike])))
        for alike in zip(*sweeps, strict=True)
    ]


def nbytes_of(value: Any) -> float:
    """Bytes of the tensors in a result."""
    if isinstance(value, Tensor):
        return float(value.numel() * value.element_size())
    return sum(map(nbytes_of, value)) if isinstance(value, tuple | list) else 0.0


def _moved(one: Timed, made: float) -> float:
    """Bytes read and written. A look-up reads of its table what it makes; an update its state too."""
    if one.kind == "update":
        return (3 + 2 * int(one.op.split()[1])) * nbytes_of(one.operands) / one.times
    return nbytes_of(one.operands) + made * (2 if one.op == "autopar.embedding" else 1)


@torch.no_grad()
def measure_kernels(
    quick: bool,
    say: Callable[[str], None],
    together: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """All of the above. together: waits for the other ranks, so that all are at work at the same time. clock: what counts
    the seconds."""
    keep_freed_memory()
    rounds = 4 if quick else 10
    found: list[Measured] = []
    gc.collect()
    for rows in ROWS[quick]:
        together()
        found += measured([*passes(rows), *updates(rows * WIDTH // 4)], max(2, min(rounds, 20000 // rows)), clock)
        say(f"passes over {rows} rows of {WIDTH}")
    together()
    found += measured(list(updates(LARGE)), 2, clock)
    say("updates of large parameters")
    together()
    found += measured(list(products(quick)), rounds, clock)
    say("products")
    return found


def fit_product(found: Sequence[Measured]) -> tuple[Product, float]:
    """The product whose formula is nearest to what was measured, by squared relative errors; their median."""
    seconds, flops = np.array([m.seconds for m in found]), np.array([m.flops for m in found])
    best, least, residual = Product(0.0, 1.0, 0.0), math.inf, 0.0
    for half_dim in (0.0, *np.geomspace(0.5, 256, 40)) if found[0].dims else (0.0,):
        stretch = np.array([math.prod(1 + half_dim / dim for dim in m.dims) for m in found])
        A = np.stack([1 / seconds, flops * stretch / seconds], axis=1)
        launch_s, per_flop = np.linalg.lstsq(A, np.ones(len(found)), rcond=None)[0]
        if launch_s < 0 or per_flop <= 0:
            launch_s = 0.0
            per_flop = float(np.sum(A[:, 1]) / np.sum(A[:, 1] ** 2))
        errors = A @ np.array([launch_s, per_flop]) - 1
        if float(errors @ errors) < least:
            least, residual = float(errors @ errors), float(np.median(np.abs(errors)))
            best = Product(float(launch_s), 1 / float(per_flop), float(half_dim))
    return best, residual


def fit_kernels(found: Sequence[Measured]) -> tuple[KernelTimes, dict[str, float]]:
    """The kernels of a profile, and the residuals of the products' fits."""
    by_op: dict[str, list[Measured]] = {}
    for m in found:
        by_op.setdefault(m.op, []).append(m)
    passes_ = {}
    products_, residuals, tile = {}, {}, 0.0
    for op, rows in by_op.items():
        if rows[0].kind == "causal":
            tile = causal_tile(rows[0], by_op["autopar.attention"])
        elif rows[0].kind == "product":
            products_[op], residuals[op] = fit_product(rows)
        else:
            passes_[op] = tuple(sorted((m.nbytes, m.seconds) for m in rows))
    products_["matmul"] = products_["autopar.linear"]
    return KernelTimes(passes_, products_, tile), residuals


def causal_tile(causal: Measured, full: Sequence[Measured]) -> float:
    """Keys that a causal kernel skips at once, out of its seconds and those of the same scores without a mask: by tiles it does
    (keys + tile) / 2 of the keys for a row, at most all of them."""
    keys = causal.dims[0]
    (unmasked_s,) = (m.seconds for m in full if m.dims == causal.dims)
    return float(np.clip(2 * causal.seconds / unmasked_s - 1, 0.0, 1.0)) * keys
