"""What passes ask the cost model, with the mesh filled in: seconds per op on a block, per collective along an axis.

One `Pricer` serves one mesh on one cluster; nothing is cached across meshes.
"""

from __future__ import annotations

import torch

from autopar.cluster import ClusterSpec
from autopar.costmodel import collective, compute
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType, dtype_name
from autopar.ops.registry import find
from autopar.passes.shard.reshard import Lattice

BUCKET_BYTES = 25 << 20  # of gradients that the runtime reduces in one message


class Pricer:
    """Prices for one mesh. `lattice(type)` and all times are cached for this mesh only."""

    def __init__(self, cluster: ClusterSpec, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        self.device = cluster.device(mesh.offset)
        self.copy_s = 1.0 / self.device.memory_bandwidth_Bps
        self._groups = {axis: mesh.group((axis,)) for axis in mesh.names}
        self._lattices: dict[tuple[TensorType, tuple[str, ...], bool], Lattice] = {}
        self._collectives: dict[tuple[str, float, str], float] = {}
        self._ops: dict[tuple[object, ...], float] = {}

    def collective_s(self, kind: str, nbytes: float, axis: str) -> float:
        """Seconds of one collective along `axis`; nbytes is the full array (see costmodel.collective)."""
        key = (kind, nbytes, axis)
        if key not in self._collectives:
            self._collectives[key] = collective.collective_time_s(self.cluster, kind, nbytes, self._groups[axis])
        return self._collectives[key]

    def bucketed_s(self, kind: str, nbytes: float, axis: str) -> float:
        """Seconds of nbytes inside a larger message: gradients, updated parameters and the loss travel together."""
        if nbytes >= BUCKET_BYTES:
            return self.collective_s(kind, nbytes, axis)
        return self.collective_s(kind, BUCKET_BYTES, axis) * nbytes / BUCKET_BYTES

    def lattice(self, type_: TensorType, ops: tuple[str, ...] = ("sum",), bucketed: bool = False) -> Lattice:
        """Conversions of one tensor type; `ops`: reductions that may be owed. bucketed: beside others in one message."""
        key = (type_, ops, bucketed)
        if key not in self._lattices:
            price = self.bucketed_s if bucketed else self.collective_s
            self._lattices[key] = Lattice(type_, self.mesh, price, self.copy_s, ops)
        return self._lattices[key]

    def convert_s(self, type_: TensorType, before: Spec, after: Spec) -> float:
        """Seconds to bring a value from one spec to another."""
        if before == after:
            return 0.0
        ops = tuple(sorted({"sum", *(op for _, op in before.partial), *(op for _, op in after.partial)}))
        return self.lattice(type_, ops).cost(before, after)

    def op_s(self, call: OpCall, rule: Rule, strategy: Strategy) -> float:
        """Seconds of one op on its block under `strategy`."""
        definition = find(call.op)
        if definition is not None and definition.free:
            return 0.0
        parts = dict.fromkeys(rule.factors, 1)
        for (_, size), choice in zip(self.mesh.axes, strategy, strict=True):
            if choice in parts:
                parts[choice] *= size
        nbytes = 0.0
        for type_, labels in zip((*call.operands, *call.results), (*rule.operands, *rule.results), strict=True):
            if type_ is not None and labels is not None:
                split = 1
                for dim in labels:
                    for f in dim:
                        split *= parts[f]
                nbytes += type_.nbytes / split
        dtype = dtype_name(next((t.dtype for t in (*call.operands, *call.results) if t is not None), torch.float32))
        flops, kind, shape = 0.0, "pointwise", None
        if definition is not None and definition.work is not None:
            flops, kind, groups = definition.work(call, rule)
            whole = 1
            for n in parts.values():
                whole *= n
            flops /= whole
            shape = _shape(kind, groups, rule, parts)
        key = (flops, nbytes, dtype, kind, shape)
        if key not in self._ops:
            self._ops[key] = compute.op_time_s(
                self.device, flops=flops, nbytes=nbytes, dtype=_computable(dtype), kind=kind, shape=shape
            )
        return self._ops[key]


def _shape(kind: str, groups: tuple[tuple[str, ...], ...], rule: Rule, parts: dict[str, int]) -> tuple[int, ...] | None:
    if not groups:
        return None
    sizes = []
    for factors in groups:
        n = 1
        for f in factors:
            n *= rule.factors[f].size // parts[f] if f in rule.factors else 1
        sizes.append(max(n, 1))
    return tuple(sizes)


def _computable(dtype: str) -> str:
    return dtype if dtype in ("float64", "float32", "bfloat16", "float16") else "float32"
