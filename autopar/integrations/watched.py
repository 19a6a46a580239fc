"""A model in memory whose weights a program has: who writes to it, or freezes a part of it, means the training, and is told.

A program trains the weights that it took, and those parameters that had a gradient when it was captured. So a callback that
averages weights, prunes them or unfreezes layers would change nothing, without a word. torch counts the writes to a tensor in
`_version`, which is read here alone.
"""

from __future__ import annotations

from torch import nn

from autopar.errors import InputError


class Watched:
    """The parameters of a model, to be compared with what they were when they were last the program's."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._trained = [p.requires_grad for p in self._parameters.values()]
        self.settle()

    def settle(self) -> None:
        """Take the weights as they are now for those of the program."""
        self._writes = [p._version for p in self._parameters.values()]

    def check_trained(self) -> None:
        """Raises InputError where a parameter was frozen or unfrozen since the program was captured."""
        if self._trained != (now := [p.requires_grad for p in self._parameters.values()]):
            name = next(n for n, a, b in zip(self._parameters, self._trained, now, strict=True) if a != b)
            raise InputError(
                f"{name} was frozen or unfrozen after training began; which parameters a program trains is settled when it is "
                "captured: set requires_grad before, or start another training"
            )

    def check_written(self, way_out: str) -> None:
        """Raises InputError where somebody wrote to a parameter since. way_out: what to do about it."""
        if self._writes != (writes := [p._version for p in self._parameters.values()]):
            name = next(n for n, a, b in zip(self._parameters, self._writes, writes, strict=True) if a != b)
            raise InputError(
                f"{name} of the model in memory was written to, as a callback that averages or prunes weights does; the program "
                f"trains weights of its own: {way_out}"
            )
