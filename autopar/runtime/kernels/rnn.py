"""One layer of a recurrent network (LSTM, GRU, tanh or relu RNN) in one direction, forward and backward.

The backward recomputes the forward under local autograd: the layer's steps stay one op in the graph. It recomputes it in
training mode, which is all that cuDNN can differentiate; the modes differ in dropout between layers alone, and here is one layer.
"""

from __future__ import annotations

import torch
from torch import _VF

Tensor = torch.Tensor


def _run(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    bias: bool,
    *,
    differentiated: bool = False,
) -> tuple[Tensor, ...]:
    """weights: in torch's order, the projection of an LSTM last."""
    h0 = h0.unsqueeze(0)
    if mode == "lstm":
        assert c0 is not None
        out, h, c = _VF.lstm(x, (h0, c0.unsqueeze(0)), weights, bias, 1, 0.0, differentiated, False, False)
        return out, h[0], c[0]
    call = {"gru": _VF.gru, "rnn_tanh": _VF.rnn_tanh, "rnn_relu": _VF.rnn_relu}[mode]
    out, h = call(x, h0, weights, bias, 1, 0.0, differentiated, False, False)
    return out, h[0], torch.zeros_like(h[0])


def rnn(
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
    """x: (time, batch, input), h0: (batch, output), c0: (batch, hidden) -> out: (time, batch, output), h, c. w_hr: (output,
    hidden), the projection of an LSTM; without one output and hidden are equal."""
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh, w_hr) if w is not None]
    with torch.no_grad():
        out, h, c = _run(mode, x, h0, c0, weights, b_ih is not None)
    return out, h.clone(), c.clone()


def rnn_grad(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    g_out: Tensor,
    g_h: Tensor,
    g_c: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr (zeros where an argument is absent)."""
    arguments = (x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr)
    inputs = [t.detach().requires_grad_() if t is not None else None for t in arguments]
    leaves = [t for t in inputs if t is not None]
    with torch.enable_grad():
        weights = [t for t in inputs[3:] if t is not None]
        assert inputs[0] is not None
        assert inputs[1] is not None
        out, h, c = _run(mode, inputs[0], inputs[1], inputs[2], weights, b_ih is not None, differentiated=True)
        heads, seeds = ([out, h, c], [g_out, g_h, g_c]) if mode == "lstm" else ([out, h], [g_out, g_h])
        grads = iter(torch.autograd.grad(heads, leaves, seeds))
    of_gates = w_ih.shape[:1]
    absent = {2: h0.shape, 5: of_gates, 6: of_gates, 7: (1, 1)}
    return tuple(next(grads) if t is not None else h0.new_zeros(absent[i]) for i, t in enumerate(inputs))
