"""A fake mode that knows the shapes of frequent ops at once.

torch's own `FakeTensorMode` finds the shape of a result by Python decompositions, and remembers what it found by every size and
stride of the operands: where no two layers are of one size, both are most of a trace. Here

- views, plain products, look-ups and sums are run on the operands' meta tensors, by torch's kernels for these, and so are the
  shape functions of the dialect's ops, which torch does not remember;
- a pointwise op over one dense operand and others of its trailing sizes gives a tensor like it, and `addmm` of dense results one
  of two sizes.

Everything else, and every operand that is more than a plain CPU tensor of the mode, goes torch's way, and so does what fails:
its error is the one that users see. Tests hold both ways equal: shapes, strides, dtypes, shared memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
CPU = torch.device("cpu")

BY_META_KERNEL = frozenset(
    [
        *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
        *(aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.as_strided.default, aten.detach.default),
        *(aten.to.dtype, aten._to_copy.default, aten.new_empty.default, aten.embedding.default),
        *(aten.sum.dim_IntList, aten.mm.default, aten.bmm.default),
    ]
)
"""Ops that are run on meta tensors; the ops of the dialect are too."""

POINTWISE = frozenset(
    [
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default),
        *(aten.relu.default, aten.threshold_backward.default, aten.gelu.default, aten.gelu_backward.default),
        *(aten.silu.default, aten.silu_backward.default, aten.tanh.default, aten.tanh_backward.default),
        *(aten.sigmoid.default, aten.sigmoid_backward.default),
    ]
)
"""Ops whose result is of the dtype that all their operands are of, where this is a floating one."""

_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype])


class DirectShapes(FakeTensorMode):
    """torch's fake mode with the ways above."""

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The fake results of an op."""
        kwargs = kwargs or {}
        if func in POINTWISE:
            made = self._like_largest(args, kwargs)
        elif func is aten.addmm.default:
            made = self._addmm(*args) if len(args) == 3 and not kwargs else None
        elif func in BY_META_KERNEL or func.namespace == "autopar":
            made = self._by_meta_kernel(func, args, kwargs)
        else:
            made = None
        return super().dispatch(func, types, args, kwargs) if made is None else made

    def _is_plain(self, value: Any) -> bool:
        """Whether a value is a dense CPU tensor of this mode and nothing else, or no tensor at all."""
        kind = type(value)
        if kind is FakeTensor:
            own = value.fake_mode is self and value.constant is None and value.fake_device == CPU
            return own and value.layout is torch.strided and not value._has_symbolic_sizes_strides
        if kind in (list, tuple):
            return all(map(self._is_plain, value))
        return kind in _PLAIN

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """The tensor that `torch.empty` gives under the mode, without its way through the dispatcher."""
        with in_kernel_invocation_manager(self):
            meta = torch.empty(shape, dtype=dtype, device="meta")
        return FakeTensor(self, meta, CPU)

    def _by_meta_kernel(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the op's kernel for meta tensors; None where it has none for these operands."""
        if not (all(map(self._is_plain, args)) and all(map(self._is_plain, kwargs.values()))):
            return None
        try:
            with torch._C._DisablePythonDispatcher(), in_kernel_invocation_manager(self):
                made = op(*args, **kwargs)
        except Exception:
            return None
        results = made if type(made) in (list, tuple) else (made,)
        if not all(type(t) is torch.Tensor and t.is_meta for t in results):
            return None
        wrapped = [FakeTensor(self, t, CPU) for t in results]
        return wrapped[0] if results is not made else tuple(wrapped) if isinstance(made, tuple) else wrapped

    def _like_largest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FakeTensor | None:
        """The result of a pointwise op: like the operand of most dims, where those of the others are its last ones."""
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        rest = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
        if (
            not operands
            or not all(map(self._is_dense, operands))
            or any(type(a) not in (int, float, str) for a in rest)
        ):
            return None
        largest = max(operands, key=torch.Tensor.dim)
        shape, dtype = largest.shape, largest.dtype
        if any(t.dtype != dtype or t.shape != shape[len(shape) - t.ndim :] for t in operands):
            return None
        return self.empty(shape, dtype)

    def _addmm(self, bias: Any, x: Any, w: Any) -> FakeTensor | None:
        """bias: (n,), x: (m, k), w: (k, n)."""
        if not (
            self._is_dense(bias) and self._is_matrix(x) and self._is_matrix(w) and x.dtype == w.dtype == bias.dtype
        ):
            return None
        if x.shape[1] != w.shape[0] or bias.shape != w.shape[1:]:
            return None
        return self.empty((x.shape[0], w.shape[1]), x.dtype)

    def _is_matrix(self, value: Any) -> bool:
        return self._is_plain(value) and value.ndim == 2 and all(n > 1 for n in value.shape)

    def _is_dense(self, value: Any) -> bool:
        """Whether a value is a floating tensor of one dim or more, all of several elements, that lie one after another."""
        if not (self._is_plain(value) and value.dtype.is_floating_point and value.ndim):
            return False
        sizes, strides = value.shape, value.stride()
        if not all(n > 1 for n in sizes):
            return False
        return strides[-1] == 1 and all(
            outer == n * inner for (outer, inner), n in zip(itertools.pairwise(strides), sizes[1:], strict=True)
        )
