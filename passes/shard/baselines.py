"""The strategies that people know by name, as the choices that they leave.

Baselines are the sharding problem with fewer choices, so the unrestricted optimum on the same mesh is never predicted worse.
Each is two answers: how ops are split along a mesh axis, and how parameters rest.

    dp, zero1, zero2, zero3                      every axis takes the batch
    megatron, megatron-zero1, -zero2, -zero3     the last axis is tensor-parallel (`megatron`), the others take the batch

An axis that is named `cp` takes neither the batch nor weights: what is left of most ops is the sequence (context parallelism). As
in Megatron-LM parameters rest over it as over the axes of the batch. One that is named `ep` takes the batch, and in mixtures
tokens and experts together (expert parallelism): rows travel along it, and experts rest in shards over it, with or without ZeRO.

Without ZeRO a parameter and its optimizer state are whole over the axes that take the batch; ZeRO-1 shards the optimizer
state over them, ZeRO-2 what rests of gradients between microbatches, ZeRO-3 the parameters as well, in runs of elements where
no dim divides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from autopar.errors import CoupledError, InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.rule import Rule, factors_of
from autopar.ir.spec import Spec
from autopar.options import MEGATRON
from autopar.passes.batch.dims import batch_dims, batch_factors
from autopar.passes.rules.book import RuleBook
from autopar.passes.shard.factors.graph import Key
from autopar.passes.shard.megatron import (
    AxisChoices,
    BatchedProgram,
    OpKey,
    context_parallel,
    expert_parallel,
    of_one_row,
    tensor_parallel,
)
from autopar.passes.shard.meshes import CONTEXT
from autopar.passes.shard.uneven import EXPERTS, numbers_of_experts, rows_of


class Baseline:
    """The states that a baseline allows a program on a mesh. Raises InfeasibleError for a program that cannot have it."""

    def __init__(self, strategy: str, program: Program, mesh: Mesh, rules: RuleBook) -> None:
        self.program, self.mesh, self.strategy = program, mesh, strategy
        self.zero = int(strategy[-1]) if strategy[-1].isdigit() else 0
        self.trained = frozenset(program.trained)
        try:
            dims, batch = batch_dims(program, rules), batch_factors(program, rules)
        except CoupledError as error:
            raise InfeasibleError(f"strategy {strategy!r} follows the batch through the program: {error}") from error
        if rows_of(program) == 1:
            dims = of_one_row(program, rules)
        self.tensor: AxisChoices | None = None
        self.context: Mapping[OpKey, frozenset[str]] = {}
        self.experts = AxisChoices({}, frozenset())
        batched = BatchedProgram(program, rules, dims, batch, mesh)
        if mesh.sizes.get(CONTEXT, 1) > 1:
            self.context = context_parallel(batched, CONTEXT)
        if mesh.sizes.get(EXPERTS, 1) > 1:
            self.experts = expert_parallel(batched, EXPERTS)
            if not self.experts.choices:
                why = f"no mixture of experts can be shared along {EXPERTS}={mesh.sizes[EXPERTS]:d}"
                change = "take no more ranks than experts, rows that divide by the axes before it"
                if not numbers_of_experts(program, rules):
                    why, change = (
                        f"this model has no experts to shard along {EXPERTS}={mesh.sizes[EXPERTS]:d}",
                        "leave it out",
                    )
                raise InfeasibleError(f"strategy {strategy!r} on mesh {mesh}: {why}; {change}, or name the axis dp")
        if strategy in MEGATRON and mesh.axes[-1][1] > 1:
            self.tensor = tensor_parallel(batched, mesh.names[-1])
        self.data_axes = mesh.names if self.tensor is None else mesh.names[:-1]
        rows = tuple(axis for axis in self.data_axes if axis != CONTEXT)
        calls = {(t.name, op): call for t in program.templates.values() for op, call in t.op_calls.items()}
        self.data_choices = {op: _data_choices(rules.rule(calls[op]), held, mesh, rows) for op, held in batch.items()}
        self.by_axis = dict.fromkeys(self.data_axes, self.data_choices) | {
            CONTEXT: self.context,
            EXPERTS: {**self.data_choices, **self.experts.choices},
        }

    def allows(self, key: Key, state: Any) -> bool:
        """Whether a variable of the sharding problem may take a state."""
        if key[0] == "param":
            return self._allows_stored(key[1], *state)
        return key[0] != "op" or self._allows_split((key[1], key[2]), state)

    def _allows_split(self, op: OpKey, strategy: tuple[str, ...]) -> bool:
        if self.tensor is not None and strategy[-1] not in self.tensor.choices[op]:
            return False
        chosen = [(axis, c) for axis, c in zip(self.data_axes, strategy, strict=False) if self.mesh.sizes[axis] > 1]
        return all(c in self.by_axis[axis][op] for axis, c in chosen)

    def _allows_stored(self, name: str, storage: Spec, optimizer: Spec) -> bool:
        if self.tensor is not None and not self._allows_tensor_shards(name, storage, optimizer):
            return False
        if not self._allows_expert_shards(name, storage, optimizer):
            return False
        if self.zero < 3 and not storage.axes.isdisjoint(self._data_axes_of(name)):
            return False
        updated_in_shards = self.zero in (1, 2) and name in self.trained
        if optimizer != storage and not updated_in_shards:
            return False
        return not (updated_in_shards or self.zero == 3) or self._is_spread(name, optimizer)

    def _allows_tensor_shards(self, name: str, storage: Spec, optimizer: Spec) -> bool:
        """Weights of products and look-ups rest in shards, what else has two dims whole; vectors (biases) follow their use."""
        assert self.tensor is not None
        axis = self.mesh.names[-1]
        held, shape = any(axis in dim for dim in storage.dims), self.program.parameters[name].type.shape
        if name in self.tensor.sharded and any(self.mesh.blocks(n, (axis,)) is not None for n in shape):
            return held and _alike_along(axis, storage, optimizer)
        return _alike_along(axis, storage, optimizer) and (len(shape) == 1 or not held)

    def _allows_expert_shards(self, name: str, storage: Spec, optimizer: Spec) -> bool:
        """Experts rest in shards over their axis, which for everything else is one of the batch."""
        if name not in self.experts.sharded:
            return True
        return any(EXPERTS in dim for dim in storage.dims) and _alike_along(EXPERTS, storage, optimizer)

    def _data_axes_of(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is whole, or sharded by ZeRO."""
        return tuple(a for a in self.data_axes if a != EXPERTS or name not in self.experts.sharded)

    def _is_spread(self, name: str, spec: Spec) -> bool:
        """Whether every rank of the data axes has a shard of its own: along a dim of its own, where one divides by so many, else
        a run of the elements, if there are several; or one of them has the whole tensor."""
        axes, shape = self._data_axes_of(name), self.program.parameters[name].type.shape
        if spec.owner is not None:
            return set(spec.run) == {a for a in axes if self.mesh.sizes[a] > 1}
        ranks = self.mesh.product(axes)
        shards = [self.mesh.product(a for a in dim if a in axes) for dim in spec.dims]
        free = [n for n, dim in zip(shape, spec.dims, strict=True) if set(dim) <= set(axes)]
        if any(isinstance(self.mesh.blocks(n, axes), int) and n >= ranks for n in free):
            return max(shards) == ranks
        if any(
            not set(dim).isdisjoint(axes) and self.mesh.is_uneven(n, dim)
            for n, dim in zip(shape, spec.dims, strict=True)
        ):
            return False
        own = self.mesh.product(axis for dim in spec.dims for axis in dim if axis not in axes)
        return spec.axes.issuperset(a for a in axes if self.mesh.sizes[a] > 1) or prod(shape) // own < 2


def _alike_along(axis: str, storage: Spec, optimizer: Spec) -> bool:
    """Whether dims of a parameter and its optimizer state are cut alike by an axis, and no runs."""
    held, updated = ([axis in dim for dim in spec.dims] for spec in (storage, optimizer))
    return held == updated and axis not in optimizer.run


def _data_choices(rule: Rule, batch: Collection[str], mesh: Mesh, axes: tuple[str, ...]) -> frozenset[str]:
    """The choices that axes have which take the batch: its factors, also with messages, where they divide; else
    what splits no operand (factors that only results have, as constants do, partial sums that pass), or nothing."""
    taking = (c for c in (*rule.shardable, *rule.carries) if set(factors_of(c)) <= set(batch))
    dividing = frozenset(
        c for c in taking if all(mesh.blocks(rule.factors[f].size, axes) is not None for f in factors_of(c))
    )
    free = (c for c in rule.choices() if c not in rule.carries)
    return dividing or frozenset(c for c in free if c not in rule.contracted or c in batch)
