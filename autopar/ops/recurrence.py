"""Recurrent layers: LSTM, GRU and the plain ones, one op a layer and direction. Only the batch shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.random import lift_dropout
from autopar.ops.registry import define, named
from autopar.runtime.kernels import rnn as local

Tensor = torch.Tensor
aten = torch.ops.aten
_OPERANDS = (
    "str mode, Tensor x, Tensor h0, Tensor? c0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr"
)
_GRADS = ", ".join(["Tensor"] * 8)
_FACTS: dict[str, Any] = {"dear": True, "hidden_workspace": True, "home": "rnn"}

define(*named("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), precision="low")


def _rule(call: OpCall, *results: str) -> Rule:
    make = Maker()
    x = call.operand("x")
    b = make.add("b", x.shape[1])
    table: dict[str, Labels] = dict.fromkeys(("x", "g_out"), ((), b, ()))
    table |= dict.fromkeys(("h0", "c0", "g_h", "g_c"), (b, ()))
    table |= {"w_ih": ((), ()), "w_hh": ((), ()), "b_ih": ((),), "b_hh": ((),), "w_hr": ((), ())}
    operands: list[Labels | None] = [table[n] for n, a in call.arguments.items() if isinstance(a, Operand)]
    return make.rule(operands, [table[n] for n in results])


@graph_op(
    f"rnn({_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    local.rnn,
    lambda mode, x, h0, c0, *_: (
        x.new_empty([*x.shape[:2], h0.shape[-1]]),
        empty_like(h0),
        empty_like(h0 if c0 is None else c0),
    ),
    result_names=("states", "h", "c"),
    **_FACTS,
)
def rnn(call: OpCall) -> Rule:
    """The batch alone shards."""
    return _rule(call, "x", "h0", "h0")


def _grad_shapes(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    *_: Tensor,
) -> tuple[Tensor, ...]:
    bias, projection = w_ih.new_empty([w_ih.shape[0]]), w_ih.new_empty([1, 1] if w_hr is None else w_hr.shape)
    return *map(empty_like, (x, h0, h0 if c0 is None else c0, w_ih, w_hh)), bias, torch.empty_like(bias), projection


@graph_op(
    f"rnn_grad({_OPERANDS}, Tensor g_out, Tensor g_h, Tensor g_c) -> ({_GRADS})", local.rnn_grad, _grad_shapes, **_FACTS
)
def rnn_grad(call: OpCall) -> Rule:
    """Gradients of the weights are sums over the batch."""
    return _rule(call, "x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr")


class RNN(Function):
    """One layer, one direction; x is (time, batch, input)."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: str,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        w_hr: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr)
        ctx.mode = mode
        out, h, c = rnn(mode, x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr)
        return out, h, c

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_h: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = rnn_grad(ctx.mode, *saved, g_out, g_h, g_c)
        return None, *(g if t is not None else None for g, t in zip(grads, saved, strict=True))


def _layers(
    mode: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    per = len(params) // (layers * directions)
    plain = 4 if biases else 2
    lasts: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = params[k * per : (k + 1) * per]
            weights = [*own[:plain], *[None] * (4 - plain), own[plain] if per > plain else None]
            start = [h[k] for h in hidden] + [None] * (2 - len(hidden))
            out, *last = RNN.apply(mode, x.flip(0) if direction else x, *start, *weights)
            outs.append(out.flip(0) if direction else out)
            lasts.append(tuple(last[: len(hidden)]))
        x = torch.cat(outs, -1) if directions > 1 else outs[0]
        if p > 0 and train and layer + 1 < layers:
            x = lift_dropout(x, p, True)
    ends = [torch.stack(state) for state in zip(*lasts, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *ends


@lifts(aten.lstm.input)
def _lstm(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *config: Any) -> tuple[Tensor, ...]:
    return _layers("lstm", x, hx, params, *config)


def _one_state(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, hx, params, *config: _layers(mode, x, [hx], params, *config)


lifts(aten.gru.input)(_one_state("gru"))
lifts(aten.rnn_tanh.input)(_one_state("rnn_tanh"))
lifts(aten.rnn_relu.input)(_one_state("rnn_relu"))
