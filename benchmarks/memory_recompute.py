"""Emitted recompute against PyTorch's, on one process: the same GPT and optimizer, at the peak that the other one has.

The peak of a PyTorch program is counted; autopar compiles with that many bytes as its limit, on a profile calibrated on this
machine, and must stay below it when the same counter counts (`autopar/counter.py`). Then the two take turns.

    checkpoint            torch.utils.checkpoint around every block
    selective             the same, saving products and attention (create_selective_checkpoint_contexts)
    budget 0.3 … 0.7      torch.compile with activation_memory_budget: joint graph and partition as inductor has them, run
                          op by op, so that only the choice of what to recompute differs
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.counter import ByteCounter
from benchmarks.harness import Batch, Step, make_batch, print_json, take_turns
from benchmarks.models import next_token_loss, seeded_gpt
from benchmarks.reference_steps import autopar_step

SEQ = 256
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
BUDGETS = (0.3, 0.5, 0.7)

batch_of = functools.partial(make_batch, batch=8, seq=SEQ)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """A block under torch.utils.checkpoint."""

    def __init__(self, block: nn.Module, selective: bool) -> None:
        super().__init__()
        self.block, self.selective = block, selective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.selective:
            return checkpoint(self.block, x, use_reentrant=False)
        context = functools.partial(create_selective_checkpoint_contexts, _save_products)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=context)


class Watch:
    """Enters a counter around the parts of a step that are to be counted, when there is one. The code of torch.compile runs only
    where no counter is entered, so there its graphs enter it themselves."""

    def __init__(self) -> None:
        self.counter: ByteCounter | None = None

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.counter is None else self.counter


def min_cut_eager(watch: Watch) -> Callable[[Any, Any], Any]:
    """A backend of torch.compile: forward and backward as inductor's partitioner divides them, run by PyTorch's ops, watched."""

    def compiler(graph: Any, inputs: Any) -> Any:
        run = boxed_nop(graph, inputs)

        def watched(arguments: Any) -> Any:
            with watch():
                return run(arguments)

        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


def backend(kind: str) -> str:
    """The backend of torch.compile that runs the partitioned graphs."""
    return "aot_eager with min_cut_rematerialization_partition" if kind.startswith("budget") else "eager"


def torch_step(kind: str, watch: Watch) -> tuple[Step, int]:
    """A training step of PyTorch ("eager", "checkpoint", "selective", "budget 0.5"), warm; bytes that rest between steps."""
    gpt = seeded_gpt(SEQ)
    if kind in ("checkpoint", "selective"):
        gpt.blocks = nn.ModuleList(Checkpointed(block, kind == "selective") for block in gpt.blocks)
    optimizer = OPTIMIZER(gpt.parameters())
    compiled = kind.startswith("budget")

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return next_token_loss(gpt(ids), labels)

    run: Callable[..., torch.Tensor] = loss_of
    if compiled:
        torch._functorch.config.activation_memory_budget = float(kind.split()[1])
        torch._dynamo.reset()
        run = torch.compile(loss_of, backend=min_cut_eager(watch))

    def step(batch: Batch) -> float:
        with nullcontext() if compiled else watch():
            loss = run(*batch)
            loss.backward()
        with watch():
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    step(batch_of(0))
    state = [t for row in optimizer.state.values() for t in row.values()]
    return step, sum(t.untyped_storage().nbytes() for t in (*gpt.parameters(), *state))


def program_within(limit_bytes: float, profile: Any) -> Any:
    """The program that autopar finds under a limit."""
    import autopar

    return autopar.compile(
        seeded_gpt(SEQ),
        autopar.ClusterSpec.local(1).with_profile(profile),
        batch_of(0),
        loss_fn=next_token_loss,
        optimizer=OPTIMIZER,
        options=autopar.Options(recompute="auto", microbatches=1, pp=1, memory_bytes=limit_bytes),
    )


def counted(step: Step, watch: Watch, resting_bytes: int) -> int:
    """The most bytes alive in a step, those that rest beside what the step makes."""
    gc.collect()
    gc.disable()
    counter = watch.counter = ByteCounter()
    try:
        step(batch_of(1))
        counter.restart()
        step(batch_of(2))
        return resting_bytes + counter.peak
    finally:
        watch.counter = None
        gc.enable()


def compare(kind: str, profile: Any, steps: int, warmup: int) -> dict[str, Any]:
    """One of PyTorch's ways against what autopar finds at its peak."""
    watch = Watch()
    theirs, resting = torch_step(kind, watch)
    peak = counted(theirs, watch, resting)
    with tempfile.TemporaryDirectory() as directory:
        program = program_within(peak, profile)
        program.save(directory)
        program_step = autopar_step(Path(directory))

        def ours(batch: Batch) -> float:
            with watch():
                return program_step(batch)

        ours(batch_of(0))
        own = counted(ours, watch, resting)
        turns = take_turns({"autopar": ours, kind: theirs}, batch_of, steps, warmup, barrier=lambda: None)
    return {
        "benchmark": "memory: recompute",
        "against": kind,
        "backend": backend(kind),
        "peak_bytes": {"autopar": own, kind: peak},
        "peak_ratio": round(own / peak, 4),
        "predicted_peak_bytes": int(program.predicted.peak_bytes),
        "resting_bytes": resting,
        "made_again": {n: len(t.recompute) for n, t in program.plan.stages[0].templates.items()},
        **turns.summary(),
        **turns.ratios("autopar", kind),
    }


def recompute(steps: int, warmup: int, kinds: Sequence[str] = ()) -> None:
    """Every comparison, a JSON object each."""
    from autopar.costmodel.calibrate import calibrate

    torch.set_num_threads(1)
    profile = calibrate(quick=True, ranks=1, say=lambda text: None)
    for kind in kinds or ("eager", "checkpoint", "selective", *(f"budget {b}" for b in BUDGETS)):
        print_json(compare(kind, profile, steps, warmup))
