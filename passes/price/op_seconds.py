"""Seconds of an op on a block of it: what its family says of it (`autopar.ops.registry.OpDef`), on a device under a software."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import torch

from autopar.cluster.device import DeviceSpec
from autopar.costmodel import compute
from autopar.costmodel.flash import causal_tile
from autopar.costmodel.software import LOGIT_BYTES, Software
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Parts, Rule, Strategy, carried_choices
from autopar.ir.types import dtype_name
from autopar.ops.registry import Grouped, OpDef, find
from autopar.passes.price.mixtures import moved_bytes, work_share
from autopar.passes.rules.strategy_table import BlockOfWork

Price = TypeVar("Price")
_PLAIN = OpDef()
_COMPUTABLE = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Roofline:
    """Seconds by what bounds them: arithmetic, the memory's bandwidth, or the launch of kernels."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0

    def __add__(self, other: Roofline) -> Roofline:
        return Roofline(
            self.compute_s + other.compute_s, self.memory_s + other.memory_s, self.launch_s + other.launch_s
        )

    def __mul__(self, times: float) -> Roofline:
        return Roofline(self.compute_s * times, self.memory_s * times, self.launch_s * times)

    @property
    def seconds(self) -> float:
        """Seconds of all."""
        return self.compute_s + self.memory_s + self.launch_s


NOTHING_BOUND = Roofline()


@dataclass(frozen=True, eq=False)
class OpSeconds:
    """An op to be priced on a device, on blocks of any mesh."""

    call: OpCall
    rule: Rule
    device: DeviceSpec
    software: Software
    _on_blocks: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @property
    def at_peak(self) -> float:
        """A lower bound on device-seconds however the op is sharded: its products at peak, launches left out."""
        return (
            0.0 if self._facts.free or self._facts.work is None else self._work[0] / self.device.peak(self._computed_in)
        )

    @property
    def follows_blocks(self) -> bool:
        """Whether equal blocks take as long whichever axes cut them: no rows of it travel."""
        return self._facts.grouped is None

    def grouped(self, parts: Parts, strategy: Strategy, mesh: Mesh) -> Grouped | None:
        """The rows that it computes in groups on a rank, where it does."""
        grouped = self._facts.grouped
        return None if grouped is None else grouped(self.call, parts, self.rule.work_parts(strategy, mesh))

    def on_block(self, parts: Parts, strategy: Strategy, mesh: Mesh) -> float:
        """Seconds on one rank. parts: into how many every factor is cut (`Rule.parts`)."""
        return self.on_blocks([BlockOfWork(parts, self.rule.work_parts(strategy, mesh), strategy)], mesh)[0]

    def on_blocks(self, blocks: Sequence[BlockOfWork], mesh: Mesh) -> list[float]:
        """The same of several blocks. Equal ones take as long on any mesh that cuts as many, unless their rows travel along its
        axes."""
        if self._facts.free:
            return [0.0] * len(blocks)
        if mesh.uneven or not self.follows_blocks:
            return [self._block_s(block, mesh) for block in blocks]
        known, factors, seconds = self._on_blocks, self.rule.factors, []
        for block in blocks:
            key = (*map(block.parts.__getitem__, factors), block.work)
            block_s = known.get(key)
            if block_s is None:
                block_s = known[key] = self._block_s(block, mesh)
            seconds.append(block_s)
        return seconds

    def _block_s(self, block: BlockOfWork, mesh: Mesh) -> float:
        work_s, merging_s, filled_s, drawn_s = self._read(block, mesh, compute.op_time_s)
        return merging_s + filled_s + drawn_s + work_s

    def limits_on_block(self, parts: Parts, strategy: Strategy, mesh: Mesh) -> Roofline:
        """The same seconds by what bounds them."""
        if self._facts.free:
            return NOTHING_BOUND
        kernel, merging_s, filled_s, drawn_s = self._read(
            BlockOfWork(parts, self.rule.work_parts(strategy, mesh), strategy), mesh, compute.kernel_seconds
        )
        own_s = kernel.seconds - kernel.launch_s - kernel.moved_s
        memory_s = merging_s + filled_s + kernel.moved_s + (own_s if kernel.memory_bound else 0.0)
        return Roofline(drawn_s + (0.0 if kernel.memory_bound else own_s), memory_s, kernel.launch_s)

    def _read(self, block: BlockOfWork, mesh: Mesh, price: Callable[..., Price]) -> tuple[Price, float, float, float]:
        """The price of the kernel that the op is on a block, and the seconds that merging, filling and drawing add to it.
        price: `compute.op_time_s` or `compute.kernel_seconds`, which take the same."""
        facts, call, device, software = self._facts, self.call, self.device, self.software
        flops, kind, groups = self._work
        parts, share, strategy = block
        moved = [float(whole_bytes / math.prod(parts[f] for f in factors)) for whole_bytes, factors in self._tensors]
        if facts.picks is not None:
            moved[0] = min(moved[0], facts.picks(call) * self._touched(len(call.operands), 0, parts))
        filled_s = 0.0
        if facts.fills is not None:
            moved[0] = facts.fills(call) * self._touched(0, len(call.operands), parts)
            filled_s, moved[-1] = compute.filling_time_s(device, moved[-1], moved[0])
        grouped = self.grouped(parts, strategy, mesh)
        along = [mesh.sizes[axis] for axis, _ in carried_choices(strategy, mesh)] if grouped else []
        balances = kind in compute.ATTENTION and not software.is_emitted  # zigzag order, merged inside the kernel
        cut = dict.fromkeys(parts, 1) if balances else parts
        shape = facts.dims(call, parts, share) if facts.dims else _product(groups, self.rule, cut)
        tile = 0.0
        if kind in compute.ATTENTION and shape:
            tile = causal_tile(device, shape[0], eager=software.eager_attention, backward=kind != "attention")
        imbalance, drawing = (facts.imbalance(call, cut, t) if facts.imbalance else 1.0 for t in (tile, 0.0))
        merged = facts.merged(call, cut, device.runs_as) if facts.merged else None
        merging_s = compute.merging_time_s(device, call.op, **vars(merged)) if merged is not None else 0.0
        if facts.inside and shape and not software.is_emitted:  # logits that a framework has, and makes a loss of
            merging_s = 2 * LOGIT_BYTES * math.prod(shape[-3:-1]) / (device.memory_bandwidth_Bps * device.curve.memory)
        drawn = facts.drawn(call, device.runs_as) if facts.drawn else None
        drawn_s = 0.0 if drawn is None else compute.drawing_time_s(device, drawn.instructions * drawing / share)
        kernel = price(
            device,
            flops=work_share(grouped, software) * flops * (drawn.products if drawn else 1.0) * imbalance / share,
            nbytes=sum(moved),
            dtype=self._computed_in,
            kind=kind,
            shape=shape,
            eager=software.eager_attention,
            op=call.op,
            grouped=grouped is not None,
            reached=self._reached(kind, strategy, mesh) * self._kept(kind, grouped),
            moved_bytes=moved_bytes(grouped, software, along, device.runs_as),
        )
        return kernel, merging_s, filled_s, drawn_s

    def _touched(self, of: int, other: int, parts: Parts) -> float:
        """Bytes of one of `_tensors` on a block as often as an op that picks, or fills, goes over it. Factors that only the other
        tensor has leave as much to do: every block of a table is asked for all indices."""
        factors = {f for i, (_, own) in enumerate(self._tensors) if i != other for f in own}
        return float(self._tensors[of][0] / math.prod(parts[f] for f in factors))

    @cached_property
    def _computed_in(self) -> str:
        """The dtype of its products under the software: what is in 16 bits may be in fewer there."""
        low = self.software.attention_dtype if self._work[1] in compute.ATTENTION else ""
        if self._facts.of_weights:
            low = self.software.low_dtype
        return low if low and self._dtype in ("bfloat16", "float16") else self._dtype

    def _kept(self, kind: str, grouped: Grouped | None) -> float:
        """The share of a plain kernel's rate that the software's reaches."""
        if kind in compute.ATTENTION:
            return self.software.attention_share
        return 1.0 if grouped is None else self.software.constants.grouped_share

    def _reached(self, kind: str, strategy: Strategy, mesh: Mesh) -> float:
        """The share of a product's rate that is left by how its tensors' rows lie, on the rank with the slowest kernel."""
        if kind != "matmul" or self.device.curve.odd == 1.0:
            return 1.0
        taken = self.rule.taken(strategy, mesh)
        lengths = {f: self._lengths(f, taken.get(f, ()), mesh) for last in self._rows for f in last}
        rows = (math.prod(one) for last in self._rows for one in product(*(lengths[f] for f in last)))
        return compute.aligned_share(self.device, self._computed_in, rows)

    def _lengths(self, factor: str, axes: tuple[str, ...], mesh: Mesh) -> tuple[int, ...]:
        """The lengths of a factor's blocks, on some rank each."""
        size = self.rule.factors[factor].size
        if not mesh.uneven:
            return (size // mesh.product(axes),)
        blocks = mesh.blocks(size, axes)
        return tuple(set(blocks)) if isinstance(blocks, tuple) else (blocks or size,)

    @cached_property
    def _rows(self) -> list[tuple[str, ...]]:
        """The factors of the last dim of the product's matrices, those that it does not give among them."""
        sizes = {f for factors in self._work[2] for f in factors}
        sides = zip((*self.call.operands, *self.call.results), (*self.rule.operands, *self.rule.results), strict=True)
        matrices = (labels for t, labels in sides if t is not None and labels and len(labels) > 1)
        given = [labels[-1] for labels in matrices if labels[-1] and sizes.issuperset(labels[-1])]
        return [*given, *([self._facts.inside] if self._facts.inside else [])]

    @cached_property
    def _facts(self) -> OpDef:
        return find(self.call.op) or _PLAIN

    @cached_property
    def _work(self) -> tuple[float, str, tuple[tuple[str, ...], ...]]:
        """Its arithmetic on the whole: FLOPs, kind, and the factors of a product's three sizes."""
        return self._facts.work(self.call, self.rule) if self._facts.work is not None else (0.0, "pointwise", ())

    @cached_property
    def _dtype(self) -> str:
        """The dtype that the op computes in, by its name."""
        tensors = (t for t in (*self.call.operands, *self.call.results) if t is not None)
        name = dtype_name(next((t.dtype for t in tensors), torch.float32))
        return name if name in _COMPUTABLE else "float32"

    @cached_property
    def _tensors(self) -> list[tuple[int, list[str]]]:
        """Bytes and factors of every operand and result."""
        types = (*self.call.operands, *self.call.results)
        sides = zip(types, (*self.rule.operands, *self.rule.results), strict=True)
        return [
            (t.nbytes, [f for dim in labels for f in dim])
            for t, labels in sides
            if t is not None and labels is not None
        ]


def _product(groups: tuple[tuple[str, ...], ...], rule: Rule, parts: Parts) -> tuple[int, ...] | None:
    """Sizes of a product on a block, each of all of its factors."""
    known = ([f for f in factors if f in rule.factors] for factors in groups)
    return tuple(max(math.prod(rule.factors[f].size // parts[f] for f in own), 1) for own in known) or None
