"""Which sample of an epoch is which row of which global batch, and the sampler that gives a rank those of its rows.

    order(epoch)    0 … length - 1, or a permutation that is drawn from (seed, epoch)
    batch k of it   samples order[k · N] … order[k · N + N - 1] are rows 0 … N - 1

Nothing here depends on the number of ranks, so a run goes on from a batch's number wherever it is continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..errors import RuntimeProgramError


class RowSampler(Sampler[list[int]]):
    """Lists of samples, one for each global batch. Iterating goes to the end of the epoch that the next batch is in; iterating
    again goes on with the epoch after it."""

    def __init__(
        self,
        length: int,
        batch_rows: int,
        rows: Mapping[int, Sequence[int]],
        shuffle: bool,
        seed: int,
        start: int,
        drop_last: bool,
    ) -> None:
        """length: samples of an epoch; rows: this rank's, by the rows that a global batch has; start: batches taken before.
        Raises RuntimeProgramError where an epoch has no batch, or a last one that the program does not take."""
        self._length, self._batch_rows, self._rows = length, batch_rows, rows
        self._shuffle, self._seed, self._next = shuffle, seed, start
        rest = length % batch_rows
        if length < batch_rows and (drop_last or rest not in rows):
            raise RuntimeProgramError(
                f"the dataset has {length} samples and a global batch {batch_rows} rows, so an epoch has no batch; give it more "
                "samples, or compile for a smaller batch"
            )
        if rest and not drop_last and rest not in rows:
            raise RuntimeProgramError(odd_last_batch(rest, batch_rows, f"of the dataset's {length} samples"))
        self._batches = length // batch_rows + (rest > 0 and not drop_last)

    def __len__(self) -> int:
        return self._batches - self._next % self._batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self._next, self._batches)
        order = epoch_order(self._length, self._seed, epoch) if self._shuffle else None
        for batch in range(first, self._batches):
            begin = batch * self._batch_rows
            size = min(self._batch_rows, self._length - begin)
            samples = begin + torch.tensor(self._rows[size], dtype=torch.int64)
            own: list[int] = (samples if order is None else order[samples]).tolist()
            yield own
        self._next = (epoch + 1) * self._batches


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """An epoch's samples, shuffled: (length,) of int64, the same on every rank."""
    make = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(length, generator=make)


def odd_last_batch(rest: int, rows: int, what: str) -> str:
    """The message for a last batch that is smaller than the others."""
    return (
        f"{what} {rest} are left over at the end, and the program takes batches of {rows} rows: leave them out "
        f"(drop_last=True), compile with a bucket of that size (buckets={{input: {{batch dim: ({rows}, {rest})}}}}), or fill "
        f"them up to "
        f"{rows} with samples whose targets are ignored"
    )
