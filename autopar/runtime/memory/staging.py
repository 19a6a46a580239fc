"""Pinned memory between a device and files. A device copies to and from pages that may move only while the host waits, so that
what goes to a file is copied to pinned memory first, and by the host from there once it has arrived:

    write   device --its stream--> pinned, an event ... | the event is over: pinned --host--> file
    read    file --host--> pinned --its stream--> device

A room is read after all that was staged for it has landed. At most STAGED_BYTES are under way to files.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

STAGED_BYTES = 256 << 20
"""Bytes on their way to files, beside the one tensor that is being written."""


class Staging:
    """Tensors under way from pinned memory to files. pin: whether memory is to be pinned."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._under_way: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._nbytes = 0

    def room_like(self, value: Tensor) -> Tensor:
        """Pinned memory for a tensor, in its order of dims."""
        return torch.empty_like(value, device="cpu", pin_memory=self._pin)

    def add(self, file: Tensor, pinned: Tensor, event: Any) -> None:
        """A copy to pinned memory that is over with an event is for a file."""
        self._under_way.append((file, pinned, event))
        self._nbytes += pinned.nbytes
        while len(self._under_way) > 1 and (self._nbytes > STAGED_BYTES or self._under_way[0][2].query()):
            self._land()

    def read(self, file: Tensor) -> Tensor:
        """The contents of a file in pinned memory."""
        storage = file.untyped_storage()._cdata
        while any(one.untyped_storage()._cdata == storage for one, _, _ in self._under_way):
            self._land()
        return self.room_like(file).copy_(file)

    def settle(self) -> None:
        """Wait until all of it lies in files."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        file, pinned, event = self._under_way.popleft()
        event.synchronize()
        file.copy_(pinned)
        self._nbytes -= pinned.nbytes
