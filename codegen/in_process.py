"""Run a compiled program with every rank as a thread of this process, over the same files that torchrun would run."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch

from autopar import runtime
from autopar.codegen.pipeline import pipeline_module
from autopar.codegen.user_ops import used_ops, user_ops_module
from autopar.ir.lowered import LoweredProgram
from autopar.ops.runtime_modules import RUNTIME_MODULES, home_packages
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.program.rows import DataShard, data_shards
from autopar.runtime.program.run_options import DEFAULTS, RunOptions
from autopar.runtime.program.tables import Pipeline, world_mesh
from autopar.runtime.step.entries import EntryModules
from autopar.runtime.step.session import Session
from autopar.runtime.update.averaging import Averaging
from autopar.runtime.update.update_rule import UpdateRule

T = TypeVar("T")


@dataclass(frozen=True)
class InProcess:
    """An emitted program as modules of this process: pipeline.py and every stage. buckets: the same for batches of other
    shapes; entries: of other steps; pad_values: of inputs, by name; options: those that reach run time; update: of an entry
    that trains; averaging: of one that computes with averages."""

    pipeline: types.ModuleType
    stages: tuple[types.ModuleType, ...]
    buckets: tuple[InProcess, ...] = ()
    entries: Mapping[str, InProcess] = field(default_factory=dict)
    pad_values: Mapping[str, float] = field(default_factory=dict)
    options: RunOptions = DEFAULTS
    update: UpdateRule | None = None
    averaging: Averaging | None = None

    @cached_property
    def data_shards(self) -> tuple[DataShard, ...]:
        """The rows of the batch that every rank takes. Raises RuntimeProgramError where no input has rows."""
        buckets = [Pipeline(bucket.pipeline, bucket.stages) for bucket in self.buckets]
        return data_shards(Pipeline(self.pipeline, self.stages), buckets)

    def run(
        self,
        weights: Mapping[str, torch.Tensor],
        update: UpdateRule | None,
        seed: int,
        body: Callable[[Session], T],
        dtype: torch.dtype | None = None,
    ) -> list[T]:
        """Start a session on every rank, load weights, run `body`; results in rank order."""

        def rank(comm: Comm) -> T:
            session = self.session(comm, update, seed, dtype)
            session.load_weights(weights)
            return body(session)

        return self.run_bare(rank)

    def session(self, comm: Comm, update: UpdateRule | None, seed: int, dtype: torch.dtype | None = None) -> Session:
        """A session of one rank, without weights."""
        return Session(
            self.pipeline,
            self.stages,
            comm,
            update,
            seed,
            dtype=dtype,
            buckets=self._forms[1:],
            pad=self.pad_values,
            entries={
                name: EntryModules(entry._forms, entry.pad_values, entry.update, entry.averaging)
                for name, entry in self.entries.items()
            },
            options=self.options,
        )

    @property
    def _forms(self) -> list[tuple[types.ModuleType, tuple[types.ModuleType, ...]]]:
        """Pipeline and stages of every shape."""
        return [(one.pipeline, one.stages) for one in (self, *self.buckets)]

    def run_bare(self, rank: Callable[[Comm], T]) -> list[T]:
        """The results of `rank` on every rank, in rank order; each runs as a thread."""
        threads = torch.get_num_threads()
        try:
            return run_threads(self.pipeline.WORLD, world_mesh(self.pipeline), rank)
        finally:
            torch.set_num_threads(threads)


def load(lowered: LoweredProgram, sources: Sequence[str], pipeline: str) -> InProcess:
    """The modules that emitted text makes. lowered: what the text was made of."""
    names = used_ops(lowered)
    shared = {"user_ops": user_ops_module(names)} if names else {}
    stages = tuple(stage_module(source, f"autopar_stage_{i}", shared) for i, source in enumerate(sources))
    return InProcess(pipeline_module(pipeline), stages)


def stage_module(source: str, name: str, importable: Mapping[str, types.ModuleType] | None = None) -> types.ModuleType:
    """Execute a stage file. `autopar_runtime` is this package's runtime; `importable` are other modules it may import."""
    for package in ("", *(f".{package}" for package in home_packages(RUNTIME_MODULES))):
        sys.modules.setdefault(f"autopar_runtime{package}", sys.modules[f"{runtime.__name__}{package}"])
    sys.modules.update(importable or {})
    module = types.ModuleType(name)
    module.__dict__["__source__"] = source
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module
