"""Scripts of `posted` run in this process, as they were posted or, with `changes`, on so many ranks.

A script draws its random numbers from torch's one generator, so it runs once, in the thread that calls; the ranks of its step are
threads, each of which is given the script's batches.
"""

from __future__ import annotations

import contextlib
import io
import queue
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.capture.examples.held import Held
from autopar.runtime import Session
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.loaded import LoadedProgram
from autopar.script.optimizers import factory_of
from autopar.script.together import write_without_script
from tests.scripts.changes import CHANGES

POSTED = Path(__file__).parent / "posted"
NAMES = tuple(sorted(path.stem for path in POSTED.glob("*.py")))
Parallelize = Callable[..., Any]


def changed(name: str) -> str:
    """The text of a script with its changes. Raises ValueError where a changed line does not stand there exactly once."""
    text = (POSTED / f"{name}.py").read_text()
    for lines, instead in CHANGES[name]:
        if text.count(lines) != 1:
            raise ValueError(f"{name}: {lines!r} stands {text.count(lines)} times in the script")
        text = text.replace(lines, instead)
    return text


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """A context in which tensors are float64 by default, and nothing is printed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_default_dtype(before)


def run(name: str, text: str, parallelize: Parallelize | None = None) -> dict[str, Any]:
    """The globals of a script after it ran, in float64. parallelize: what it has as `autopar.parallelize`."""
    module = types.ModuleType(f"posted_{name}")
    module.__file__ = str(POSTED / f"{name}.py")
    if parallelize is not None:
        module.autopar = types.SimpleNamespace(parallelize=parallelize, Entry=autopar.Entry)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        with float64():
            exec(compile(text, module.__file__, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return dict(vars(module))


class EveryRank:
    """The step of a script whose ranks are threads: what is called here is called on every rank, and the result is the first
    one's, which the others' equal."""

    def __init__(self, program: autopar.ParallelProgram, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.program, self.model, self.optimizer = program, model, optimizer
        self._folder = tempfile.TemporaryDirectory()
        write_without_script(program.contents, Path(self._folder.name))
        manifest = Manifest.read(Path(self._folder.name))
        self._asked: list[queue.Queue[Callable[[autopar.Step], Any] | None]] = [
            queue.Queue() for _ in range(program.plan.ranks)
        ]
        self._given: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._threads = ThreadPoolExecutor(1)

        def serve(session: Session) -> None:
            step, rank = (
                autopar.Step(LoadedProgram(manifest, session), model, Path(self._folder.name)),
                session.comm.rank,
            )
            while (call := self._asked[rank].get()) is not None:
                self._given.put((rank, call(step)))

        self._served = self._threads.submit(program.on_ranks, serve)

    def everywhere(self, call: Callable[[autopar.Step], Any]) -> Any:
        """The result of a call on every rank. Raises what a rank raises; AssertionError where ranks give other results."""
        for asked in self._asked:
            asked.put(call)
        given: dict[int, Any] = {}
        while len(given) < len(self._asked):
            try:
                rank, result = self._given.get(timeout=0.2)
            except queue.Empty:
                if self._served.done():
                    self._served.result()
                    raise AssertionError("the ranks have ended") from None
                continue
            given[rank] = result
        for result in given.values():
            torch.testing.assert_close(result, given[0], rtol=0, atol=0)
        return given[0]

    def __call__(self, *batch: Any) -> Any:
        said = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

        def call(step: autopar.Step) -> Any:
            for group, values in zip(step.optimizer.param_groups, said, strict=True):
                group.update(values)
            return step(*batch)

        return self.everywhere(call)

    def entry(self, name: str) -> Callable[..., Any]:
        return lambda *batch: self.everywhere(lambda step: step.entry(name)(*batch))

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, torch.Tensor] = self.everywhere(lambda step: step.state_dict())
        return state

    def end(self) -> None:
        """End the ranks. Raises what one of them raised."""
        for asked in self._asked:
            asked.put(None)
        self._served.result()
        self._threads.shutdown()
        self._folder.cleanup()


def parallelized(
    plan_of: Callable[[autopar.ParallelProgram], autopar.ParallelProgram], ranks: int, steps: list[EveryRank]
) -> Parallelize:
    """A function that stands for `autopar.parallelize` in a script, on so many ranks. plan_of: makes the program one of another
    plan. steps: are added those that the script makes."""

    def parallelize(
        model: nn.Module,
        cluster: str,
        batch: Any,
        *,
        optimizer: torch.optim.Optimizer,
        entries: Mapping[str, autopar.Entry] | None = None,
        **asked: Any,
    ) -> EveryRank:
        entries = entries or {}
        held = Held(model, {name: entry.module for name, entry in entries.items() if entry.module is not None})
        of_entries = {}
        for name, entry in entries.items():
            if isinstance(entry.optimizer, torch.optim.Optimizer):
                trains = [p for group in entry.optimizer.param_groups for p in group["params"]]
                entry = replace(entry, optimizer=factory_of(entry.optimizer, held), trains=trains)
            of_entries[name] = entry
        program = autopar.compile(
            model,
            autopar.ClusterSpec.local(ranks),
            batch,
            optimizer=factory_of(optimizer, held),
            entries=of_entries,
            options=autopar.Options(idle_ranks=False),
            **asked,
        )
        steps.append(EveryRank(plan_of(program), model, optimizer))
        return steps[-1]

    return parallelize
