"""Python state that a step changes: put back after capture, and refused where the next step would read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.before.first_read import reads_before_writes
from autopar.capture.before.state import Change, State, state_of
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
    changes: Sequence[Change],
    state: State,
    run: Callable[[], object],
    mode: FakeTensorMode,
    later_changes: Callable[[], Sequence[Change] | None] = lambda: None,
) -> None:
    """Raises CaptureError for a change that outlives the step, unless the first step made it once for all.

    run: the step under fake tensors, run again only where attributes of modules were bound anew, to see which of them are
    read before they are written. later_changes: those of a step after the first one; None where it computes something else.
    """
    lasting = [c for c in changes if not c.is_attribute]
    attributes = {(id(c.owner), str(c.key)): c for c in changes if c.is_attribute}
    if attributes and not lasting:
        state.restore()
        with mode, reads_before_writes(attributes.keys()) as read_first:
            run()
        lasting = [attributes[key] for key in attributes if key in read_first]
    if lasting and not _once(lasting, later_changes):
        raise CaptureError(
            f"forward changes {', '.join(dict.fromkeys(c.name for c in lasting[:4]))}, which a program traced once cannot "
            f"follow; {_instead(lasting[0])}"
        )


def _once(lasting: Sequence[Change], later_changes: Callable[[], Sequence[Change] | None]) -> bool:
    """Whether the first step notes something once for all (the kind of a problem, a hook that it registers), and a later step
    computes the same and leaves that as it is. What belongs to the process (torch's default dtype) a program does not set."""
    if any(c.owner is None for c in lasting):
        return False
    later = later_changes()
    if later is None or not all(c.is_attribute for c in later):
        return False
    return not {c.name for c in lasting} & {c.name for c in later}


def _instead(change: Change) -> str:
    if "random" in change.name or "generator" in change.name or "rng" in change.name.lower():
        return "draw random numbers with torch (torch.rand, dropout), which every step draws anew"
    return (
        "keep numbers and tensors that live from step to step as buffers (register_buffer), make lists and dicts anew in each "
        "forward, and fill caches before compile (run the model once)"
    )
