"""Emitted recompute against PyTorch's, on one process: the same GPT and optimizer, at the peak that the other one has.

The peak of a PyTorch program is measured; autopar compiles with that many bytes as its limit, on a profile calibrated on
this machine, and must stay below it when it is measured alike. Then the two take turns.

    checkpoint            torch.utils.checkpoint around every block
    selective             the same, saving products and attention (create_selective_checkpoint_contexts)
    budget 0.3 … 0.7      torch.compile with activation_memory_budget: joint graph and partition as inductor has them, run
                          op by op, so that only the choice of what to recompute differs
    budget 0.5 inductor   the same with inductor's kernels (not run unless asked for: they take minutes to build)
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models import next_token_loss, seeded_gpt
from benchmarks.reference_steps import autopar_step
from benchmarks.turns import Batch, Step, make_batch, print_json, take_turns

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


def min_cut_eager(model: Any, inputs: Any) -> Any:
    """A backend of torch.compile: forward and backward as inductor's partitioner divides them, run by PyTorch's ops."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)(
        model, inputs
    )


def backend(kind: str) -> str:
    """Of torch.compile: what runs the partitioned graphs."""
    if not kind.startswith("budget"):
        return "eager"
    return "inductor" if kind.endswith("inductor") else "aot_eager with min_cut_rematerialization_partition"


def torch_step(kind: str) -> tuple[Step, int]:
    """A training step of PyTorch ("eager", "checkpoint", "selective", "budget 0.5"), warm; bytes that rest between steps."""
    gpt = seeded_gpt(SEQ)
    if kind in ("checkpoint", "selective"):
        gpt.blocks = nn.ModuleList(Checkpointed(block, kind == "selective") for block in gpt.blocks)
    optimizer = OPTIMIZER(gpt.parameters())

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return next_token_loss(gpt(ids), labels)

    run: Callable[..., torch.Tensor] = loss_of
    if kind.startswith("budget"):
        torch._functorch.config.activation_memory_budget = float(kind.split()[1])
        torch._dynamo.reset()
        run = torch.compile(loss_of, backend="inductor" if backend(kind) == "inductor" else min_cut_eager)

    def step(batch: Batch) -> float:
        loss = run(*batch)
        loss.backward()
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


def counted(step: Step, resting_bytes: int) -> int:
    """The most bytes alive in a step, those that rest beside what the step makes."""
    from autopar.counter import ByteCounter

    gc.collect()
    gc.disable()
    try:
        counter = ByteCounter()
        with counter:
            step(batch_of(1))
            counter.restart()
            step(batch_of(2))
        return resting_bytes + counter.peak
    finally:
        gc.enable()


def profiled(step: Step, resting_bytes: int) -> int:
    """The same from PyTorch's profiler, which sees the allocator: torch.compile does not run its code under a counter."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    step(batch_of(1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        step(batch_of(2))
    changes = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        alive += change.nbytes()
        peak = max(peak, alive)
    return resting_bytes + peak


def compare(kind: str, profile: Any, steps: int, warmup: int) -> dict[str, Any]:
    """One of PyTorch's ways against what autopar finds at its peak."""
    theirs, resting = torch_step(kind)
    measure = profiled if kind.startswith("budget") else counted
    peak = measure(theirs, resting)
    with tempfile.TemporaryDirectory() as directory:
        program = program_within(peak, profile)
        program.save(directory)
        ours = autopar_step(Path(directory))
        ours(batch_of(0))
        own = counted(ours, resting)  # a gradient that lies there from the step before is none of the profiler's
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
