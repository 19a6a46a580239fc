"""Losses in microbatches are those of the whole batch, whatever they divide by; or microbatches are refused.

Batches count very unequally: the first samples count almost nothing, the last ones everything. `verify` compares with
the eager model on the whole batch, or with the mean over microbatches where the user asked for these; that this is what
verify does is checked with an eager loop written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

SGD = functools.partial(torch.optim.SGD, lr=0.1)
BATCH, SEQ, VOCAB = 8, 6, 12
WEIGHTS = torch.linspace(0.1, 3.0, VOCAB)
Loss = Callable[..., Tensor]


class Tagger(nn.Module):
    """ids: (batch, seq) -> logits (batch, seq, vocab), over a few blocks so that there is something to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def ids_and_labels() -> tuple[Tensor, Tensor]:
    """Sample k counts 0, 1, 1, 2, 3, 4, 5, 6 of its tokens."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=draw)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=draw)
    for row, count in enumerate((0, 1, 1, 2, 3, 4, 5, 6)):
        labels[row, count:] = -100
    return ids, labels


def ignoring(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """Class weights: the mean divides by the sum of the weights of what counts."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=WEIGHTS.to(logits.dtype))


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def clamped_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Safe division, as many training scripts write it."""
    mask = (labels >= 0).to(logits.dtype)
    each = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


def two_denominators(logits: Tensor, labels: Tensor) -> Tensor:
    """Tokens that count, and tokens of even labels, each with its own number."""
    even = ((labels >= 0) & (labels % 2 == 0)).to(logits.dtype)
    size = (logits**2).mean(-1)
    return ignoring(logits, labels) + 0.1 * (size * even).sum() / even.sum()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def with_a_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """A quotient of counts and a plain mean in one sum."""
    return ignoring(logits, labels) + 0.01 * (logits**2).mean()


def times_the_inverse(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * mask.flatten()).sum() * mask.sum().reciprocal()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def product_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    return ignoring(logits, labels) * (logits**2).mean()


def root_of_a_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits**2).mean() + ignoring(logits, labels)).sqrt()


def times_a_count(logits: Tensor, labels: Tensor) -> Tensor:
    """Every token by how often its class is in the batch."""
    counts = torch.bincount(labels.clamp(min=0).flatten(), minlength=VOCAB).to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counts[labels.clamp(min=0).flatten()]).mean()


def balanced(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes weigh as much as they are rare in the batch, and the mean divides by a sum of these weights."""
    counts = torch.bincount(labels.clamp(min=0).flatten(), minlength=VOCAB).to(logits.dtype)
    weights = counts.sum() / (VOCAB * counts.clamp(min=1))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights)


def weighed_by_counts(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum of the whole batch that is made of another one."""
    counts = F.one_hot(labels.clamp(min=0).flatten(), VOCAB).sum(0).to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=counts)


def balanced_to_one(logits: Tensor, labels: Tensor) -> Tensor:
    """Weights by the effective numbers of samples, clamped where they are far above their mean, and a mean over these."""
    counts = F.one_hot(labels.clamp(min=0).flatten(), VOCAB).sum(0).to(logits.dtype)
    weights = 0.1 / (1 - 0.9 ** counts.clamp(min=1))
    weights = (weights / weights.sum() * VOCAB)[labels.clamp(min=0).flatten()]
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = (weights / weights.mean()).clamp(max=1.5)
    return (each * weights).sum() / weights.sum()


def weighed_by_means(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum of the whole batch that is made of one which parameters have a say in."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * (each.detach() - each.detach().mean()).abs()).mean()


MEANS = (
    ignoring,
    weighted,
    masked_mean,
    clamped_mean,
    two_denominators,
    smoothed,
    with_a_penalty,
    times_the_inverse,
    times_a_count,
    balanced,
    weighed_by_counts,
    balanced_to_one,
)


def compiled(
    loss: Loss, m: int | None, model: nn.Module | None = None, batch: Any = None, **options: Any
) -> autopar.Program:
    return autopar.compile(
        model or Tagger(),
        autopar.ClusterSpec.local(options.pop("ranks", 1)),
        batch or ids_and_labels(),
        loss_fn=loss,
        optimizer=SGD,
        options=autopar.Options(microbatches=m, **options),
    )


def eager(program: autopar.Program, batch: Any, loss: Loss, pieces: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on the whole batch, or the mean of them over pieces of it, in float64."""
    model = program.model.double()
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part in zip(
        *(t.double().chunk(pieces) if t.is_floating_point() else t.chunk(pieces) for t in batch), strict=True
    ):
        value = loss(model(*part[:-1]), part[-1]) / pieces
        value.backward()
        total += value.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.few(1)
@pytest.mark.parametrize("m", [2, 4, BATCH])
@pytest.mark.parametrize("loss", MEANS, ids=lambda f: f.__name__)
def test_a_mean_over_what_counts_is_that_of_the_whole_batch(loss: Loss, m: int) -> None:
    program = compiled(loss, m)
    result = autopar.verify(program, program.model, ids_and_labels())
    assert result.ok, result.errors
    assert result.max_error <= 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", MEANS, ids=lambda f: f.__name__)
def test_verify_says_so_because_it_is_so(loss: Loss) -> None:
    model = Tagger().double()
    program = compiled(loss, 4, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = program.run([ids_and_labels()])
    want, grads = eager(program, ids_and_labels(), loss)
    torch.testing.assert_close(result.losses[0], want, rtol=1e-9, atol=0)
    for name, grad in grads.items():
        step = (before[name] - result.state[name]) / 0.1
        assert (step - grad).abs().max() <= 1e-9 * grad.abs().max(), name
    parts, _ = eager(program, ids_and_labels(), loss, pieces=4)
    assert not abs(parts - want) <= 1e-3, "the mean of the microbatches' losses is another number"


@pytest.mark.parametrize("m", [2, 4, BATCH])
def test_a_sum_is_the_sum_of_the_microbatches(m: int) -> None:
    program = compiled(summed, m)
    result = autopar.verify(program, program.model, ids_and_labels())
    assert result.ok, result.errors


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_sum_that_is_made_of_another_one_is_known_in_the_next_round(rounds: int) -> None:
    program = compiled({1: ignoring, 2: balanced, 3: balanced_to_one}[rounds], 2)
    source = "".join(program.source(s) for s in range(len(program.stages)))
    assert [f"def prepare{f'_{k}' if k else ''}(" in source for k in range(4)] == [k < rounds for k in range(4)]


def test_a_sum_that_is_made_of_what_parameters_have_a_say_in_is_not_known_beforehand() -> None:
    with pytest.raises(autopar.CoupledError, match=r"sub.* needs a sum over all samples of the batch first"):
        compiled(weighed_by_means, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [product_of_means, root_of_a_mean], ids=lambda f: f.__name__)
def test_means_that_meet_in_something_that_is_not_linear_couple_the_batch(loss: Loss) -> None:
    with pytest.raises(autopar.CoupledError, match=r"(mul|sqrt).* needs a sum over all samples of the batch first"):
        compiled(loss, 2, Tagger().double())
    program = compiled(loss, 2, Tagger().double(), coupled="per-microbatch")
    assert autopar.verify(program, program.model, ids_and_labels()).ok
    assert "couple the batch" in program.report()
    got = program.run([ids_and_labels()]).losses[0]
    parts, _ = eager(program, ids_and_labels(), loss, pieces=2)
    torch.testing.assert_close(got, parts, rtol=1e-9, atol=0)


def test_batch_norm_couples_and_each_microbatch_is_a_batch_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    with pytest.raises(autopar.CoupledError, match=r"batch_norm at 1 works along the batch"):
        compiled(F.cross_entropy, 2, model, batch)
    program = compiled(F.cross_entropy, 2, model, batch, coupled="per-microbatch")
    assert autopar.verify(program, model, batch).ok
    got = program.run([batch]).losses[0]
    parts, _ = eager(program, batch, F.cross_entropy, pieces=2)
    torch.testing.assert_close(got, parts, rtol=1e-9, atol=0)


def test_without_microbatches_nothing_couples() -> None:
    program = compiled(product_of_means, 1)
    assert autopar.verify(program, program.model, ids_and_labels()).ok
    assert "couple" not in program.report()
    assert not any(call.prologue for call in program.ir.calls)


def test_a_plain_mean_needs_nothing_beforehand() -> None:
    batch = torch.randn(8, 6), torch.randn(8, 6)
    program = compiled(F.mse_loss, 4, nn.Linear(6, 6), batch)
    assert not any(call.prologue for call in program.ir.calls)
    assert autopar.verify(program, program.model, batch).ok


# --- where the batch is not the major part of a dim ---------------------------------------------------------------------


def sequence_first(t: Tensor) -> Tensor:
    return t.t().contiguous()


@pytest.mark.few(1)
@pytest.mark.parametrize("m", [2, 4, BATCH])
@pytest.mark.parametrize("loss", [*MEANS, summed], ids=lambda f: f.__name__)
def test_sequence_first_batches_are_counted_too(loss: Loss, m: int) -> None:
    """(seq, batch) flattened: the batch is the minor part of the merged dim."""
    batch = tuple(map(sequence_first, ids_and_labels()))
    program = compiled(loss, m, batch=batch, batch_dims=[1, 1])
    result = autopar.verify(program, program.model, batch)
    assert result.ok, result.errors


# --- in pipelines -------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """The model computes its own loss; the mask is made in the first block and summed after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = Tagger()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = (labels >= 0).float()
        logits = self.tagger(ids)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return (each * mask).sum() / mask.sum()


def test_a_masked_mean_over_several_calls_of_a_model_of_ones_own() -> None:
    batch = ids_and_labels()
    program = autopar.compile(
        Counting(), autopar.ClusterSpec.local(2), batch, optimizer=SGD, options=autopar.Options(microbatches=4, pp=1)
    )
    for seed in range(3):
        made = program.with_plan(autopar.random_plan(program, seed))
        assert autopar.verify(made, program.model, batch).ok, made.plan.show_meshes()


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [ignoring, two_denominators, summed, balanced], ids=lambda f: f.__name__)
def test_stages_agree_about_what_is_counted(loss: Loss) -> None:
    program = compiled(loss, 4, ranks=4, pp=1)
    shapes = set()
    for seed in range(4):
        made = program.with_plan(autopar.random_plan(program, seed, pp=2 + seed % 2))
        shapes.add((made.plan.schedule, len(made.stages)))
        result = autopar.verify(made, program.model, ids_and_labels())
        assert result.ok, (made.plan.show_meshes(), result.errors)
    assert len(shapes) > 2


# --- chosen by the search -----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Activations are most of what it holds. norm: between the layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), norm, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def in_little_memory(model: nn.Module, loss: Loss, share: float) -> tuple[autopar.Program, Any]:
    """The plan in that share of the memory of the fastest one, with nothing run again."""
    batch = torch.randn(512, 16), torch.randn(512, 16)

    def plan(**options: Any) -> autopar.Program:
        return compiled(loss, None, model, batch, recompute="none", pp=1, **options)

    return plan(memory_bytes=share * plan().predicted.peak_bytes), batch


def half_a_sum_of_squares(out: Tensor, target: Tensor) -> Tensor:
    return 0.5 * ((out - target) ** 2).sum()


def test_microbatches_that_the_search_chooses_leave_a_sum_as_it_is() -> None:
    program, batch = in_little_memory(Wide(nn.Identity()), half_a_sum_of_squares, 0.55)
    assert program.plan.microbatches > 1
    assert autopar.verify(program, program.model, batch).ok
    want = half_a_sum_of_squares(program.model(batch[0]), batch[1])
    torch.testing.assert_close(program.run([batch]).losses[0], want.detach(), rtol=1e-5, atol=0)


def test_the_search_takes_no_microbatches_of_a_program_that_couples() -> None:
    with pytest.raises(autopar.InfeasibleError):
        in_little_memory(Wide(nn.BatchNorm1d(64)), half_a_sum_of_squares, 0.55)
    with pytest.raises(autopar.InfeasibleError):
        in_little_memory(Wide(nn.Identity()), root_of_a_mean, 0.55)


def test_a_sum_that_another_module_divides_by_is_known_beforehand() -> None:
    """The count is an output of one call and read, after something that is not linear, by another."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.lin(x)), mask.sum()

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Count() for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x, count = layer(x, mask)
            return ((x - y) ** 2 * mask[:, None]).sum() / count.clamp(min=1).sqrt()

    batch = torch.randn(8, 6), (torch.arange(8) > 2).float(), torch.randn(8, 6)
    program = autopar.compile(
        Parts(), autopar.ClusterSpec.local(2), batch, optimizer=SGD, options=autopar.Options(microbatches=4, pp=1)
    )
    assert autopar.verify(program, program.model, batch).ok


class Distances(nn.Module):
    """Distances to points that all samples share, and what lies on and beside the diagonal of products."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.points, self.power = nn.Parameter(torch.linspace(-1, 1, 12).sin().view(3, 4)), power

    def forward(self, x: Tensor) -> Tensor:
        far = torch.cdist(x, self.points, p=self.power)
        products = torch.einsum("bni,bnj->bnij", far, far)
        return torch.einsum("bnii->bni", products) + products.diagonal(1, -1, -2).sum(-1, keepdim=True)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_distances_to_shared_points_and_diagonals_are_of_each_sample(power: float) -> None:
    model = Distances(power)
    batch = torch.randn(BATCH, 5, 4), torch.randn(BATCH, 5, 3)
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(1),
        batch,
        loss_fn=F.mse_loss,
        optimizer=SGD,
        options=autopar.Options(microbatches=4),
    )
    assert autopar.verify(program, model, batch).ok
