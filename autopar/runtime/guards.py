"""Guards: what a program assumes of its data, checked while it runs.

A batch of other shapes, an index outside its table or a condition that goes another way than in the example would give
wrong numbers without a word. Shapes, dtypes and the ranges of integer inputs are checked at the entry of a step, before
any message is sent. Every rank is given the same global batch, so every rank finds the same violation by itself and
raises the same GuardError: nothing is exchanged for it. What is computed on the way is checked where it is computed, by
each rank on its own part; the rank that finds a violation raises, and the others end with it as with any rank that dies
(threads at once; processes when torchrun, or their own collective that names the dead rank, ends them).

Of tensors in host memory a violation is raised on the spot. Of tensors on a GPU it is written down by kernels beside the
step and read at the step's end, or as late as losses are, so that the host does not wait in the middle; until then an index that
may be used stands for the one that may not, since a kernel that reads outside its table ends the process's use of the GPU before
anything is read. Conditions of the data are told to all ranks before the update (kernels/overflow.py).
What a captured step (cuda_graphs.py) finds is written down for whoever plays it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm.backends import Arriving, backend_of
from .errors import GuardError, RuntimeProgramError


@dataclass(frozen=True)
class InputRange:
    """Integers that a batch input may hold: low to high - 1, and those of `also`. source: the line that relies on it."""

    input: int
    low: int
    high: int
    also: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class InputLike:
    """The demands on a batch input. dtypes: any of these."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    batch_dim: int | None = None


Say = Callable[[int | None, tuple[int, ...]], str]
"""The message for a value and its place in the tensor."""
Report = tuple[Tensor, tuple[int, ...], Say]
"""A violation that was computed for a tensor of this shape, and the message for it."""
Broken = tuple[Tensor, str]
"""Whether a condition is broken, an integer above 0 where it is, and the message then."""


class Guards:
    """The guards of one rank. late: steps that are done before what a step on a GPU wrote down is read."""

    def __init__(self) -> None:
        self.late = 0
        self._late: list[tuple[Arriving, tuple[int, ...], Say]] = []
        self._unread_steps: deque[list[tuple[Arriving, tuple[int, ...], Say]]] = deque()
        self._unread: list[Report] | None = None
        self._conditions: list[Broken] | None = None

    @property
    def captured(self) -> bool:
        """Whether the step that runs is to be played again, and `look` reads what it finds."""
        return self._unread is not None

    @contextmanager
    def conditions(self) -> Iterator[list[Broken]]:
        """Inside, conditions of the data are not looked at: whoever asks for them tells all ranks before the update."""
        self._conditions = conditions = list[Broken]()
        try:
            yield conditions
        finally:
            self._conditions = None

    @contextmanager
    def unread(self) -> Iterator[list[Report]]:
        """Inside, what guards of computed values find is not looked at: `look` does, whenever it was computed."""
        reports: list[Report] = []
        self._unread = reports
        try:
            yield reports
        finally:
            self._unread = None

    def look(self, reports: Sequence[Report]) -> None:
        """Raises GuardError for what was found, of a tensor on a GPU at the end of the step."""
        for report, shape, say in reports:
            found = Arriving([report])
            if found.late:
                self._late.append((found, shape, say))
            else:
                _raise_reported(report, shape, say)

    def check_batch(
        self,
        batch: Sequence[Tensor],
        inputs: Sequence[InputLike],
        ranges: Sequence[InputRange],
        whole: Sequence[InputLike] | None = None,
    ) -> list[Tensor]:
        """The batch, to be computed with. whole: the inputs of the global batch, where `inputs` are those of this rank's rows.
        Raises RuntimeProgramError for another number of tensors, GuardError for other shapes, dtypes and integers than the
        program is for."""
        if len(batch) != len(inputs):
            names = ", ".join(like.name for like in inputs)
            raise RuntimeProgramError(f"a batch of {len(batch)} tensors, the program takes {len(inputs)}: {names}")
        for leaf, like, of_all in zip(batch, inputs, inputs if whole is None else whole, strict=True):
            if tuple(leaf.shape) != like.shape:
                raise GuardError(_other_shape(tuple(leaf.shape), like, of_all))
            if leaf.dtype not in like.dtypes:
                raise GuardError(
                    f"input {like.name}: dtype {leaf.dtype}, the program takes {like.dtypes[0]}; convert it first, or compile "
                    "again with an example of that dtype"
                )
        batch = list(batch)
        for one in ranges:
            what = f"input {inputs[one.input].name}"
            batch[one.input] = self._range(batch[one.input], one.low, one.high, one.also, what, one.source)
        return batch

    def in_range(self, x: Tensor, low: int, high: int, source: str = "") -> Tensor:
        """x itself, whose integers must be low to high - 1."""
        return self._range(x, low, high, (), "a computed index (of this rank's part)", source)

    def expect(self, condition: Tensor, value: float, source: str = "") -> Tensor:
        """The condition itself, which must have the value that it had for the example."""

        def say(one: int | None, _: tuple[int, ...]) -> str:
            now = "not" if one is None or condition.dtype == torch.bool else str(one)
            return (
                f"{source}: this depends on the data and was {value} for the example batch, whose way the program takes; for "
                f"this batch it is {now}. Compile again with an example that goes this way, or write the branch with torch.where"
            )

        if condition.is_meta:
            return condition
        if self._conditions is not None and not self.captured:
            self._conditions.append((((condition != value).any().long()), say(None, ())))
        else:
            self._raise_where(condition != value, condition, say)
        return condition

    def end_step(self) -> None:
        """Raise what was written down in the step that is to be read now. Waits until the device has passed its last guard."""
        self._unread_steps.append(self._late)
        self._late = []
        self.settle(self.late)

    def settle(self, late: int = 0) -> None:
        """Raise what was written down in all steps but so many of the last ones."""
        while len(self._unread_steps) > late:
            for found, shape, say in self._unread_steps.popleft():
                _raise_reported(found.wait()[0], shape, say)

    def forget(self) -> None:
        """Steps that were not read were taken back."""
        self._unread_steps.clear()

    def _range(self, x: Tensor, low: int, high: int, also: Sequence[int], what: str, source: str) -> Tensor:
        """x; where a violation is told later, with `low` in the places of integers that may not be there."""
        if x.is_meta or not x.numel():
            return x

        def say(value: int | None, place: tuple[int, ...]) -> str:
            allowed = f"{low} to {high - 1}" + "".join(f", or {one}" for one in also)
            where = f" at {list(place)}" if place else ""
            return f"{what}: the value {value}{where} is out of range; {source or 'the program'} takes {allowed}"

        if backend_of(x.device).is_host and self._unread is None:
            least, most = torch.aminmax(x)
            if low <= int(least) and int(most) < high:
                return x
        bad = (x < low) | (x >= high)
        for one in also:
            bad &= x != one
        self._raise_where(bad, x, say)
        return torch.where(bad, low, x)

    def _raise_where(self, bad: Tensor, x: Tensor, say: Say) -> None:
        report = violation(bad, x), tuple(x.shape), say
        if self._unread is None:
            self.look([report])
        else:
            self._unread.append(report)


def _other_shape(shape: tuple[int, ...], like: InputLike, of_all: InputLike) -> str:
    """The message for a leaf that has not the shape that is wanted. of_all: the demands on the global batch's."""
    dim = like.batch_dim
    said = f"input {like.name}: shape {shape}, the program was compiled for the global shape {of_all.shape}"
    give = "pass global batches of that shape"
    if like.shape != of_all.shape:
        said += f", of which this rank takes {like.shape}"
        give = "pass this rank's rows alone, in the order of DataShard.indices"
    if dim is not None and dim < len(shape) < 1 + len(like.shape) and shape[dim] < like.shape[dim]:
        if (*shape[:dim], like.shape[dim], *shape[dim + 1 :]) == like.shape:
            give = (
                f"is this the last batch of an epoch, with {shape[dim]} of {like.shape[dim]} rows? Leave it out (drop_last=True "
                "of the DataLoader), compile with a bucket of that size (buckets=), fill it up with samples whose targets are "
                "ignored"
            )
    return f"{said}; {give}, or compile again with an example of the new one"


def violation(bad: Tensor, x: Tensor) -> Tensor:
    """Whether any element is bad, the number of the first in row-major order, and its value in x: three integers, of which
    the host need not know any."""
    flat = bad.reshape(-1)
    place = flat.to(torch.uint8).argmax().reshape(1)
    return torch.cat([flat.any().long().reshape(1), place, x.reshape(-1).gather(0, place).long()])


def _raise_reported(report: Tensor, shape: tuple[int, ...], say: Say) -> None:
    bad, place, value = report.tolist()
    if bad:
        raise GuardError(say(value, _unravel(place, shape)))


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element from its number in row-major order."""
    index = []
    for n in reversed(shape):
        index.append(place % n)
        place //= n
    return tuple(reversed(index))
