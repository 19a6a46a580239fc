"""An op gives the same whichever way its shape is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture.build import capture_program
from autopar.capture.direct_shapes import BY_META_KERNEL, POINTWISE, DirectShapes
from autopar.capture.export.fake import fake_mode
from tests.capture.same_programs import described
from tests.zoo.models import MODELS, ZooModel

Tensor = torch.Tensor
aten, dialect = torch.ops.aten, torch.ops.autopar


def operands() -> list[Tensor]:
    """Tensors: the first are dense and parts of such; then permuted, expanded, of one element or none, of several dtypes, sparse,
    with a known value."""
    dense, cube = torch.empty(4, 6), torch.empty(2, 4, 6)
    return [
        *(dense, torch.empty(6), torch.empty(6, 4), torch.empty(6, 4).t(), torch.empty(6, dtype=torch.bfloat16)),
        *(torch.zeros(4, 6, dtype=torch.long), torch.empty(4, 12)[:, 3:9], torch.empty(())),
        *(torch.empty(1, 6), torch.empty(4, 6, dtype=torch.bfloat16)),
        *(
            cube,
            cube.transpose(0, 2),
            torch.empty(1, 6).expand(4, 6),
            torch.empty(4, 1),
            torch.empty(4, 1, 6),
            torch.empty(0, 6),
        ),
        *(
            torch.empty(8, 6)[::2],
            torch.empty(7)[1:],
            torch.empty(4, 6, dtype=torch.complex64),
            torch.zeros(6, dtype=torch.bool),
        ),
        *(nn.Parameter(torch.empty(4, 6)), torch.tensor(2.0), torch.ones(4, 6).to_sparse(), torch.empty(3, 2, 4)),
    ]


def calls(of: list[Tensor]) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Ops with their arguments, of each operand and of each pair of them."""
    matrix, vector = of[:2]
    for x in of:
        yield aten.view.default, (x, [6, 4]), {}
        yield aten.view.default, (x, [-1]), {}
        yield aten.t.default, (x,), {}
        yield aten.transpose.int, (x, 0, -1), {}
        yield aten.permute.default, (x, [1, 0]), {}
        yield aten.select.int, (x, -1, 1), {}
        yield aten.slice.Tensor, (x, 0, 1, 3), {}
        yield aten.slice.Tensor, (x, 0, 0, 99, 2), {}
        yield aten.expand.default, (x, [4, 6]), {}
        yield aten.unsqueeze.default, (x, 1), {}
        yield aten.as_strided.default, (x, [2, 2], [2, 1], 1), {}
        yield aten.detach.default, (x,), {}
        yield aten.to.dtype, (x, torch.float32), {}
        yield aten.to.dtype, (x, torch.float64), {}
        yield aten._to_copy.default, (x,), {"dtype": torch.float64}
        yield aten._to_copy.default, (x,), {"device": torch.device("cpu")}
        yield aten.new_empty.default, (x, [3, 2]), {}
        yield aten.new_empty.default, (x, [3, 2]), {"dtype": torch.long}
        yield aten.embedding.default, (matrix, x), {}
        yield aten.sum.dim_IntList, (x, [0], False), {}
        yield aten.sum.dim_IntList, (x, None, True), {}
        yield aten.sum.dim_IntList, (x, [-1]), {"dtype": torch.float64}
        yield aten.threshold_backward.default, (x, x, 0), {}
        for one in (aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.neg):
            yield one.default, (x,), {}
        yield aten.gelu.default, (x,), {"approximate": "tanh"}
        for number in (2, True, 1j):
            yield aten.mul.Tensor, (x, number), {}
        yield aten.addmm.default, (vector, x, matrix.t()), {}
        yield aten.addmm.default, (x, matrix, matrix.t()), {}
        yield aten.addmm.default, (vector, of[2], x), {"beta": 2}
        for y in of:
            yield aten.add.Tensor, (x, y), {"alpha": 2}
            yield aten.div.Tensor, (x, y), {}
            yield aten.gelu_backward.default, (x, y), {}
            yield aten.mm.default, (x, y), {}
            yield aten.addmm.default, (vector, x, y), {}
            yield dialect.linear.default, (x, y), {}
    for op in (aten.sub.Tensor, aten.mul.Tensor, aten.silu_backward.default, aten.tanh_backward.default):
        yield op, (matrix, vector), {}
    yield aten.sigmoid_backward.default, (vector, matrix), {}
    yield aten.bmm.default, (torch.empty(2, 3, 4), torch.empty(2, 4, 5)), {}


def outcomes(mode: FakeTensorMode, first: int | None) -> list[Any]:
    """Per call what it gives, and whose memory that is; or the error that it raises. first: so many operands."""
    gives: list[Any] = []
    with mode, enable_python_dispatcher(), mock.patch.object(fake_tensor.log, "exception"):
        of = operands()[:first]
        for op, args, kwargs in calls(of):
            told = [next((i for i, x in enumerate(of) if x is a), a) if isinstance(a, Tensor) else a for a in args]
            what: tuple[Any, ...]
            try:
                made = op(*args, **kwargs)
            except Exception as error:
                what = type(error), "" if isinstance(error, RecursionError) else str(error)  # that says where it ended
            else:
                whose = [i for i, x in enumerate(of) if _memory(x) is not None and _memory(x) == _memory(made)]
                same = [i for i, x in enumerate(of) if x is made]
                layout = (made.stride(), made.storage_offset()) if made.layout is torch.strided else ()
                what = made.shape, made.dtype, made.device, layout, whose, same, made.requires_grad, type(made)
            gives.append((str(op), [t if isinstance(t, int) else str(t) for t in told], str(kwargs), what))
    return gives


def _memory(x: Tensor) -> int | None:
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def _assert_equal(first: int | None) -> None:
    ours, torchs = outcomes(fake_mode(), first), outcomes(FakeTensorMode(allow_non_fake_inputs=True), first)
    different = [(one, other) for one, other in zip(ours, torchs, strict=True) if one != other]
    assert not different, different[:5]


def test_both_ways_give_the_same() -> None:
    _assert_equal(6)


@pytest.mark.slow
def test_both_ways_give_the_same_of_all_operands() -> None:
    _assert_equal(None)


def test_every_op_of_the_tables_is_compared() -> None:
    with FakeTensorMode():
        compared = {op for op, _, _ in calls(operands()[:6])}
    assert compared >= BY_META_KERNEL | POINTWISE | {aten.addmm.default}


def test_a_layer_and_its_gradients_do_not_go_torchs_way() -> None:
    with fake_mode():
        x, w, bias = torch.empty(8, 4), torch.empty(6, 4), torch.empty(6)
        with mock.patch.object(FakeTensorMode, "_cached_dispatch_impl") as torchs:
            h = torch.relu(torch.addmm(bias, x, w.t()) * 2 + bias)
            y = dialect.linear.default(h, x.t().new_empty(3, 6)).sum(0)
            aten.threshold_backward(h, h, 0)
    assert y.shape == (3,)
    assert not torchs.called


def test_a_size_of_the_data_goes_torchs_way() -> None:
    mode = DirectShapes(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        rows = torch.zeros(4, 6).nonzero()
        assert isinstance(rows.t().shape[1], torch.SymInt)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_programs_are_the_same(model: ZooModel) -> None:
    def captured() -> list[Any]:
        targets = model.targets if isinstance(model.targets, int) and model.loss_fn is not None else 0
        return described(capture_program(model.make(), model.batch(), model.loss_fn, targets).program)

    ours = captured()
    with mock.patch.object(DirectShapes, "dispatch", FakeTensorMode.dispatch):
        assert ours == captured()
