"""A mesh, a parameter and stages of it, made by hand, and the formulas of rings and trees that their messages follow.

The mesh is dp=2 × tp=4 on one level of links that carry 1 GB/s with 10 µs a hop. A parameter w is f32[16, 32], 2048 bytes.
"""

from __future__ import annotations

import torch

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve
from autopar.cluster.link import LinkLevel
from autopar.costmodel.software import NEUTRAL, Software
from autopar.ir.lines import Function, Line
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.price.lines import line_costs
from autopar.passes.price.pricer import Pricer

F32, BF16 = torch.float32, torch.bfloat16
MESH = Mesh.of(dp=2, tp=4)
BANDWIDTH, HOP, MEMORY, LAUNCH = 1e9, 1e-5, 5e10, 3e-6
DEVICE = DeviceSpec("test", {"float32": 1e12}, 1e12, 2 * MEMORY, LAUNCH, curve=EfficiencyCurve(memory=0.5))
CLUSTER = ClusterSpec("test", ((8, DEVICE),), (LinkLevel("node", 8, BANDWIDTH, HOP),))
BUCKET_BYTES = NEUTRAL.bucket_bytes
WEIGHT, ROWS, SCALAR = TensorType((16, 32), F32), TensorType((64, 32), F32), TensorType((), F32)
WHOLE, BOTH, ON_DP, ON_TP = (Spec.replicated(2), Spec((("dp",), ("tp",))), Spec((("dp",), ())), Spec(((), ("tp",))))
GATHER_TP, GATHER_DP = RuntimeStep("all_gather", ("tp",), (1,)), RuntimeStep("all_gather", ("dp",), (0,))


def parameter(
    storage: Spec = WHOLE,
    optimizer: Spec = WHOLE,
    reduce: tuple[RuntimeStep, ...] = (),
    regather: tuple[RuntimeStep, ...] = (),
) -> StoredParameter:
    return StoredParameter("w", WEIGHT, storage, optimizer, True, regather, 1, reduce)


def stage(mesh: Mesh = MESH, **parameters: StoredParameter) -> LoweredStage:
    nothing = Function("forward", (), (), ())
    return LoweredStage(
        0, mesh, {}, nothing, None, None, (), parameters, {}, (), (), (), (), (), (), training=True, microbatches=1
    )


def non_overlapped_s(line: Line, prices: Pricer, *parameters: StoredParameter, x: Spec = WHOLE) -> float:
    """Seconds of a line of a stage that is not hidden. x: the spec of that value, which is of type ROWS."""
    one = stage(**{p.name: p for p in parameters})
    (cost,) = line_costs(Function("forward", ("x",), (line,), (), {"x": (ROWS, x)}), one, prices)
    return cost.non_overlapped_s


def pricer(software: Software = NEUTRAL) -> Pricer:
    """A new one: prices are cached in it."""
    return Pricer(CLUSTER, MESH, software)


def gathered(nbytes: float, size: int) -> float:
    """Seconds of an all_gather, reduce_scatter or all_to_all around a ring: size - 1 hops of 1/size of the bytes each."""
    return (size - 1) * (nbytes / size / BANDWIDTH + HOP)


def reduced(nbytes: float, size: int) -> float:
    """Seconds of an all_reduce: twice around the ring, or up a tree of 1 or 2 levels and down."""
    depth = {2: 1, 4: 2}[size]
    return min(2 * gathered(nbytes, size), 2 * depth * HOP + 2 * nbytes / BANDWIDTH)


def in_bucket(kind: str, nbytes: float, size: int) -> float:
    """The share of a message of 25 MiB."""
    whole = reduced(BUCKET_BYTES, size) if kind == "all_reduce" else gathered(BUCKET_BYTES, size)
    return whole * nbytes / BUCKET_BYTES
