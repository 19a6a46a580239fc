"""A rewriting of lowered functions that emitted files and their memory's account share: products take their bias along."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from autopar.ir.lines import Compute, Function, Line, Ref

_BIAS = {"autopar.linear": "b", "autopar.einsum": "bias"}
"""Products -> the argument that takes a vector along their last dim."""


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
