"""A rank whose messages move nothing: what the runtime does with bytes is played over tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autopar.ir.mesh import Extent, Mesh
from autopar.runtime.comm.calls import Call
from autopar.runtime.comm.comm import Axes, Comm


class MetaComm(Comm):
    """A rank, by default the last, whose collectives move nothing: buffers without data, of the right size. asked_index: whether
    anybody asked where it is along an axis."""

    asked_index = False

    def __init__(self, mesh: Mapping[str, int], rank: int | None = None, device: str = "meta") -> None:
        super().__init__(math.prod(mesh.values()) - 1 if rank is None else rank, mesh, device)

    def axis_index(self, axes: Axes) -> int:
        self.asked_index = True
        return super().axis_index(axes)

    def _block(self, size: int, axes: Axes) -> tuple[int, int]:
        """The longest block of a dim, as the compiler counts it."""
        longest = Mesh(tuple(self.mesh.items())).extent(size, self.group(axes).axes)
        return super()._block(size, axes) if not isinstance(longest, Extent) else (size - longest, size)

    def _start(self, call: Call) -> Callable[[], None]:
        def wait(held: Call = call) -> None:
            """Hold the buffers of the message, as the backend does, until it is waited for."""

        return wait

    def _post(self, messages: Any) -> Any:
        raise NotImplementedError

    def _part(self, mesh: Any, first_rank: int, inside: bool) -> Any:
        raise NotImplementedError

    def _tell(self, text: str) -> Any:
        raise NotImplementedError
