"""Mixed precision: every captured op computes in the low dtype or as the model has it, with casts where dtypes change.

A pass over the captured forward graph, before it is cut and differentiated, so that backward follows by differentiating
the casts. An op's class says what it computes in (`precision` of its definition):

    low      products, convolutions, attention, recurrent layers, look-ups: floating operands are cast to the low dtype
    follow   pointwise and moving ops: the widest of their operands; a parameter counts as low beside a low value
    round    softmax, sums: as the model has it (float32 inside), and the result back in the low dtype
    norm     norms: the same, also where no operand is low
    pass     casts and constants like another tensor: what they make follows from their arguments
    keep     everything else (losses, means, powers, logarithms, random numbers, unknown ops): as the model has it

Casts are made per use. Equal casts of a value inside a block become one when it is traced; a parameter that a block only
reads through casts is handed to it in the low dtype (`use_dtype`), so that its gather from storage moves half the bytes.
Outputs and buffer updates leave in the model's own dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.exported import Exported
from autopar.capture.graph.cast_marks import CAST as MARK
from autopar.capture.graph.cast_marks import TIED, is_cast
from autopar.errors import InputError
from autopar.ir.program import is_getitem, op_name
from autopar.ops.registry import Precision, find, precision_of

aten = torch.ops.aten
CAST = aten._to_copy.default


def use_dtype(read: fx.Node, inside: Collection[fx.Node]) -> torch.dtype | None:
    """The low dtype in which ops of a segment read a parameter, where all of them do."""
    dtypes: set[Any] = set()
    for user in read.users:
        if user in inside:
            dtypes.add(user.kwargs["dtype"] if is_cast(user) else None)
    only = dtypes.pop() if len(dtypes) == 1 else None
    return only if isinstance(only, torch.dtype) and only.itemsize < read.meta["val"].dtype.itemsize else None


def lower_precision(exported: Exported, low: torch.dtype, mode: FakeTensorMode) -> None:
    """Rewrite the captured graph in place: casts, and the dtypes in `meta["val"]`. Raises InputError."""
    parameters = {n for n in exported.graph.nodes if n.op == "placeholder" and exported.kinds[n.name][0] == "param"}
    for node in parameters:
        if node.meta["val"].dtype in (torch.bfloat16, torch.float16):
            raise InputError(
                f"the parameter {exported.kinds[node.name][1]} is {str(node.meta['val'].dtype).removeprefix('torch.')}: "
                "mixed precision keeps float32 master weights and casts them; pass the model in float32 (model.float()), "
                "or leave Options.precision out to train in the model's own dtype"
            )
    _Pass(exported.graph, low, mode, parameters).run()


class _Pass:
    def __init__(self, graph: fx.Graph, low: torch.dtype, mode: FakeTensorMode, parameters: set[fx.Node]) -> None:
        self.graph, self.low, self.mode = graph, low, mode
        self.parameters = parameters  # and views of them
        self.largest = torch.finfo(low).max
        self.was: dict[fx.Node, Any] = {}

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        self.was = {node: _dtypes(node.meta.get("val")) for node in nodes}
        for node in nodes:
            if node.op == "call_function":
                self._op(node)
        for node in reversed(nodes):
            if node.op == "call_function" and node in self.parameters and not node.users:
                self.graph.erase_node(node)  # a view whose readers have one of their own
        output = self.graph.output_node()
        with self.graph.inserting_before(output):
            ends = [self._back(n, output) if isinstance(n, fx.Node) else n for n in output.args[0]]  # type: ignore[union-attr]
        output.args = (tuple(ends),)

    def _op(self, node: fx.Node) -> None:
        if is_getitem(node):
            self._item(node)
            return
        op = op_name(node.target)
        precision = precision_of(op)
        floats = [n for n in node.all_input_nodes if _is_float(n)]
        if not any(_dtype(n) == self.low or (n in self.was and _dtype(n) != self.was[n]) for n in floats):
            all_wide = all(_dtype(n) == torch.float32 for n in floats)
            if precision != "norm" and not (precision == "low" and all_wide):
                self._views(node)
                return
        kind = self._kind(node, precision, floats)
        if kind == "low":
            definition = find(op)
            self._cast(node, floats[: definition.low_operands if definition else None], self.low)
            node.meta["val"] = _map(node.meta["val"], lambda t: self._like(t, self.low))
        elif kind == "follow":
            self._unify(node, floats)
            self._run(node)
        elif kind == "pass":
            self._run(node)
        else:
            narrow = any(_dtype(n) == self.low for n in floats)
            for operand in floats:
                self._replace(node, operand, self._back(operand, node))
            scalar = isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].numel() == 1
            if not scalar and (kind == "norm" or (kind == "round" and narrow)):
                self._round(node)
        self._views(node)

    def _kind(self, node: fx.Node, precision: Precision, floats: Sequence[fx.Node]) -> Precision:
        """The class of an op as it is called here."""
        if any(_dtype(n) == torch.float64 for n in floats) or self._too_large(node):
            return "keep"
        says_dtype = any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values()))
        return "keep" if precision in ("round", "norm") and says_dtype else precision

    def _too_large(self, node: fx.Node) -> bool:
        """Whether a number among the arguments is beyond the low dtype (masks of -1e9 in float16)."""
        numbers = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
        return any(self.largest < abs(a) < float("inf") for a in numbers)

    # ---- casts

    def _cast(self, node: fx.Node, operands: Sequence[fx.Node], dtype: torch.dtype) -> None:
        for operand in operands:
            if _dtype(operand) != dtype:
                self._replace(node, operand, self._as(operand, dtype, node))

    def _as(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """A value in a dtype, for `user`. Of a view of a parameter the parameter is cast, not the view."""
        with self.graph.inserting_before(user):
            if value in self.parameters and value.op == "call_function" and not is_getitem(value):
                (source,) = (n for n in value.all_input_nodes if n in self.parameters)
                first = self._as(source, dtype, user)
                new = self.graph.node_copy(value, lambda n: first if n is source else n)
                new.meta = {**_place(user), "val": self._like(value.meta["val"], dtype), TIED: "next"}
                return new
            new = self.graph.call_function(CAST, (value,), {"dtype": dtype})
        new.meta = {**_place(user), "val": self._like(value.meta["val"], dtype), MARK: True, TIED: "next"}
        return new

    def _back(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """A value in the dtype that the model gives it."""
        was = self.was.get(value)
        if not isinstance(was, torch.dtype) or was == _dtype(value) or not _is_float(value):
            return value
        return self._as(value, was, user)

    def _unify(self, node: fx.Node, floats: Sequence[fx.Node]) -> None:
        """Operands of one dtype; numbers (tensors without dims) stay as they are."""
        sized = [n for n in floats if n.meta["val"].ndim]
        deciding = [n for n in sized if n not in self.parameters] or sized
        if deciding:
            dtypes = {_dtype(n) for n in deciding}
            self._cast(node, sized, dtypes.pop() if len(dtypes) == 1 else torch.float32)

    def _round(self, node: fx.Node) -> None:
        """The (first) result in the low dtype; its readers so far all come later."""
        value, last = node, node
        while is_getitem(last.next) and last.next.args[0] is node:
            last = last.next
            value = last if last.args[1] == 0 else value
        if value is node and isinstance(node.meta["val"], (tuple, list)):
            return
        with self.graph.inserting_after(last):
            new = self.graph.call_function(CAST, (value,), {"dtype": self.low})
        new.meta = {**_place(node), "val": self._like(_first(node.meta["val"]), self.low), MARK: True, TIED: "previous"}
        value.replace_all_uses_with(new, lambda user: user is not new)
        self.was[new] = self.was[value]

    @staticmethod
    def _replace(node: fx.Node, old: fx.Node, new: fx.Node) -> None:
        if new is not old:
            node.replace_input_with(old, new)

    # ---- values

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        node.meta["val"] = source.meta["val"][index]  # type: ignore[union-attr]

    def _run(self, node: fx.Node) -> None:
        args = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = node.target(*args[0], **args[1])  # type: ignore[operator]

    def _like(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        with self.mode, torch.no_grad():
            return torch.empty_strided(value.shape, value.stride(), dtype=dtype)

    def _views(self, node: fx.Node) -> None:
        """A view of a parameter is cast where the parameter would be."""
        definition = find(op_name(node.target))
        if (
            definition is not None
            and definition.view
            and node.all_input_nodes
            and all(n in self.parameters for n in node.all_input_nodes)
        ):
            if isinstance(node.meta["val"], torch.Tensor):
                self.parameters.add(node)


def _place(user: fx.Node) -> dict[str, Any]:
    """Where a node made for `user` stands in the model."""
    if user.op == "output":
        return {}
    return {key: user.meta[key] for key in ("nn_module_stack", "stack_trace") if key in user.meta}


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _dtypes(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, change) for v in value)
    return change(value) if isinstance(value, torch.Tensor) else value


# ---- casts in a template


def cast_again(graph: fx.Graph) -> None:
    """Let backward cast once more what it would hold twice. Nodes have phases; the casts added here are backward's.

    A widened value is never held for backward: the narrow one is. A narrowed one is not where the wide one is held.
    """
    for widened in (True, False):
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target is not CAST or node.meta["phase"] != "F":
                continue
            source = node.args[0]
            late_users = [u for u in node.users if u.op == "call_function" and u.meta["phase"] != "F"]
            before, after = source.meta["type"].dtype, node.meta["type"].dtype
            if not late_users or not (before.is_floating_point and after.is_floating_point):
                continue
            held = any(u.op == "call_function" and u.meta["phase"] != "F" for u in source.users)
            if (after.itemsize > before.itemsize) if widened else (after.itemsize < before.itemsize and held):
                with graph.inserting_before(min(late_users)):  # the first in the graph; users stand as they were noted
                    new = graph.node_copy(node)
                new.meta = {**node.meta, "phase": "W"}
                node.replace_all_uses_with(new, lambda user, late_users=late_users: user in late_users)
