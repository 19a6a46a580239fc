"""The step after the first one: whether it computes the same, and what it changes of the Python state.

Steps run on fake tensors, from the state that the model has before the first one, and are compared op by op (`op_trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.capture.before.op_trace import Constants, Recorded, compute_the_same
from autopar.capture.before.state import Change, State
from autopar.capture.before.unread import stand_ins, unread


@dataclass(frozen=True)
class Steps:
    """The step of a model. run: one step on fake tensors, and all that it tells; changes: of Python state by the last one; alike:
    whether another trace is equal to the first; state: the one before the first step; now: takes the one of this moment; buffers:
    the values of those that have any, by id of the fake one."""

    run: Callable[[], Any]
    changes: Callable[[], Sequence[Change]]
    alike: Callable[[], bool]
    state: State
    now: Callable[[], State]
    buffers: dict[int, Tensor]

    def later_changes(self) -> Sequence[Change] | None:
        """The changes of Python state by the second step in a row; None where it computes something else than the first."""
        for constants in (None, Constants(dict(self.buffers))):
            if self._two_alike(constants, lambda: None):
                return self.changes()
        try:
            self.state.restore()
            self.run()
            self.run()
            return self.changes() if self.alike() else None
        except Exception:  # what is found in the first trace is the better reason
            return None

    def leave_unread(self, names: Sequence[str]) -> bool:
        """Whether no later step reads what changes of these names leave, so that all compute the same."""
        for constants in (None, Constants(dict(self.buffers))):
            put: list[Any] = []
            alike = self._two_alike(constants, lambda found=put: found.append(stand_ins(self.now(), names)))  # type: ignore[misc]
            if alike and put[0] is not None and unread(self.changes(), *put[0]):
                return True
        return False

    def _two_alike(self, constants: Constants | None, between: Callable[[], object]) -> bool:
        """Whether two steps in a row are equal, with `between` called after the first."""
        self.state.restore()
        runs, results = (Recorded(constants), Recorded(constants)), []
        try:
            for recorded in runs:
                with torch.enable_grad(), recorded:
                    results.append(self.run())
                if recorded is runs[0]:
                    between()
                    if constants is not None:
                        constants.end_run()
            return compute_the_same(runs, results)
        except Exception:  # what is found in the first trace is the better reason
            return False
