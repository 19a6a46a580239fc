"""The oracle for rules: cut operands as a strategy says, run the lowered line on every rank, put the results together.

Nothing is modelled twice: the call, its localized arguments and the text of the line are made by the code that lowers
and emits real programs; only the collectives are replaced by cutting and joining whole tensors here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from autopar.codegen.printer import Printer
from autopar.ir.call import OpCall
from autopar.ir.lines import Compute
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ir.rule import Rule, Strategy, carried_choices
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import Block, find
from autopar.ops.runtime_modules import RUNTIME_MODULES
from autopar.passes.lower.body import local_arguments
from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.mesh import box_of, slices_of
from autopar.runtime.guards import Guards

Tensor = torch.Tensor
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """One op applied to real tensors; `shapes_only`: its values are undefined."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes_only: bool = False

    def whole(self) -> list[Tensor | None]:
        out = self.target(*self.args, **self.kwargs)
        return [o if isinstance(o, Tensor) else None for o in (out if isinstance(out, (tuple, list)) else [out])]


def as_node(case: Case, whole: list[Tensor | None]) -> tuple[fx.Node, list[Tensor]]:
    """The case as a graph node over placeholders, and the tensors that stand for them."""
    graph, tensors = fx.Graph(), []

    def place(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["type"] = TensorType.of(arg)
            tensors.append(arg)
            return node
        return type(arg)(place(a) for a in arg) if isinstance(arg, (list, tuple)) else arg

    args = tuple(place(a) for a in case.args)
    kwargs = {k: place(v) for k, v in case.kwargs.items()}
    node = graph.call_function(case.target, args, kwargs)
    types = tuple(TensorType.of(t) if t is not None else None for t in whole)
    node.meta["type"] = types if len(types) > 1 or isinstance(_raw(case), (tuple, list)) else types[0]
    return node, tensors


def _raw(case: Case) -> Any:
    returns = case.target._schema.returns
    return () if len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type) else None


def rule_of(call: OpCall) -> Rule:
    definition = find(call.op)
    assert definition is not None, f"{call.op} has no rule"
    return definition.rule(call)


def cut(value: Tensor, spec: Spec, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """The block of `value` that every rank holds; sums still owed are split into random terms."""
    owed = [axis for axis, _ in spec.partial]
    terms: dict[tuple[int, ...], Tensor] = {}
    rest = value
    places = list(itertools.product(*(range(mesh.sizes[a]) for a in owed)))
    for place in places[:-1]:
        term = torch.randint(-64, 129, value.shape, generator=generator) / 64  # terms of 0 add up to it in float32 too
        terms[place] = term.to(value.dtype)
        rest = rest - terms[place]
    terms[places[-1]] = rest
    held = []
    for rank in range(mesh.size):
        where = mesh.coordinate(rank)
        part = terms[tuple(where[a] for a in owed)]
        held.append(part[_block(value.shape, spec, mesh, where)].contiguous())
    return held


def _block(shape: tuple[int, ...], spec: Spec, mesh: Mesh, where: dict[str, int]) -> tuple[slice, ...]:
    return slices_of(box_of(shape, spec.dims, mesh.sizes, where))


_REDUCE = {"sum": lambda a, b: a + b, "max": torch.maximum, "min": torch.minimum}


def join(held: list[Tensor], type_: TensorType, spec: Spec, mesh: Mesh, compare: bool) -> Tensor:
    """The whole value out of what ranks hold; ranks that should hold the same are compared."""
    whole = held[0].new_zeros(type_.shape)
    owed = [axis for axis, _ in spec.partial]
    assert len({op for _, op in spec.partial}) <= 1
    combine = _REDUCE[spec.partial[0][1]] if owed else None
    done: dict[tuple[int, ...], Tensor] = {}
    blocks: dict[tuple[int, ...], dict[tuple[int, ...], Tensor]] = {}
    for rank, part in enumerate(held):
        where = mesh.coordinate(rank)
        block = tuple(where[a] for axes in spec.dims for a in axes)
        term = tuple(where[a] for a in owed)
        known = blocks.setdefault(block, {}).setdefault(term, part)
        if compare:
            assert same(known, part), "ranks that should hold the same value do not"
        if combine is None or len(blocks[block]) == math.prod(mesh.sizes[a] for a in owed):
            total = None
            for value in blocks[block].values():
                total = value if total is None or combine is None else combine(total, value)
            assert total is not None
            done[block] = total
            whole[_block(type_.shape, spec, mesh, where)] = total
    return whole


def same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def run_line(line: Compute, held: list[dict[str, Tensor]], mesh: Mesh) -> list[list[Tensor | None]]:
    """Evaluate the emitted text of one line as every rank would, from what each holds by name."""

    def on_rank(comm: Comm) -> list[Tensor | None]:
        rt = SimpleNamespace(
            comm=comm,
            along=lambda *axes: Along(comm, *axes),
            key=lambda call, site: site,
            device=torch.device("cpu"),
            guards=Guards(),
        )
        scope = {"torch": torch, "aten": torch.ops.aten, **RUNTIME_MODULES, "rt": rt, "call": 0}
        out = eval(Printer().expression(line), scope | {n: t.clone() for n, t in held[comm.rank].items()})
        return [o if isinstance(o, Tensor) else None for o in (out if isinstance(out, (tuple, list)) else [out])]

    if line.carried:
        return run_threads(mesh.size, mesh.sizes, on_rank, timeout_s=60.0)
    return [on_rank(AloneComm(rank, mesh.sizes)) for rank in range(mesh.size)]


class AloneComm(Comm):
    """A rank that sends nothing."""

    def _start(self, call: Any) -> Any:
        raise AssertionError(f"{call.describe()} in an op without messages")

    def _post(self, messages: Any) -> Any:
        raise NotImplementedError

    def _part(self, mesh: Any, first_rank: int, inside: bool) -> Any:
        raise NotImplementedError

    def _tell(self, text: str) -> Any:
        raise NotImplementedError


def check_strategy(
    case: Case,
    whole: list[Tensor | None],
    mesh: Mesh,
    strategy: Strategy,
    generator: torch.Generator,
    rule: Rule | None = None,
) -> None:
    """Raises AssertionError when running on shards under `strategy` and joining does not give the whole."""
    node, tensors = as_node(case, whole)
    call = op_call(node)
    rule = rule or rule_of(call)
    shards = []
    for i, tensor in enumerate(tensors):
        spec = rule.operand_spec(i, strategy, mesh)
        assert spec is not None
        assert not spec.partial or tensor.dtype.is_floating_point or tensor.dtype.is_complex, "a sum owed on no number"
        shards.append(cut(tensor, spec, mesh, generator))
    definition = find(call.op)
    block = Block(call, rule, strategy, mesh)
    changes = definition.localize(block) if definition is not None and definition.localize else {}
    names = [f"x{i}" for i in range(len(tensors))]
    line = Compute(
        call.op,
        local_arguments(node, names, changes),
        node.name,
        outs=("y",),
        types=call.results,
        carried=carried_choices(strategy, mesh),
    )
    held = [{n: s[rank] for n, s in zip(names, shards, strict=True)} for rank in range(mesh.size)]
    per_rank = run_line(line, held, mesh)
    for i, expected in enumerate(whole):
        labels = rule.results[i]
        if expected is None or labels is None:
            continue
        spec = rule.result_spec(i, strategy, mesh)
        type_ = call.results[i]
        assert spec is not None
        assert type_ is not None
        held = []
        for outs in per_rank:
            part = outs[i]
            assert part is not None
            where = mesh.coordinate(len(held))
            local = tuple(one.stop - one.start for one in _block(type_.shape, spec, mesh, where))
            assert tuple(part.shape) == local, f"result {i} is {tuple(part.shape)} on a rank, its spec says {local}"
            assert part.dtype == expected.dtype, f"result {i} is {part.dtype} on a rank, {expected.dtype} as a whole"
            held.append(part)
        got = join(held, type_, spec, mesh, not case.shapes_only)
        if not case.shapes_only:
            assert same(got, expected), f"result {i} under {strategy} on {mesh}: {got} is not {expected}"


MESHES = (Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=4), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3), Mesh.of(a=3, b=2))


def check_case(case: Case, mesh: Mesh, seed: int, most: int = 8) -> int:
    """Try up to `most` strategies of the op's rule on `mesh`; returns how many of them share work or owe sums."""
    generator = torch.Generator().manual_seed(seed)
    whole = case.whole()
    node, _ = as_node(case, whole)
    rule = rule_of(op_call(node))
    strategies = rule.strategies(mesh)
    order = torch.randperm(len(strategies), generator=generator).tolist()
    chosen = [strategies[i] for i in order if any(strategies[i])]
    rare = [s for s in chosen if any(c in rule.carries or c in rule.inner for c in s)][: most // 2]
    chosen = [*rare, *(s for s in chosen if s not in rare)][:most]
    for strategy in chosen:
        check_strategy(case, whole, mesh, strategy, generator)
    return len(chosen)
