"""Runs under torchrun for test_processes.py: `python processes_worker.py SCENARIO PROGRAM OUT`; one file per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar


def batches(program: Path) -> list[Any]:
    return torch.load(program / "batches.pt")


def full(program: Any) -> dict[str, torch.Tensor]:
    """Full tensors from a state of DTensors, copied (those of replicated ones are the program's own memory)."""
    state = program.state_dict()
    return {k: v.full_tensor().clone() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def train(directory: Path, out: Path) -> dict[str, Any]:
    """Three steps; then the state goes into a second copy of the program, and both do the fourth."""
    program, data = autopar.load(directory), batches(directory)
    losses = [program(batch).item() for batch in data[:3]]
    weights = full(program)
    held = {name: tuple(t.shape) for name, t in program.session.rt.params.items()}
    again = autopar.load(directory)
    again.load_state_dict(program.state_dict())
    fourth = [p(data[3]).item() for p in (program, again)]
    program.save(out / "checkpoint")
    return {"losses": losses, "weights": weights, "fourth": fourth, "held": held}


def curve(directory: Path, out: Path) -> dict[str, Any]:
    """The losses over every batch once."""
    program = autopar.load(directory)
    return {"losses": [program(batch).item() for batch in batches(directory)], "weights": full(program)}


def resume(directory: Path, out: Path) -> dict[str, Any]:
    """The state after one more step from the checkpoint of other ranks and another plan."""
    program, data = autopar.load(directory), batches(directory)
    program.resume(out / "checkpoint")
    return {"losses": [program(data[4]).item()], "weights": full(program)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, directory, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    result = {"train": train, "curve": curve, "resume": resume}[scenario](directory, out)
    torch.save(result, out / f"{scenario}_{dist.get_rank()}.pt")
    dist.destroy_process_group()
