"""One program for batches of several shapes: what it computes, what it holds, and what it refuses.

The reference is eager PyTorch on the very batches (padded by hand where the program pads), in float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.export import export
from autopar.proof.random_plans import random_plan
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.program.manifest import Manifest
from tests.measure import measure_in_turn
from tests.proof.test_processes import in_torchrun
from tests.warm import torchrun

VOCABULARY, LENGTHS, SAMPLES = 24, (8, 16, 24), (8, 3)
SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
SIZES = {name: {0: SAMPLES, 1: LENGTHS} for name in ("ids", "labels")}
PAD = {"ids": 0, "labels": -100}


class Decoder(nn.Module):
    """Blocks with positions, a mask made of the length, a constant of it, a buffer that every step writes, and a tied head."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(max(LENGTHS), 16)
        layer = functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(blocks))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.embed.weight.dtype)
        x = self.embed(ids) + self.places(torch.arange(length)) * torch.tensor([1.0 / length, 0.5] * 8).to(mask)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        self.seen += 1.0
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(samples: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": (ids * 5 + 1) % VOCABULARY}


def model(**fields: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(**fields).double()


def compiled(
    ranks: int, made: nn.Module | None = None, sizes: dict[str, Any] = SIZES, **options: Any
) -> autopar.ParallelProgram:
    return autopar.compile(
        made or model(),
        autopar.ClusterSpec.local(ranks),
        batch(8, 16),
        optimizer=SGD,
        options=autopar.Options(**options),
        buckets=sizes,
        pad_values=PAD,
    )


def padded(one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as long as the next bucket."""
    length = one["ids"].shape[1]
    more = min(n for n in LENGTHS if n >= length) - length
    return {name: nn.functional.pad(t, (0, more), value=PAD[name]) for name, t in one.items()}


def eager(made: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    made = copy.deepcopy(made)
    optimizer, losses = SGD(made.parameters()), []
    for one in batches:
        optimizer.zero_grad()
        loss = made(**padded(one))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: t.detach() for n, t in (*made.named_parameters(), *made.named_buffers())}


EPOCH = [batch(b, n, seed) for seed, (b, n) in enumerate([(8, 24), (8, 8), (8, 16), (8, 13), (3, 24), (8, 24), (3, 5)])]


def assert_equal(program: autopar.ParallelProgram, made: nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    result = program.run(batches)
    losses, state = eager(made, batches)
    assert [t.item() for t in result.losses] == pytest.approx(losses, rel=1e-9, abs=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


PLANS: dict[str, dict[str, Any]] = {
    "solver": {},
    "zero3": {"strategy": "zero3"},
    "zero1 in microbatches": {"strategy": "zero1", "microbatches": 2},
    "megatron": {"strategy": "megatron", "mesh": {"dp": 1, "tp": 2}},
    "1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 4},
    "interleaved": {"pp": 2, "chunks": 2, "microbatches": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
    "recompute": {"recompute": "full"},
}
FEW = {"solver", "zero1 in microbatches", "1f1b", "interleaved"}
"""Plans that are tried outside of the long sweep as well."""


@functools.cache
def program_of(plan: str, ranks: int) -> autopar.ParallelProgram:
    options = dict(PLANS[plan])
    if "mesh" in options:
        options["mesh"] = {"dp": ranks // 2, "tp": 2}
    return compiled(ranks, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(plan, ranks, marks=() if plan in FEW and ranks == 2 else pytest.mark.slow)
        for plan in PLANS
        for ranks in (2, 4)
    ],
)
def test_every_bucket_trains_the_same_parameters_as_eager(plan: str, ranks: int) -> None:
    assert_equal(program_of(plan, ranks), model(), EPOCH)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_random_plans_of_the_largest_bucket_carry_the_others(seed: int) -> None:
    program = program_of("solver", 4)
    other = program.with_plan(random_plan(program, seed))
    assert len(other.buckets) == 5
    assert other.plan.stages[0].parameters == random_plan(program, seed).stages[0].parameters
    assert_equal(other, model(), EPOCH)


@pytest.mark.few(1)
@pytest.mark.parametrize(("plan", "ranks"), [("solver", 2), ("solver", 4), ("interleaved", 4)])
def test_buckets_store_parameters_alike_and_nothing_else_is_given(plan: str, ranks: int) -> None:
    program = program_of(plan, ranks)
    for bucket in program.buckets:
        for one, first in zip(bucket.plan.stages, program.plan.stages, strict=True):
            assert one.mesh == first.mesh
            assert one.parameters == first.parameters
        assert bucket.plan.placement == program.plan.placement
    assert {b.plan.stages[0].calls for b in program.buckets}
    assert {b.request.batch for b in program.of_buckets} == set(SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 24), (3, 24), (8, 11), (3, 8)])
def test_every_bucket_can_be_verified(sizes: tuple[int, int]) -> None:
    program = program_of("solver", 2)
    assert autopar.verify(program, model(), batch(*sizes)).ok


@pytest.mark.slow
def test_buckets_with_dropout_and_low_precision_agree_with_one_rank() -> None:
    made = model(dropout=0.2).float()
    program = compiled(2, made, {name: {1: (8, 24)} for name in SIZES}, precision="bf16")
    for sizes in ((8, 24), (8, 8)):
        assert autopar.verify(program, made, batch(*sizes)).ok


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plan", "ranks"), [("solver", 2), *((p, 4) for p in ("solver", "zero1 in microbatches", "1f1b"))]
)
def test_the_peak_is_promised_over_all_buckets(plan: str, ranks: int) -> None:
    program = program_of(plan, ranks)
    whole = [one for one in EPOCH if one["ids"].shape[1] in LENGTHS]
    measured = measure_in_turn(program, whole)
    for one, of_ranks in zip(whole, measured, strict=True):
        bucket, _ = program.for_batch(one)
        for rank, peak in enumerate(of_ranks):
            predicted = bucket.account.peaks[bucket.group_of(rank)]
            assert 0.98 * peak - 256 <= predicted <= 1.05 * peak + 256, (one["ids"].shape, rank, predicted, peak)
    assert program.predicted.peak_bytes == max(b.account.peak_bytes for b in program.of_buckets)
    assert program.predicted.peak_bytes >= 0.98 * max(map(max, measured)) - 256


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "plan"), [(4, "solver"), (2, "zero1 in microbatches"), (4, "1f1b")])
def test_twenty_steps_in_processes(ranks: int, plan: str, tmp_path: Path) -> None:
    program = program_of(plan, ranks)
    batches = [one for one, _ in zip(itertools.cycle(EPOCH), range(20), strict=False)]
    program.save(tmp_path / "program")
    torch.save(batches, tmp_path / "program" / "batches.pt")
    losses, state = eager(model(), batches)
    seen: set[str] = set()
    for got in in_torchrun("curve", ranks, tmp_path / "program", tmp_path):
        assert got["losses"] == pytest.approx(losses, rel=1e-9, abs=1e-9)
        held = state.keys() & got["weights"].keys()
        for name in held:
            torch.testing.assert_close(got["weights"][name], state[name], rtol=1e-9, atol=1e-9)
        seen |= held
    assert seen == state.keys() - {"head.weight"}, "a tied parameter stands under its first name"


ANOTHER_SHAPE = """import os, sys, torch, autopar
program, data = autopar.load(sys.argv[1]), torch.load(sys.argv[1] + "/batches.pt")
for step, batch in enumerate(data):
    print("step", step + 1, program(data[1] if os.environ["RANK"] == "1" and step == 9 else batch).item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_is_given_a_batch_of_another_shape_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    program = program_of("solver", 2)
    program.save(tmp_path / "program")
    torch.save([EPOCH[0], EPOCH[1], *[EPOCH[0]] * 10], tmp_path / "program" / "batches.pt")
    assert EPOCH[0]["ids"].shape != EPOCH[1]["ids"].shape
    (tmp_path / "loop.py").write_text(ANOTHER_SHAPE)
    done = torchrun(2, tmp_path / "loop.py", tmp_path / "program", timeout=100)
    assert done.returncode == 1
    assert "step 10: rank 1 (" in done.stderr
    assert "got another batch than the others" in done.stderr
    assert "step 9 " in done.stdout
    assert "step 10 " not in done.stdout


def test_state_goes_on_in_a_program_without_buckets() -> None:
    """A checkpoint holds what one without buckets holds, and the constants of other shapes."""
    program = program_of("solver", 2)
    state = program.on_ranks(lambda session: (session.train_step(program.leaves(EPOCH[0])), session.state_dict())[1])[0]
    alone = autopar.compile(model(), autopar.ClusterSpec.local(2), batch(8, 24), optimizer=SGD)

    def resumed(session: Any) -> float:
        session.load_state_dict(state)
        return float(session.train_step(alone.leaves(EPOCH[5])))

    losses, _ = eager(model(), [EPOCH[0], EPOCH[5]])
    assert alone.on_ranks(resumed) == pytest.approx([losses[1]] * 2, rel=1e-9)


@pytest.mark.slow
def test_safetensors_in_and_out(tmp_path: Path) -> None:
    """Constants of every bucket come with the program, weights from the files."""
    program = program_of("solver", 2)
    program.save(tmp_path / "program")
    export(tmp_path / "program", tmp_path / "program" / "weights", tmp_path / "files", 1 << 30)

    def trained(session: Any) -> list[float]:
        session.load_weights({name: torch.full_like(w, math.nan) for name, w in program.weights().items()})
        load_weights(tmp_path / "files", session, Manifest.read(tmp_path / "program"))
        return [session.train_step(program.leaves(one)).item() for one in EPOCH]

    losses, _ = eager(model(), EPOCH)
    for of_rank in program.on_ranks(trained):
        assert of_rank == pytest.approx(losses, rel=1e-9, abs=1e-9)


def test_inference_in_buckets() -> None:
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    sizes = {"0": {0: (8, 5), 1: (4, 2)}}
    program = autopar.compile(made, autopar.ClusterSpec.local(2), (torch.randn(8, 4, 6).double(),), buckets=sizes)
    for shape in ((8, 4, 6), (5, 2, 6), (8, 2, 6), (5, 4, 6)):
        x = torch.randn(shape).double()
        (output,) = program.run([(x,)])
        torch.testing.assert_close(output, made(x).detach(), rtol=1e-12, atol=1e-12)


def test_the_report_says_what_every_bucket_takes() -> None:
    report = program_of("solver", 2).report()
    for samples, length in itertools.product(SAMPLES, LENGTHS):
        assert f"  ids ({samples}, {length}), labels ({samples}, {length}): " in report


def test_a_batch_that_fits_no_bucket_is_refused() -> None:
    program = program_of("solver", 2)
    for sizes, said in (((8, 25), "fits none"), ((5, 16), "Give these sizes a bucket")):
        with pytest.raises(autopar.InputError, match=said):
            program.run([batch(*sizes)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_what_rests_in_memory_tiers_rests_there_in_every_bucket(kind: str) -> None:
    cluster = autopar.ClusterSpec.local(2).with_tiers()
    options, sizes = autopar.Options(offload=kind), {name: {1: LENGTHS} for name in SIZES}
    program = autopar.compile(
        model(), cluster, batch(8, 16), optimizer=SGD, options=options, buckets=sizes, pad_values=PAD
    )
    assert len(program.buckets) == 2
    assert all(b.setting.offload == program.setting.offload for b in program.buckets)
    assert_equal(program, model(), [one for one in EPOCH if len(one["ids"]) == 8])


@pytest.mark.slow
def test_images_of_two_sizes_through_batch_statistics() -> None:
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    made = nn.Sequential(*layers, nn.Linear(8, 4))

    def images(samples: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, 3, side, side), torch.randint(0, 4, (samples,))

    program = autopar.compile(
        made,
        autopar.ClusterSpec.local(4),
        images(8, 16),
        loss_fn=nn.functional.cross_entropy,
        optimizer=SGD,
        buckets={"0": {0: (8, 5), 2: (16, 12), 3: (16, 12)}, "1": {0: (8, 5)}},
    )
    for sizes in ((8, 16), (5, 12), (8, 12), (5, 16)):
        assert autopar.verify(program, made, images(*sizes)).ok


class Deeper(nn.Module):
    """Another layer for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (self.second(x) if x.shape[1] > 4 else x).square().mean()


def test_a_bucket_that_has_no_program_is_named() -> None:
    linear, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    with pytest.raises(autopar.CaptureError) as of_one_input:
        autopar.compile(
            linear, autopar.ClusterSpec.local(1), batch, loss_fn=nn.MSELoss(), optimizer=SGD, buckets={"0": {0: (8, 5)}}
        )
    assert "This is of a bucket, 0 (5, 4), 1 (8, 4): buckets= names" in of_one_input.value.__notes__[0]


def test_buckets_that_use_other_parameters_are_refused() -> None:
    with pytest.raises(autopar.CaptureError, match=r"trains the same parameters; .* second.bias, second.weight"):
        autopar.compile(
            Deeper(), autopar.ClusterSpec.local(2), (torch.randn(4, 4, 4),), optimizer=SGD, buckets={"0": {1: (8, 4)}}
        )
