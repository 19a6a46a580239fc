"""Conditions under which a program is the step: outputs of the captured graph that must have the example's values.

Where a condition says the same of every element (`torch.isfinite(h).all()`, `not (h > c).any()`, `lengths.max() <= n`), each
element is held to it where it lies: a rank needs its own part alone, a microbatch its own rows, and nothing is sent. Any other
condition is held as a whole, on every rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.exported import Exported
from autopar.ops.integers import expect

aten = torch.ops.aten
_ALL = frozenset({aten.all.default, aten._is_all_true.default})
_ANY = frozenset({aten.any.default, aten._is_any_true.default})
_PASSED = frozenset({aten.detach.default, aten.alias.default, aten.reshape.default, aten.view.default})
_MOST, _LEAST = aten.max.default, aten.min.default
_BELOW = frozenset({aten.lt.Scalar, aten.le.Scalar})
_ABOVE = frozenset({aten.gt.Scalar, aten.ge.Scalar})


def guarded(exported: Exported, guards: bool) -> Exported:
    """The step in which what it holds the data to are guards of the program, or, without guards, is left out."""
    nodes, output = {node.name: node for node in exported.graph.nodes}, exported.graph.output_node()
    for name, held in {held.output: held for held in exported.held}.items() if guards else ():
        condition = nodes[name]
        truth, wanted = (
            of_each_element(condition, held.value) or _exact(condition, held.value) or (condition, held.value)
        )
        with exported.graph.inserting_after(truth):
            expected = exported.graph.call_function(expect, (truth, wanted))
        expected.meta = {**truth.meta, "stack_trace": held.asked}
        output.replace_input_with(condition, expected)
    names = exported.output_names
    if not guards:
        gone = {held.output for held in exported.held}
        names = tuple(name for name in names if name not in gone)
        kept = [node for node in output.args[0] if node.name not in gone]  # type: ignore[operator, union-attr]
        output.args = (tuple(kept),)
    remove_dead_code(exported.graph)
    asked = (" ".join(held.asked.split()) for held in exported.held if held.question is not None)
    return replace(exported, output_names=names, followed=tuple(dict.fromkeys(asked)), held=())


def of_each_element(condition: fx.Node, value: bool) -> tuple[fx.Node, bool] | None:
    """The truths of elements, and what all of them must be, exactly where the condition is to be `value`; None where it says
    something of all elements together."""
    node, value = _source(condition, value)
    if not node.all_input_nodes:
        return None
    of = node.args[0]
    assert isinstance(of, fx.Node)
    if (node.target in _ALL and value) or (node.target in _ANY and not value):
        return (of, value) if _dtype(of) == torch.bool else None
    if node.target not in _BELOW | _ABOVE:
        return None
    extreme, _ = _source(of, True)
    if extreme.target not in (_MOST, _LEAST) or _dtype(extreme) != _dtype(of):
        return None
    # the largest is below a bound if all are, and is not above one if none is; but none is above a nan
    alike = (extreme.target is _MOST) == (node.target in _BELOW)
    elements = extreme.args[0]
    assert isinstance(elements, fx.Node)
    if alike != value or not (value or not _dtype(elements).is_floating_point):
        return None
    with node.graph.inserting_after(elements):
        each = node.graph.call_function(node.target, (elements, *node.args[1:]))
    with torch._C.DisableTorchFunction():
        each.meta = {**node.meta, "val": elements.meta["val"] > 0}
    return each, value


def _exact(condition: fx.Node, value: bool) -> tuple[fx.Node, int] | None:
    """The integer that a condition compares, and the one that it must be, so that a guard can say both; None for others."""
    node, value = _source(condition, value)
    of, wanted = (*node.args, None, None)[:2]
    compares = node.target is aten.eq.Scalar and value and type(wanted) is int and isinstance(of, fx.Node)
    return (of, wanted) if compares and _dtype(of) == torch.int64 else None  # type: ignore[arg-type, return-value]


def _source(node: fx.Node, value: bool) -> tuple[fx.Node, bool]:
    """The node that has the same element under other names, and the truth that it must have."""
    while isinstance(of := node.args[0] if node.args else None, fx.Node):
        same_shape = node.meta["val"].shape == of.meta["val"].shape
        not_zero = node.target is aten.ne.Scalar and node.args[1] == 0 and _dtype(of) == torch.bool
        if not_zero or (node.target in _PASSED and same_shape):
            node = of
        elif node.target is aten.logical_not.default and _dtype(of) == torch.bool:
            node, value = of, not value
        else:
            break
    return node, value


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
