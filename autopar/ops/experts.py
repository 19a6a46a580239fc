"""The experts of a mixture as one op: what tokens chose, the experts' two layers, and the weighted sum.

    y[t] = sum over j of weights[t, j] · expert[chosen[t, j]](x[t])         t d, e d 2 f, e f d, t c -> t d

Tokens shard, and so do experts (a rank that has all tokens and some experts leaves a partial sum) and their inner dim.
The carried choice `+t+e` is expert parallelism: one axis shards tokens and experts together, rows travel to the experts
that they chose and back (`autopar.runtime.kernels.experts.dispatch`), and nothing is owed over it. Two axes may take it:
then a row travels along the first once to every node that has any of its experts, and inside that along the second
(`autopar.runtime.kernels.experts.two_level_dispatch`). How many rows a rank gets only the data decides; memory is counted
for `Options.expert_imbalance` times the mean; on a device that the host runs ahead of messages are always that large.

gate and up have a dim of their own in w_in, so that the inner dim shards: a view of the matrix that holds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import CaptureError, InputError
from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Carried, Labels, Rule
from autopar.ir.sent import Sent
from autopar.ir.visits import visits
from autopar.ops.dialect import differentiable, empty_like, given, graph_op
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, Gemm, Grouped, Sending
from autopar.runtime.comm.devices import CPU
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.kernels.experts import experts as local
from autopar.runtime.kernels.experts.dispatch import Promise
from autopar.runtime.kernels.gates import ACTIVATIONS

Tensor = torch.Tensor
_OPERANDS = "Tensor x, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor chosen, Tensor weights"
_GATE = "str act, float alpha, float? limit, float shift"
_PROMISE = "float expert_imbalance=1.25, str on_overflow='stop'"
_NAMES = ("g", "x", "w_in", "b_in", "w_out", "b_out", "chosen", "weights")


def _labels(call: OpCall) -> tuple[Maker, dict[str, Labels], list[Labels | None]]:
    make = Maker()
    w_in = call.operand("w_in")
    choices = make.add("c", call.operand("chosen").shape[-1], whole=True)
    tokens = make.dims(call.operand("chosen").shape[:-1], "t")
    e, f = make.add("e", w_in.shape[0]), make.add("f", w_in.shape[3])
    d, halves = make.add("d", w_in.shape[1], whole=True), make.add("h", w_in.shape[2], whole=True)
    table: dict[str, Labels] = dict.fromkeys(("g", "x"), (*tokens, d))
    table |= dict.fromkeys(("chosen", "weights"), (*tokens, choices))
    table |= {"w_in": (e, d, halves, f), "b_in": (e, halves, f), "w_out": (e, f, d), "b_out": (e, d)}
    return make, table, [table[n] for n in _NAMES if isinstance(call.get(n), Operand)]


def _carried(call: OpCall) -> list[Carried]:
    return [Carried((f"t{i}", "e"), axes=2, uneven=1) for i in range(len(call.operand("chosen").shape) - 1)]


def _pairs(call: OpCall) -> int:
    return math.prod(call.operand("chosen").shape)


def _padding(call: OpCall, pairs: float, ranks: float, of: float = 1.0) -> float:
    """Rows of padded messages over those that a rank sends, of so many pairs to so many ranks. of: share that one may get."""
    promise = Promise(call["expert_imbalance"], call["on_overflow"])
    if promise.on_overflow == "chunk" or ranks == 1:
        return 1.0
    return promise.room(int(pairs), ranks, int(pairs * of)) * ranks / pairs


def _products(call: OpCall) -> tuple[float, float]:
    """FLOPs of the first and of the second product."""
    _, d, halves, f = call.operand("w_in").shape
    return 2.0 * _pairs(call) * d * halves * f, 2.0 * _pairs(call) * d * f


def _work(call: OpCall, rule: Rule) -> Gemm:
    """2 · rows · k · n of every product, whatever the number of experts; backward makes the first again."""
    first, second = _products(call)
    flops = first + second
    if call.op.startswith("autopar.experts_grad"):
        flops = 2.0 * first + second + (first + second if call["of_layers"] else 0.0)
    return flops, "matmul", ()


def _dims(call: OpCall, parts: Mapping[str, int], share: int) -> tuple[int, ...]:
    """Rows of one expert, inner dim and width: every expert's rows are a product of their own. An axis that carries
    brings an expert the rows of all its ranks; one that shards tokens alone leaves it a share of them. The first product is as
    wide as all halves of the inner dim, the second as deep as one: the mean of both, each as often as its work is."""
    experts, d, halves, f = call.operand("w_in").shape
    of_experts, of_inner = _cut(parts)
    of_tokens = share / (of_experts * of_inner)
    return max(int(_pairs(call) / (experts * of_tokens)), 1), int((halves + 1) / 2 * f / of_inner), d


def _cut(parts: Mapping[str, int]) -> tuple[int, int]:
    """Into how many parts experts and inner dim are cut; a dim of size one is no factor."""
    return parts.get("e", 1), parts.get("f", 1)


def _grouped(call: OpCall, parts: Mapping[str, int], share: int) -> Grouped:
    """Rows are gathered (2 passes) and added to their tokens (5); along an axis that sends them they are sorted and put back
    where they are computed (4). Backward gathers and sorts gradients too, and makes the first product again."""
    _, d, halves, f = call.operand("w_in").shape
    x = call.operand("x")
    of_experts, of_inner = _cut(parts)
    rows, width = _pairs(call) * of_inner / share, x.nbytes / math.prod(x.shape)
    carries = math.prod(parts.values()) > share
    padding = _padding(call, rows if carries else rows * of_experts, of_experts)
    of = (call["x"].index, call.operand("chosen").shape[-1], call.operand("w_in").shape[0] // of_experts)
    row_bytes, wide_bytes = rows * width * d, rows * width * f / of_inner
    inner_bytes, apart_bytes = (halves + 1) * wide_bytes, (5 if halves == 2 else 2) * wide_bytes
    if call.op.startswith("autopar.experts_grad"):
        again = _products(call)[0] / _work(call, Rule((), (), {}))[0]
        cast = rows * (d + halves * f / of_inner)
        return Grouped(
            *of, 1.5 * row_bytes, 10 if carries else 6, 1.5 * inner_bytes, 1.5 * apart_bytes, again, padding, cast
        )
    cast = rows * (d + f / of_inner)
    return Grouped(*of, row_bytes, 11 if carries else 7, inner_bytes, apart_bytes, padding=padding, cast=cast)


def _block(block: Block) -> dict[str, Any]:
    told: dict[str, Any] = block.told() | _unequal(block)
    parts = block.mesh.parts(block.call.operand("w_in").shape[0], block.axes_of("e"))
    if not told and parts > 1:
        told = {"first": block.offset("e"), "parts": parts if isinstance(parts, int) else float(parts)}
    if block.offset("f") != 0 and isinstance(block.call.get("b_out"), Operand):
        told["inner"] = block.offset("f")
    return told


def _unequal(block: Block) -> dict[str, int]:
    """All experts, and the tokens of the rank with the most, where ranks along an axis that carries hold unequally many."""
    mesh, told = block.mesh, dict[str, int]()
    if not any(isinstance(mesh.sizes[axis], Shares) for axis, _ in block.carried):
        return told
    if mesh.is_uneven(block.rule.factors["e"].size, block.axes_of("e")):
        told["experts"] = block.rule.factors["e"].size
    tokens = {f: block.axes_of(f) for f in block.rule.factors if f.startswith("t")}
    if any(mesh.is_uneven(block.rule.factors[f].size, axes) for f, axes in tokens.items()):
        of_longest = (
            block.rule.factors[f].size / mesh.parts(block.rule.factors[f].size, axes) for f, axes in tokens.items()
        )
        told["tokens"] = int(math.prod(of_longest))
    return told


def _through_nodes(sends: Callable[[Sending], list[Sent]]) -> Callable[[Sending], list[Sent]]:
    """The messages inside a node, of its experts' rows; where rows come to the node along an axis of their own also those of this
    leg: all ranks know all counts, but of padded messages, tokens go out with what they chose, and one row a token and node comes
    back. The work that hides messages hides those of the leg."""

    def through(sending: Sending) -> list[Sent]:
        if not sending.inner:
            return sends(sending)
        ((inner, ranks),) = sending.inner
        experts, choices = sending.call.operand("w_in").shape[0], sending.call.operand("chosen").shape[-1]
        copies, pairs = visits(sending.ranks, choices), _pairs_sent(sending)
        padded = sending.device != CPU and sending.call["on_overflow"] != "chunk"
        if padded:
            tokens, most = pairs / choices, min(choices, sending.ranks)
            copies = most * _padding(sending.call, tokens * most, sending.ranks, 1 / most)
        backward = sending.call.op.startswith("autopar.experts_grad")
        row, shares, numbers = (sending.bytes_of(name) for name in ("x", "weights", "chosen"))
        known = 8.0 * (experts + sending.ranks) * ranks
        counts, *there, back = sends(replace(sending, axis=inner, ranks=ranks, inner=()))
        gathers = [Sent("all_gather", inner, known), Sent("all_gather", sending.axis, known * sending.ranks)]
        further = [Sent("exchange", sending.axis, copies * row, behind=one.behind, joins=True) for one in there[1:]]
        returning = copies * (row + (shares if backward else 0.0))
        return [
            *(() if padded else gathers),
            Sent("exchange", sending.axis, copies * (row + shares + numbers), after=0.0, joins=not padded),
            *further,
            replace(counts, nbytes=counts.nbytes / sending.ranks),
            *(replace(one, behind=0.0) for one in there),
            replace(back, behind=0.0, after=1.0 - back.behind),
            Sent("exchange", sending.axis, returning, behind=back.behind, after=1.0),
        ]

    return through


def _pairs_sent(sending: Sending) -> float:
    """The pairs of tokens and choices of a rank."""
    return sending.bytes_of("chosen") / sending.call.operand("chosen").dtype.itemsize


def _rows_sent(sending: Sending) -> tuple[Sent, float]:
    """The gathered counts, and the bytes of the rows that come to the rank with most experts, with padding
    where there is any: what is promised of the busiest is room that is kept for it, and products are priced by the mean too."""
    experts, choices = sending.call.operand("w_in").shape[0], sending.call.operand("chosen").shape[-1]
    counts = Sent("all_gather", sending.axis, 8.0 * experts * sending.ranks)
    ranks = sending.ranks / sending.most
    padding = 1.0 if sending.device == CPU else _padding(sending.call, _pairs_sent(sending), ranks)
    return counts, sending.bytes_of("x") * choices * padding * sending.most


@_through_nodes
def _sends(sending: Sending) -> list[Sent]:
    """Rows to the experts, their counts before them, and back."""
    counts, rows = _rows_sent(sending)
    there = Sent("exchange", sending.axis, rows, after=0.0, joins=True)
    return [counts, there, Sent("exchange", sending.axis, rows, after=1.0)]


@_through_nodes
def _grad_sends(sending: Sending) -> list[Sent]:
    """Rows, their gradients behind the product that is made again, and the gradients of rows behind those of layers; of
    the router's weights and their gradients a number a row."""
    counts, rows = _rows_sent(sending)
    work = _work(sending.call, Rule((), (), {}))[0]
    first, second = _products(sending.call)
    shares = rows / sending.bytes_of("x") * sending.bytes_of("weights") / sending.call.operand("chosen").shape[-1]
    return [
        counts,
        Sent("exchange", sending.axis, rows, after=0.0, joins=True),
        Sent("exchange", sending.axis, rows + shares, behind=first / work, after=first / work, joins=True),
        Sent(
            "exchange",
            sending.axis,
            rows + shares,
            behind=(first + second) / work if sending.call["of_layers"] else 0.0,
            after=1.0,
        ),
    ]


_FACTS: dict[str, Any] = {
    "work": _work,
    "of_weights": "cast",
    "dims": _dims,
    "grouped": _grouped,
    "localize": _block,
    "precision": "low",
    "low_operands": -1,
    "home": "experts",
    "told_source": True,
    "options": ("expert_imbalance", "on_overflow"),
}


def _linear(call: OpCall) -> list[set[int]]:
    """The operands in which a mixture is linear: the router's weights, and the second layers."""
    index = {n: a.index for n in _NAMES if isinstance(a := call.get(n), Operand)}
    return [{index["weights"]}, {index[n] for n in ("w_out", "b_out") if n in index}]


@graph_op(
    f"experts({_OPERANDS}, {_GATE}, {_PROMISE}) -> Tensor",
    local.experts,
    lambda x, *_: empty_like(x),
    sends=_sends,
    linear=_linear,
    **_FACTS,
)
def _experts(call: OpCall) -> Rule:
    """Sharded experts and a sharded inner dim leave partial sums; an axis that carries tokens and experts leaves none."""
    make, table, operands = _labels(call)
    return make.rule(operands, [table["x"]], carried=_carried(call))


def _grad_shapes(
    g: Tensor,
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    chosen: Tensor,
    weights: Tensor,
    of_layers: bool,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    return empty_like(x), empty_like(weights), *local.gradient_room(w_in, b_in, w_out, b_out, of_layers)


@graph_op(
    f"experts_grad(Tensor g, {_OPERANDS}, bool of_layers, {_GATE}, {_PROMISE}) "
    f"-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    local.experts_grad,
    _grad_shapes,
    sends=_grad_sends,
    linear=lambda call: [{0}],
    fresh=True,
    result_names=("dx", "dweights", "dw_in", "db_in", "dw_out", "db_out"),
    **_FACTS,
)
def experts_grad(call: OpCall) -> Rule:
    """The gradients of layers are sums over tokens, but not over an axis that carries: there every rank has all rows of
    its own experts."""
    make, table, operands = _labels(call)
    present = {n for n in _NAMES if isinstance(call.get(n), Operand)} if call["of_layers"] else set()
    layers: list[Labels | None] = [table[n] if n in present else ((),) for n in ("w_in", "b_in", "w_out", "b_out")]
    return make.rule(operands, [table["x"], table["weights"], *layers], carried=_carried(call))


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w_in, b_in, w_out, b_out, chosen, weights, *config = given(ctx)
    wanted = ctx.needs_input_grad
    of_layers = any(wanted[1:5])
    grads = experts_grad(g, x, w_in, b_in, w_out, b_out, chosen, weights, of_layers, *config)
    dx, dweights, dw_in, db_in, dw_out, db_out = (grads[i] for i in range(6))
    by_argument = (dx, dw_in, db_in, dw_out, db_out, None, dweights)
    return *(t if needed else None for t, needed in zip(by_argument, wanted, strict=False)), *(None for _ in config)


def _refuse(ctx: Any, *_: Any) -> Any:
    raise CaptureError(
        "the gradient of the gradient of experts is not known; compute the penalty that asks for it without the mixture, "
        "or write the mixture with autopar.grouped_mm"
    )


differentiable(_experts, _backward)
differentiable(experts_grad, _refuse)


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
) -> Tensor:
    """A mixture of experts, for forwards given to `autopar.forward_of`.

    x: (…, d); chosen, weights: (…, choices), which experts each token takes and with what weight (a choice that is no
    number of an expert adds nothing); w_in: (experts, d, 1, f), or (experts, d, 2, f) for gate and up; w_out: (experts, f,
    d); b_in: (experts, 1 or 2, f), b_out: (experts, d). act: "silu", "gelu", "gelu_tanh", "relu", "relu2"; alpha, limit
    and shift as in `autopar.runtime.kernels.gates`. Returns (…, d). Raises InputError.
    """
    if act not in ACTIVATIONS:
        raise InputError(f"experts: the activation {act!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    count, d, halves, f = w_in.shape if w_in.ndim == 4 else (0, 0, 0, 0)
    right = halves in (1, 2) and w_out.shape == (count, f, d) and x.shape[-1] == d
    right = right and chosen.shape == weights.shape and chosen.shape[:-1] == x.shape[:-1]
    right = (
        right and (b_in is None or b_in.shape == (count, halves, f)) and (b_out is None or b_out.shape == (count, d))
    )
    if not right:
        shapes = (x, chosen, weights, w_in, w_out, *(b for b in (b_in, b_out) if b is not None))
        raise InputError(
            "experts takes x (…, d), chosen and weights (…, choices), w_in (experts, d, 1 or 2, f), w_out (experts, f, d) "
            f"and biases (experts, 1 or 2, f), (experts, d); it is given {', '.join(str(tuple(t.shape)) for t in shapes)}"
        )
    y: Tensor = _experts(x, w_in, b_in, w_out, b_out, chosen, weights, act, alpha, limit, shift)
    return y
