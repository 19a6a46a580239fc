"""The part `steps`: a training step on one device, emitted, by eager PyTorch and by torch.compile, in turn; and what was
predicted of its seconds and bytes.

Seconds are those between two events of the device, medians over the steps, ratios step by step with their quartiles. Peak bytes
are the caching allocator's, of the program as it is written (without a compiler), before the others are there; the batch, which
the caller holds, is not counted.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.models import Timed, eager_step, emitted_step, say_turns, timed
from benchmarks.gpu_report.parts import Found
from benchmarks.harness import Step, Turns, take_turns

WRITTEN = "autopar"
"""The emitted program as it is written."""


def measure(machine: Machine) -> Found:
    for name, one in timed(machine.size).items():
        for precision in (None, "bf16"):
            yield f"{name}, {precision or 'float32'}", attempt(measured, machine, one, precision)
            gc.collect()  # of the programs before


def measured(machine: Machine, one: Timed, precision: str | None) -> dict[str, Any]:
    """One model in these dtypes."""
    torch.compiler.reset()  # one function compiles all models, and gives up after a few
    program = one.compiled(machine.described(1), precision=precision, compiler="none")
    predicted = {"peak_bytes": program.predicted.peak_bytes, "described_s": program.predicted.step_time_s}
    calibrated = machine.calibrated(1)
    if calibrated is not None:
        again = one.compiled(calibrated, precision=precision, compiler="none")
        predicted["calibrated_s"] = again.predicted.step_time_s
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "written"
        program.save(written)
        peak = peak_bytes(machine, written, one)
        makers: dict[str, Callable[[], Step]] = {WRITTEN: lambda: emitted_step(written)}
        if not machine.rehearsal:
            makers["autopar inductor"] = lambda: emitted_step(
                one.compiled(machine.described(1), precision=precision, compiler="inductor").save(
                    Path(folder) / "inductor"
                )
            )
        makers["eager"] = lambda: eager_step(machine, one, precision, by_compiler=False)
        makers["torch.compile"] = lambda: eager_step(machine, one, precision, by_compiler=True)
        turns, failed = in_turn(machine, makers, one)
    return {
        **compared(turns, WRITTEN),
        **failed,
        "predicted": predicted,
        "peak": peak,
        "measured_s": turns.median_s(WRITTEN),
    }


def in_turn(
    machine: Machine, makers: Mapping[str, Callable[[], Step]], one: Timed, barrier: Callable[[], Any] | None = None
) -> tuple[Turns, dict[str, Any]]:
    """The programs that can be made and take a step, in turn, and why the others cannot."""
    programs: dict[str, Step] = {}
    failed: dict[str, Any] = {}
    for name, make in makers.items():
        made = attempt(make)
        first = made if isinstance(made, dict) else attempt(made, one.batch_of(0))
        if isinstance(first, dict):
            failed.setdefault("failed", {})[name] = first["error"]
        else:
            programs[name] = made
    wait = barrier or machine.synchronize
    return take_turns(programs, one.batch_of, machine.steps, machine.warmup, wait, machine.backend), failed


def compared(turns: Turns, ours: str) -> dict[str, Any]:
    """Medians, and ratios of our program to all others with their spread."""
    others = [name for name in turns.times_s if name != ours]
    ratios = {name: turns.ratios(ours, name) | {"quartiles_of_pairs": turns.quartiles(ours, name)} for name in others}
    summary = turns.summary()
    return {name: summary[name] for name in ("steps", "median_ms", "last_loss")} | {"ratios": ratios}


def peak_bytes(machine: Machine, directory: Path, one: Timed) -> dict[str, int]:
    """Bytes at the peak of a third step, and what the device holds outside of the allocator's memory."""
    one_by_one = torch.ones(64, 64, device=machine.device)
    one_by_one @ one_by_one  # the library of products takes its workspace
    before = machine.allocated_bytes()
    with machine.counting() as counter:
        step = emitted_step(directory)
        for index in range(2):
            step(one.batch_of(index))
        peak = machine.peak(lambda: step(one.batch_of(2)), counter)
    found = {"allocated": peak["allocated"] - before, "reserved": peak["reserved"], "outside": machine.outside_bytes()}
    return found


def ratio_lines(one: dict[str, Any]) -> list[str]:
    """The ratios of `compared` in words."""
    told = []
    for other, ratio in one["ratios"].items():
        first, third = ratio["quartiles_of_pairs"]
        told.append(f"    {ratio['ratio_of_pairs']:.3f} ({first:.3f} … {third:.3f}) of {other}'s")
    return told


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    for name, one in record.items():
        if "median_ms" not in one:
            told.append(f"{name}: failed: {one['error']}")
            continue
        told.append(f"{name}: {say_turns(one)}")
        told += ratio_lines(one)
        for way in ("described_s", "calibrated_s"):
            if way in one["predicted"]:
                share = one["predicted"][way] / one["measured_s"]
                told.append(f"    predicted ({way.removesuffix('_s')}): {share:.2f} of the measured seconds")
        share = one["predicted"]["peak_bytes"] / one["peak"]["allocated"]
        told.append(f"    predicted: {share:.2f} of the measured {one['peak']['allocated'] / 1e6:.1f} MB of tensors")
        told += [f"    {which} failed: {why}" for which, why in one.get("failed", {}).items()]
    return told
