"""Run a compiled program with every rank as a thread of this process, over the same files that torchrun would run."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autopar import runtime
from autopar.runtime import attention, ops, random, rnn
from autopar.runtime.comm import Comm
from autopar.runtime.session import Session
from autopar.runtime.tables import world_mesh
from autopar.runtime.threads import run_threads
from autopar.runtime.update_rule import OptimizerFactory, UpdateRule

T = TypeVar("T")


def stage_module(source: str, name: str, extra: Mapping[str, Any] | None = None) -> types.ModuleType:
    """Execute a stage file. `autopar_runtime` is this package's runtime; `extra` are other importable modules."""
    sys.modules.setdefault("autopar_runtime", runtime)
    for sub in (ops, attention, rnn, random):
        setattr(runtime, sub.__name__.rsplit(".", 1)[1], sub)
    for key, value in (extra or {}).items():
        sys.modules[key] = value
    module = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


@dataclass(frozen=True)
class InProcess:
    """An emitted program as modules of this process: pipeline.py and every stage."""

    pipeline: Any
    modules: tuple[Any, ...]


def run_ranks(
    pipeline: Any,
    modules: Sequence[Any],
    weights: Mapping[str, torch.Tensor],
    update: UpdateRule | OptimizerFactory | None,
    seed: int,
    body: Callable[[Session], T],
    dtype: torch.dtype | None = None,
    timeout_s: float = 600.0,
) -> list[T]:
    """Start a session on every rank, load weights, run `body`; results in rank order. modules: of all stages."""

    def rank(comm: Comm) -> T:
        session = Session(pipeline, modules, comm, update, seed, dtype=dtype)
        session.load_weights(weights)
        return body(session)

    threads = torch.get_num_threads()
    try:
        return run_threads(pipeline.WORLD, world_mesh(pipeline), rank, timeout_s)
    finally:
        torch.set_num_threads(threads)


def train(session: Session, batches: Sequence[Sequence[torch.Tensor]], steps: int) -> list[torch.Tensor]:
    """Losses of `steps` optimizer steps over the batches, again from the first when they run out."""
    return [session.train_step(list(batches[i % len(batches)])).clone() for i in range(steps)]
