"""Saved programs under torchrun with Gloo compute what `program.run` computes in one process; torch is all they need."""

from __future__ import annotations

import copy
import functools
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.passes.search.overlap import overlapping
from autopar.runtime.checkpoint import checkpoint
from tests.passes.lower import test_overlap, test_overlap_experts
from tests.warm import python, torchrun

STEPS = 4
Trained = tuple[autopar.ParallelProgram, list[dict[str, Any]], Path]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
BLOCKER = """import sys
BLOCKED = ("autopar", "ortools", "rich")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} may not be needed here")
sys.meta_path.insert(0, Blocker())
sys.modules.update({name: None for name in list(sys.modules) if name.split(".")[0] in BLOCKED})
"""


class Model(nn.Module):
    """Attention, a norm, an embedding and a head, large enough to shard over four ranks in every dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (p.unflatten(-1, (4, 4)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 5 + 1) % 32


def compiled(ranks: int, model: nn.Module | None = None, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(3)
    made = model if model is not None else Model().double()
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(made, cluster, batch(0), loss_fn=loss, optimizer=ADAMW, options=autopar.Options(**options))


CASES = {
    "2-zero3": (2, {"mesh": {"dp": 2}, "strategy": "zero3", "microbatches": 2}),
    "2-dp": (2, {"mesh": {"dp": 2}, "strategy": "dp"}),
    "4-megatron": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "constraints": {"up.weight": "[@tp, .]", "down.weight": "[., @tp]"}},
    ),
}


def in_torchrun(scenario: str, ranks: int, directory: Path, out: Path) -> list[dict[str, Any]]:
    done = torchrun(ranks, Path(__file__).with_name("processes_worker.py"), scenario, directory, out)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(out / f"{scenario}_{rank}.pt") for rank in range(ranks)]


def saved(program: autopar.ParallelProgram, directory: Path, batches: int = STEPS + 1) -> Path:
    program.save(directory)
    torch.save([batch(step) for step in range(batches)], directory / "batches.pt")
    return directory


def same(got: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Case -> its program, what its processes computed, and where; each case runs once."""

    @functools.cache
    def run(case: str) -> Trained:
        out = tmp_path_factory.mktemp(case)
        ranks, options = CASES[case]
        program = compiled(ranks, **options)
        return program, in_torchrun("train", ranks, saved(program, out / "program"), out), out

    return run


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_processes_train_as_the_threads_of_program_run_do(case: str, trained: Callable[[str], Trained]) -> None:
    program, ranks, _ = trained(case)
    want = program.run([batch(step) for step in range(3)])
    fourth = program.run([batch(step) for step in range(4)])[3].item()
    for got in ranks:
        assert got["losses"] == pytest.approx([t.item() for t in want], rel=1e-12)
        assert got["fourth"] == pytest.approx([fourth, fourth], rel=1e-12)
        same(got["weights"], want.state_dict())


@pytest.mark.parametrize(("case", "share"), [("2-zero3", 2), pytest.param("2-dp", 1, marks=pytest.mark.slow)])
def test_each_process_holds_only_its_shard_of_the_weights(
    case: str, share: int, trained: Callable[[str], Trained]
) -> None:
    program, ranks, _ = trained(case)
    full = sum(w.numel() for w in program.weights().values())
    for got in ranks:
        assert sum(math.prod(shape) for shape in got["held"].values()) == full // share


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_four_under_another_plan(trained: Callable[[str], Trained]) -> None:
    first, _, out = trained("2-zero3")
    second = compiled(4, mesh={"dp": 2, "tp": 2})
    want = first.run([batch(step) for step in range(5)])
    for got in in_torchrun("resume", 4, saved(second, out / "four"), out):
        assert got["losses"] == pytest.approx([want[4].item()], rel=1e-10)
        for name, value in want.state_dict().items():
            torch.testing.assert_close(got["weights"][name], value, rtol=1e-9, atol=1e-12)


PIPELINES = {
    "pp=2 dp=2": {"pp": 2, "mesh": {"dp": 2}, "schedule": "1f1b", "microbatches": 4},
    "pp=4": {"pp": 4, "mesh": {"dp": 1}, "schedule": "zb-h1", "microbatches": 8},
    "pp=2 tp=2": {"pp": 2, "mesh": {"tp": 2}, "schedule": "interleaved", "microbatches": 4},
}
"""Options of pipelines over four processes."""


class Tied(Model):
    """The head's weight is the embedding's: the first and the last stage hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def eager_curve(model: nn.Module, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of the model on one device."""
    model = copy.deepcopy(model)
    optimizer, losses = ADAMW(model.parameters()), []
    for step in range(steps):
        ids, labels = batch(step)
        value = loss(model(ids), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_of_processes_has_the_loss_curve_of_one_device(case: str, tmp_path: Path) -> None:
    steps = 20
    torch.manual_seed(3)
    model = (Tied if case == "pp=4" else Model)().double()
    program = compiled(4, model, **PIPELINES[case])
    assert program.pp == PIPELINES[case]["pp"]
    want, parameters = eager_curve(model, steps)
    assert want[-1] < 0.9 * want[0]
    threads = program.run([batch(step) for step in range(steps)])
    assert [t.item() for t in threads] == pytest.approx(want, rel=1e-9)
    held: set[str] = set()
    for got in in_torchrun("curve", 4, saved(program, tmp_path / "program", steps), tmp_path):
        assert got["losses"] == pytest.approx([t.item() for t in threads], rel=1e-12)
        assert got["losses"] == pytest.approx(want, rel=1e-9)
        own = got["weights"].keys() & parameters.keys()
        same(got["weights"], {name: threads.state_dict()[name] for name in own})
        for name in own:
            torch.testing.assert_close(got["weights"][name], parameters[name].detach(), rtol=1e-8, atol=1e-10)
        held |= own
    assert held == parameters.keys()


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of a model that never had weights; its run.py refuses to import anything of autopar or beside torch."""
    with torch.device("meta"):
        model = Model().double()
    directory = compiled(2, model, mesh={"dp": 2}, strategy="zero3").save(tmp_path_factory.mktemp("meta") / "program")
    run = directory / "run.py"
    run.write_text(BLOCKER + run.read_text())
    (directory / "data.py").write_text(
        "import torch\ndef batches():\n    for step in range(3):\n"
        "        ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))\n"
        "        yield ids, (ids * 5 + 1) % 32\n"
    )
    return directory


def test_a_meta_model_starts_from_a_checkpoint_with_torch_alone(meta: Path, tmp_path: Path) -> None:
    assert not (meta / "weights").exists()
    program = compiled(2)
    checkpoint.write_full(tmp_path / "weights", program.weights())
    done = torchrun(2, "run.py", "--weights", tmp_path / "weights", "--data", "data.py:batches", "--steps", 3, cwd=meta)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [float(line.split("loss ")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert said == pytest.approx([t.item() for t in program.run([batch(step) for step in range(3)])], abs=1e-6)


def test_a_meta_model_without_weights_says_what_to_give(meta: Path) -> None:
    done = torchrun(2, "run.py", "--steps", 1, cwd=meta)
    assert done.returncode != 0
    assert "has no weights" in done.stderr
    assert "--weights" in done.stderr


@pytest.mark.slow
def test_a_wrong_world_size_is_said_by_every_rank_and_none_hangs(meta: Path) -> None:
    done = torchrun(3, "run.py", cwd=meta, timeout=60)
    assert done.returncode != 0
    message = "this program was compiled for 2 ranks (dp=2), but WORLD_SIZE is 3"
    assert done.stderr.count(f"error: {message}") >= 1
    alone = subprocess.run([python(), "run.py"], cwd=meta, capture_output=True, text=True, timeout=60, check=False)
    assert alone.returncode == 2
    assert "compiled for 2 ranks" in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor parallel", "experts"])
def test_messages_that_travel_beside_work_change_nothing(kind: str, tmp_path: Path) -> None:
    if kind == "experts":
        program, data = test_overlap_experts.program("any"), test_overlap_experts.batch()
    else:
        plain, data = test_overlap.program(), test_overlap.batch()
        program = plain.with_plan(overlapping(plain.plan, "any"))
    program.save(tmp_path / "program")
    assert "_coming.wait()" in (tmp_path / "program" / "stages" / "stage_0.py").read_text()
    torch.save([data] * 3, tmp_path / "program" / "batches.pt")
    want = program.run([data] * 3)
    for got in in_torchrun("curve", 4, tmp_path / "program", tmp_path):
        assert got["losses"] == pytest.approx([t.item() for t in want], rel=1e-6)
