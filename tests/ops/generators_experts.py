"""Random small mixtures of experts."""

from __future__ import annotations

import torch

from autopar.ops import experts
from autopar.ops.chosen import count_chosen
from autopar.ops.grouped import stacked
from autopar.runtime.kernels.gates import ACTIVATIONS
from tests.ops.execution import Case
from tests.ops.generators import Draw, call, makes


@makes("autopar.experts", "autopar.experts_grad")
def _experts(draw: Draw, name: str) -> Case:
    """Some choices are of no expert, some tokens choose one twice; routing is as uneven as it comes."""
    lead, count, choices = draw.shape(1, 2), draw.size(), draw.pick(1, 2, 3)
    d, f, halves, biased = draw.pick(1, 3, 4), draw.size(), draw.pick(1, 2), draw.pick(True, False)
    x, weights = draw.f(*lead, d), draw.f(*lead, choices)
    chosen = draw.i(count + 1, *lead, choices) if draw.pick(True, False) else draw.i(1, *lead, choices)
    w_in = draw.pick(
        lambda: draw.f(count, d, halves, f),
        lambda: draw.f(count, halves, f, d).permute(0, 3, 1, 2),
        lambda: draw.f(count, d, f, halves).transpose(2, 3),
        lambda: draw.f(count, f, halves, d).permute(0, 3, 2, 1),
    )()
    b_in, b_out = (draw.f(count, halves, f), draw.f(count, d)) if biased else (None, None)
    w_out = draw.f(count, f, d) if draw.pick(True, False) else draw.f(count, d, f).transpose(1, 2)
    operands = (x, w_in, b_in, w_out, b_out, chosen, weights)
    gate = (draw.pick(*ACTIVATIONS), draw.pick(1.0, 1.702), draw.pick(None, 0.5), draw.pick(0.0, 1.0))
    promise = (draw.pick(1.0, 1.25, 2.0), "chunk")
    if name == "autopar.experts":
        return call(experts._experts, *operands, *gate, *promise)
    return call(experts.experts_grad, draw.f(*lead, d), *operands, draw.pick(True, False), *gate, *promise)


@makes("autopar.count_chosen")
def _count_chosen(draw: Draw, name: str) -> Case:
    """Numbers of no expert are not counted; one-hot rows have any number of ones."""
    n, shape = draw.size(), draw.shape(1, 3)
    if draw.pick(True, False):
        return call(count_chosen, draw.pick(draw.i(2, *shape, n), draw.b(*shape, n)), n, True, torch.float64)
    return call(count_chosen, draw.i(n + 2, *shape) - 1, n, False, torch.float64)


@makes("autopar.stacked")
def _stacked(draw: Draw, name: str) -> Case:
    """Parts have memories of their own, or lie one after another in one."""
    shape, count = draw.shape(1, 3), draw.size()
    parts = draw.pick(lambda: [draw.f(*shape) for _ in range(count)], lambda: [*draw.f(count, *shape)])()
    return call(stacked, parts)
