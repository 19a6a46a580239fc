"""Buffers as they were before a step, for a step that is to count for nothing.

Running statistics are written while a step computes, and a value that is no number would stay in them for ever. Copied are, after
the first step, those buffers alone that the step before has written.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class BufferCopies:
    """Copies of a rank's buffers; the tensors must stay the same ones from step to step."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = list(buffers)
        self._copies: list[tuple[Tensor, Tensor, int]] = []
        self._first = True

    def take(self) -> None:
        """Copy the buffers as a step begins."""
        versions = {id(buffer): version for buffer, _, version in self._copies}
        if not self._first:
            self._buffers = [b for b in self._buffers if b._version != versions[id(b)]]
        self._first = False
        self._copies = [(buffer, buffer.clone(), buffer._version) for buffer in self._buffers]

    def put_back(self) -> None:
        """Restore the buffers to what they held before the step."""
        for buffer, copy, _ in self._copies:
            buffer.copy_(copy)
