"""How DTensor lets an op be sharded along one mesh axis: the rows of its own tables, read from torch.

torch keeps two tables by op, both private: of rows for one axis, with a placeholder for every dim that may be sharded, and of
functions from a mesh and the strategies of the operands. The second is asked here with a mesh of one axis and every placement of
every operand, so that both answer alike. This module is the only one that knows these tables.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._ops._einsum_strategy import gen_einsum_strategies
from torch.distributed.tensor._ops._view_ops import dim_maps, propagate_shape_and_sharding
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

REPLICATED, OWED = -1, -2
"""Placements by number: whole, and a sum that is owed; a dim that is sharded has its own."""

_PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
_RANKS = 2
_SEQUENCE = 2
"""The dim of queries along which torch lists attention as sharded, which would be wrong without messages; AutoParallel leaves it
out too."""


def axis_rows(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: int) -> list[tuple[int, ...]]:
    """Strategies of an op along one axis: the placements of its results, then those of its tensor operands in order, as numbers.

    args, kwargs: as of a call, with meta tensors. Each row stands once; rows that owe other reductions than a sum are left out.
    Raises NotImplementedError for an op that torch's tables do not have.
    """
    mesh = DeviceMesh("cpu", list(range(_RANKS)), _init_backend=False, _rank=0)
    placed = [_strategies(mesh, arg) for arg in args]
    with mock.patch.object(utils, "redistribute_cost", return_value=0.0):  # what it would cost is not asked
        rows = _rows(op, mesh, placed, dict(kwargs), results)
    numbered = (tuple(_number(p) for p in row) for row in rows)
    return [*dict.fromkeys(tuple(n for n in row if n is not None) for row in numbered if None not in row)]


def _rows(
    op: Any, mesh: DeviceMesh, args: list[Any], kwargs: dict[str, Any], results: int
) -> list[list[Placement | None]]:
    tensors = [a for arg in args for a in (arg.children if isinstance(arg, TupleStrategy) else [arg])]
    operands = [a for a in tensors if isinstance(a, OpStrategy)]
    if op is torch.ops.aten.view.default:
        return _view_rows(mesh, *args)
    if op is torch.ops.aten.expand.default:
        grown = [Shard(d) for d, (a, b) in enumerate(zip(operands[0].shape, args[1], strict=True)) if a != b]
        args[0] = OpStrategy([s for s in operands[0].strategies if s.output_spec.placements[0] not in grown])
    if isinstance(args[0], str):
        specs = gen_einsum_strategies(args[0], mesh).strategies
        return [_row(spec, results) for spec in specs]
    info = RuntimeSchemaInfo(needs_pytree=any(isinstance(a, TupleStrategy) for a in args))
    schema = OpSchema(op, tuple(args), kwargs, info)
    one_axis = _PROPAGATOR.op_single_dim_strategy_funcs.get(op)
    if one_axis is not None:
        rows = one_axis.func(op, schema.args_meta, schema.kwargs_meta)
        whole: list[Placement | None] = [Replicate()] * (results + len(operands))
        return [whole, *([Shard(p.dim) if isinstance(p, _ShardingPlaceholder) else p for p in row] for row in rows)]
    if op not in _PROPAGATOR.op_strategy_funcs:
        raise NotImplementedError(f"DTensor has no strategy for {op}")
    strategy: Any = _PROPAGATOR.op_strategy_funcs[op](schema)
    found = [_row(spec, results) for spec in strategy.strategies]
    if "scaled_dot_product" in op.name():
        found = [row for row in found if Shard(_SEQUENCE) not in row]
    return found


def _row(spec: OpSpec, results: int) -> list[Placement | None]:
    """The placements of a strategy on one axis: results, then operands."""
    given: Any = spec.output_specs
    made = [given] * results if isinstance(given, DTensorSpec) else list(given)
    read = spec.input_specs if spec.input_specs is not None else made[:1]
    return [None if one is None else one.placements[0] for one in (*made, *read)]


def _view_rows(mesh: DeviceMesh, operand: OpStrategy, shape: Sequence[int]) -> list[list[Placement | None]]:
    """The rows of a view, which demotes what it cannot keep instead of refusing it, as AutoParallel's rule does."""
    rule = dim_maps[torch.Tensor.view](operand, shape)
    rows: list[list[Placement | None]] = []
    for strategy in operand.strategies:
        before, after = propagate_shape_and_sharding(
            strategy.output_spec.placements, operand.shape, rule, mesh.shape, strict_view=False
        )
        rows.append([after[0], before[0]])
    return rows


def _strategies(mesh: DeviceMesh, arg: Any) -> Any:
    """An argument as torch's functions take it: a tensor by every placement that it may have, a list of tensors by each
    of them."""
    if isinstance(arg, list) and any(isinstance(a, torch.Tensor) for a in arg):
        return TupleStrategy([_strategies(mesh, a) for a in arg])
    if not isinstance(arg, torch.Tensor):
        return arg
    meta = TensorMeta(arg.shape, arg.stride(), arg.dtype)
    placements: list[Placement] = [Replicate(), *map(Shard, range(arg.ndim)), Partial()]
    specs = [DTensorSpec(mesh, (placement,), tensor_meta=meta) for placement in placements]
    return OpStrategy([OpSpec(spec, input_specs=(spec,), redistribute_cost=[[0.0]]) for spec in specs])


def _number(placement: Placement | None) -> int | None:
    """The number of a placement; None for one that no other op takes (strided shards, other reductions than sums). What is no
    tensor counts as whole."""
    if placement is None or isinstance(placement, Replicate):
        return REPLICATED
    if isinstance(placement, Partial):
        return OWED if placement.reduce_op == "sum" else None
    return operator.index(placement.dim) if type(placement) is Shard else None
