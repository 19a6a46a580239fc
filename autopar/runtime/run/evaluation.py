"""Evaluation beside training: an entry of the program over data of its own, every so many steps, with the weights as they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ..program.batches import batches_once
from .loaded import LoadedProgram
from .train_loop import Listener, Loop, tell

EVAL_DATA = "--eval-data"


class Evaluation(Listener):
    """Evaluates after every so many steps, and after the last one. Every rank reads all batches; rank 0 says their mean loss."""

    def __init__(self, program: LoadedProgram, arguments: argparse.Namespace) -> None:
        self._entry, self._name = program.entry(arguments.eval_entry), arguments.eval_entry
        self._source, self._every = arguments.eval_data, arguments.eval_every

    def after_step(self, loop: Loop) -> None:
        """Evaluate where it is time to. Raises RuntimeProgramError where the data give no batch."""
        if loop.step != loop.steps and not (self._every and loop.step % self._every == 0):
            return
        losses = [self._entry(batch)[0] for batch in batches_once(self._source, EVAL_DATA)]
        counted = f"{len(losses)} batch" + ("es" if len(losses) > 1 else "")
        if losses[0] is None:
            tell(loop.program.session.comm, f"step {loop.step}: {self._name} ran over {counted}, and has no loss")
        elif loop.program.session.comm.rank == 0:
            mean = torch.stack([loss.double() for loss in losses]).mean().item()
            tell(loop.program.session.comm, f"step {loop.step}: {self._name} loss {mean:.6f} (mean of {counted})")


def evaluations(program: LoadedProgram, arguments: argparse.Namespace) -> Sequence[Listener]:
    """The listeners that evaluate in a run, if that is asked for."""
    return [Evaluation(program, arguments)] if arguments.eval_data else []
