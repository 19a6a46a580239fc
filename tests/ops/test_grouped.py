"""Grouped products, torch's own and ours, against one product a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.capture.export.fake import faked
from autopar.ir.program import op_name
from autopar.ops.grouped import grouped_by_loops, grouped_mm
from autopar.passes.rules.book import RuleBook
from autopar.runtime.kernels import grouped as local
from tests.ops.traced import MESHES, check_shards, run, traced

ENDS = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def row_by_row(x: Tensor, w: Tensor, group: Tensor) -> Tensor:
    """Rows of no group are 0."""
    with_none = torch.cat([w, torch.zeros_like(w[:1])])
    return (x.unsqueeze(-2) @ with_none[group.clamp(max=len(w))]).squeeze(-2)


@pytest.mark.parametrize("lead", [(10,), (5, 2), (0,)])
def test_every_row_is_multiplied_by_the_matrix_of_its_group(lead: tuple[int, ...]) -> None:
    x, w, group = f(*lead, 6), f(4, 6, 8), torch.randint(0, 5, lead, generator=GENERATOR)
    torch.testing.assert_close(grouped_mm(x, w, group), row_by_row(x, w, group))


def test_its_gradients_are_those_of_one_product_a_row() -> None:
    x, w, group = f(10, 6).requires_grad_(), f(4, 6, 8).requires_grad_(), torch.randint(0, 5, (10,))
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, group), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_mm(x, w, group), (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_rounds_once(dtype: torch.dtype) -> None:
    x, w, group = f(10, 6).to(dtype), f(4, 6, 8).to(dtype), torch.randint(0, 4, (10,))
    expected = row_by_row(x.double(), w.double(), group)
    torch.testing.assert_close(local.grouped_mm(x, w, group), expected.to(dtype))
    dw = local.grouped_mm_dw(x, x, group, 4)
    torch.testing.assert_close(dw, local.grouped_mm_dw(x.double(), x.double(), group, 4).to(dtype))


def _parts(index: Tensor | None, size: int) -> list[slice]:
    assert index is not None
    return [slice(a, b) for a, b in zip([0, *index.tolist()], [*index.tolist(), size], strict=False)][: len(index)]


FORMS: dict[str, tuple[tuple[Tensor, ...], Callable[..., Tensor]]] = {
    "ragged rows": (
        (f(12, 4), f(4, 4, 6)),
        lambda a, b: torch.cat([*(a[s] @ b[i] for i, s in enumerate(_parts(ENDS, 12))), a[11:] @ b[0] * 0]),
    ),
    "ragged columns": (
        (f(4, 6, 4), f(4, 12)),
        lambda a, b: torch.cat([*(a[i] @ b[:, s] for i, s in enumerate(_parts(ENDS, 12))), a[0] @ b[:, 11:] * 0], 1),
    ),
    "ragged contraction": ((f(6, 12), f(12, 4)), lambda a, b: torch.stack([a[:, s] @ b[s] for s in _parts(ENDS, 12)])),
}


@pytest.mark.parametrize("form", FORMS)
def test_torchs_own_grouped_product_is_captured_in_every_dtype(form: str) -> None:
    """`_parts` of the definition are fixed sizes, so that it can be differentiated by torch."""
    tensors, definition = FORMS[form]
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = definition(*leaves)
    torch.testing.assert_close(grouped_by_loops(*tensors, ENDS), expected.detach())
    with faked(nn.Module(), FakeTensorMode()):
        template = traced(lambda a, b, ends: F.grouped_mm(a, b, offs=ends), [*leaves, ENDS])
    tangent = f(*expected.shape)
    values = run(template, [*tensors, ENDS], [tangent])
    torch.testing.assert_close(values[template.outputs[0]], expected.detach())
    for name, gradient in zip(template.input_grads, torch.autograd.grad(expected, leaves, tangent), strict=False):
        assert name is not None
        torch.testing.assert_close(values[name], gradient)
    assert check_shards(template, values, RuleBook(), MESHES[:1])


def test_without_offsets_it_is_a_batched_product() -> None:
    with faked(nn.Module(), FakeTensorMode()):
        template = traced(F.grouped_mm, [f(4, 2, 6), f(4, 6, 3)])
    assert {op_name(node.target) for node in template.ops} == {"autopar.einsum"}


def test_meta_tensors_tell_the_memory_of_a_product() -> None:
    """No product is run where there are no values."""
    x, w, group = (t.to("meta") for t in (f(10, 6), f(4, 6, 8), torch.zeros(10, dtype=torch.long)))
    assert local.grouped_mm(x, w, group).shape == (10, 8)
    assert local.grouped_mm_dw(x, x, group, 4).shape == (4, 6, 6)


class Sorted(nn.Module):
    """A mixture of experts over rows that are sorted by expert, as torch's grouped product asks for."""

    def __init__(self, experts: int = 4, d: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.up, self.down = nn.Parameter(f(experts, d, hidden).float()), nn.Parameter(f(experts, hidden, d).float())

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, d)."""
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        chosen, order = chosen.sort(stable=True)
        ends = torch.bincount(chosen, minlength=len(self.up)).cumsum(0).int()
        h = F.grouped_mm(F.gelu(F.grouped_mm(rows[order], self.up, offs=ends)), self.down, offs=ends)
        return torch.zeros_like(rows).index_copy(0, order, h * weight[order].unsqueeze(-1)).view_as(x)


def compiled(model: nn.Module, batch: Sequence[Tensor], **options: object) -> autopar.ParallelProgram:
    return autopar.compile(
        model,
        autopar.ClusterSpec.local(4),
        tuple(batch),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        options=autopar.Options(**options),
    )


def test_a_model_that_sorts_rows_by_expert_is_compiled() -> None:
    torch.manual_seed(0)
    model, batch = Sorted(), (torch.randn(8, 4, 8), torch.randn(8, 4, 8))
    program = compiled(model, batch)
    assert autopar.verify(program, model, batch).max_error <= 1e-9
    assert not program.rules.unknown
    replayed = autopar.compile(
        model,
        autopar.ClusterSpec.local(4),
        batch,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=autopar.random_plan(program, 3),
    )
    assert autopar.verify(replayed, model, batch).max_error <= 1e-9


class Counted(nn.Module):
    """How often each of four classes occurs scales the output."""

    def __init__(self, least: int, weighted: bool = False) -> None:
        super().__init__()
        self.least, self.weighted = least, weighted
        self.layer = nn.Linear(4, 4)

    def forward(self, labels: Tensor, x: Tensor) -> Tensor:
        """labels: (batch,), x: (batch, 4)."""
        counts = torch.bincount(labels, x[:, 0].detach() if self.weighted else None, minlength=self.least)
        return self.layer(x) * counts.to(x.dtype)


def labelled(classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(8) % classes, torch.randn(8, 4), torch.randn(8, 4)


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_so_many_classes_are_captured(weighted: bool) -> None:
    model = Counted(4, weighted)
    assert autopar.verify(compiled(model, labelled()), model, labelled()).max_error <= 1e-9


def test_a_class_beyond_those_that_are_counted_stops_the_step() -> None:
    with pytest.raises(autopar.GuardError, match="labels"):
        compiled(Counted(4), labelled()).run([labelled(5)])


def test_counts_of_as_many_classes_as_the_data_have_are_refused_with_the_way_out() -> None:
    with pytest.raises(autopar.CaptureError, match=r"test_grouped\.py:\d+ in forward.*Pass minlength="):
        compiled(Counted(0), labelled())
