"""A rewriting of lowered functions that emitted files and their memory's account share: products take their bias along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.lines import Compute, Function, Line, Ref


def fuse_bias(function: Function, saved: Iterable[str] = ()) -> Function:
    """`linear` whose result is only read by the addition of a vector, and not saved, becomes one `linear` with bias."""
    uses: dict[str, int] = {}
    for line in function.lines:
        for name in line.reads():
            uses[name] = uses.get(name, 0) + 1
    kept = {n for n in function.returns if n} | set(saved)
    products = {
        line.outs[0]: line for line in function.lines if isinstance(line, Compute) and line.op == "autopar.linear"
    }
    ranks: dict[str, int] = {n: len(t.shape) for n, (t, _) in function.arg_types.items()}
    fused: set[str] = set()
    lines: list[Line] = []
    for line in function.lines:
        match line:
            case Compute("aten.add.Tensor", {"self": Ref(name=left), "other": Ref(name=right)} as kwargs) if (
                kwargs.get("alpha", 1) == 1
                and left in products
                and uses[left] == 1
                and left not in kept
                and ranks.get(right) == 1
                and len(line.types[0].shape if line.types[0] else ()) > 1
            ):
                product = products[left]
                fused.add(left)
                lines.append(
                    replace(line, op=product.op, kwargs={**product.kwargs, "b": Ref(right)}, source=product.source)
                )
            case _:
                lines.append(line)
                ranks |= {name: len(type_.shape) for name, type_, _ in line.made() if type_ is not None}
    return replace(function, lines=tuple(line for line in lines if not (line.outs and line.outs[0] in fused)))
