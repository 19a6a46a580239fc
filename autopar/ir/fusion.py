"""Rewritings of lowered functions, line by line: products take their bias along, kernels widen what they read themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from autopar.ir.lines import Compute, Function, Line, Ref
from autopar.ir.types import TensorType

_BIAS = {"autopar.linear": "b", "autopar.einsum": "bias"}
"""Products -> the argument that takes a vector along their last dim."""


_WIDENING = ("aten.add.Tensor", "aten.div.Tensor", "aten.mul.Tensor", "aten.sub.Tensor")
"""Ops of two operands whose kernels read one of a narrower dtype than the other, and compute in the wider one."""


def without_widening(function: Function, saved: Iterable[str] = ()) -> Function:
    """Casts to a wider dtype are left out where every reader has another operand in that dtype: it reads the narrow value and
    widens it inside. The numbers are the same, and a pass over memory is saved."""
    types: dict[str, TensorType | None] = {n: t for n, (t, _) in function.arg_types.items()}
    types |= {name: type_ for line in function.lines for name, type_, _ in line.made()}
    kept = {n for n in function.returns if n} | set(saved)
    narrow: dict[str, Ref] = {}
    for line in function.lines:
        match line:
            case Compute("aten._to_copy.default", {"self": Ref(name=value)}, outs=(out,)) if out not in kept:
                before, after = types.get(value), types[out]
                if before and after and before.dtype.is_floating_point and before.dtype.itemsize < after.dtype.itemsize:
                    narrow[out] = Ref(value)
    for line in function.lines:
        for name in [n for n in line.reads() if n in narrow]:
            others = [n for n in line.reads() if n != name]
            widens = isinstance(line, Compute) and line.op in _WIDENING and len(others) == 1
            other = types.get(others[0]) if widens and others[0] not in narrow else None
            if other is None or not other.shape or other.dtype != types[name].dtype:  # type: ignore[union-attr]
                narrow.pop(name, None)
    lines = (
        replace(line, kwargs={k: narrow.get(v.name, v) if isinstance(v, Ref) else v for k, v in line.kwargs.items()})
        if isinstance(line, Compute) and narrow.keys() & {*line.reads()}
        else line
        for line in function.lines
        if not (line.outs and line.outs[0] in narrow)
    )
    return replace(function, lines=tuple(lines))


def fuse_bias(function: Function, saved: Iterable[str] = ()) -> Function:
    """A product whose result is only read by the addition of a vector, and not saved, becomes one product with bias."""
    uses: dict[str, int] = {}
    for line in function.lines:
        for name in line.reads():
            uses[name] = uses.get(name, 0) + 1
    kept = {n for n in function.returns if n} | set(saved)
    products = {line.outs[0]: line for line in function.lines if isinstance(line, Compute) and line.op in _BIAS}
    ranks: dict[str, int] = {n: len(t.shape) for n, (t, _) in function.arg_types.items()}
    fused: set[str] = set()
    lines: list[Line] = []
    for line in function.lines:
        match line:
            case Compute("aten.add.Tensor", {"self": Ref(name=left), "other": Ref(name=right)} as kwargs) if (
                kwargs.get("alpha", 1) == 1
                and (names := _product_and_vector(left, right, products.keys(), ranks)) is not None
                and uses[names[0]] == 1
                and names[0] not in kept
                and len(line.types[0].shape if line.types[0] else ()) > 1
            ):
                product = products[names[0]]
                fused.add(names[0])
                with_bias = {**product.kwargs, _BIAS[product.op]: Ref(names[1])}
                lines.append(replace(line, op=product.op, kwargs=with_bias, source=product.source))
            case _:
                lines.append(line)
                ranks |= {name: len(type_.shape) for name, type_, _ in line.made() if type_ is not None}
    return replace(function, lines=tuple(line for line in lines if not (line.outs and line.outs[0] in fused)))


def _product_and_vector(
    left: str, right: str, products: Collection[str], ranks: Mapping[str, int]
) -> tuple[str, str] | None:
    """Which operand of an addition is a product and which a vector, if so."""
    return next(((x, y) for x, y in ((left, right), (right, left)) if x in products and ranks.get(y) == 1), None)
