"""Python state that a step changes: put back after capture, and refused where the next step would read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.before.first_read import reads_before_writes
from autopar.capture.before.state import Change, State, state_of
from autopar.capture.before.two_steps import Steps
from autopar.errors import CaptureError


@contextmanager
def kept(model: nn.Module, loss_fn: object) -> Iterator[State]:
    """Whatever happens within the context, the Python state of model and loss is afterwards what it was."""
    state = state_of(model, loss_fn)
    try:
        yield state
    finally:
        state.restore()


def check_changes(
    changes: Sequence[Change], state: State, run: Callable[[], object], mode: FakeTensorMode, steps: Steps | None = None
) -> None:
    """Raises CaptureError for a change that outlives the step, unless the first step made it once for all or no step reads it; of
    the latter it warns.

    run: the step under fake tensors, run again only where attributes of modules were bound anew, to see which of them are
    read before they are written. steps: two in a row; None where there is no trace.
    """
    lasting = [c for c in changes if not c.is_attribute]
    attributes = {(id(c.owner), str(c.key)): c for c in changes if c.is_attribute}
    if attributes and not lasting:
        state.restore()
        with mode, reads_before_writes(attributes.keys()) as read_first:
            run()
        lasting = [attributes[key] for key in attributes if key in read_first]
    if lasting and (steps is None or not _harmless(lasting, steps)):
        raise CaptureError(
            f"forward changes {', '.join(dict.fromkeys(c.name for c in lasting[:4]))}, which a program traced once cannot "
            f"follow; {_instead(lasting[0])}"
        )


def _harmless(lasting: Sequence[Change], steps: Steps) -> bool:
    """Whether all steps compute the same, as what changes is noted once for all by the first step (the kind of a problem, a
    mask, a hook that it registers), or is not read by any. What belongs to the process (torch's default dtype) a program does not
    set."""
    if any(c.owner is None for c in lasting):
        return False
    later = steps.later_changes()
    if not later:
        return later is not None
    names = sorted({change.name for change in later})
    if not steps.leave_unread(names):
        return False
    unread = [name for name in names if name in {change.name for change in lasting}]
    if not unread:
        return True
    warnings.warn(
        f"forward changes {', '.join(unread[:4])}, which no step reads: a program computes without it, and leaves it as it is",
        stacklevel=2,
    )
    return True


def _instead(change: Change) -> str:
    if "random" in change.name or "generator" in change.name or "rng" in change.name.lower():
        return "draw random numbers with torch (torch.rand, dropout), which every step draws anew"
    return (
        "keep numbers and tensors that live from step to step as buffers (register_buffer), make lists and dicts anew in each "
        "forward, and fill caches before compile (run the model once)"
    )
