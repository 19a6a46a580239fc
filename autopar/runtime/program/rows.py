"""Rows of the global batch: which of them a rank computes with, so that it need not read the others.

A batch of 16 rows in two microbatches, on dp=2 × tp=2, rows shared over dp:

    rank            0 and 1 (dp=0)        2 and 3 (dp=1)
    microbatch 0    rows 0 to 3           rows 4 to 7
    microbatch 1    rows 8 to 11          rows 12 to 15

A rank takes its rows in the order of microbatches, 0, 1, 2, 3, 8, 9, 10, 11. Ranks along tp take the same ones. In a pipeline a
stage takes rows of the inputs that its lines read, and one in the middle none. Which axes share the rows the emitted stages say
(`row_axes` of their INPUTS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from math import gcd

from ..comm.mesh import interval, mesh_index
from ..errors import RuntimeProgramError
from .layout import TensorInfo
from .row_sampler import RowSampler
from .tables import Pipeline

Interval = tuple[int, int]


@dataclass(frozen=True)
class DataShard:
    """The rows of every global batch that one rank computes with.

    batch_rows: rows of the global batch. rows: half-open intervals of these, one for each microbatch, in the order in which the
    rank takes them; none on a rank that takes no data. inputs: names of the inputs that it takes. readers: the ranks that take
    the same rows of the same inputs, this one among them; all read them, and are compared. place: (index, replicas), where the
    ranks' rows are so many equal parts of the batch, whatever the stage, and None where they are not. buckets: the rows of
    batches of other sizes that the program takes, by the rows of the batch.
    """

    rank: int
    batch_rows: int
    rows: tuple[Interval, ...]
    inputs: tuple[str, ...] = ()
    readers: tuple[int, ...] = ()
    place: tuple[int, int] | None = field(default=None, repr=False)
    buckets: Mapping[int, tuple[Interval, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    def whole(batch_rows: int) -> DataShard:
        """All rows, as one device takes them."""
        return DataShard(0, batch_rows, ((0, batch_rows),), (), (0,), (0, 1))

    @property
    def indices(self) -> list[int]:
        """The rows in the order in which the rank takes them."""
        return _indices(self.rows)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The same as slices of the global batch, one for each microbatch."""
        return tuple(slice(start, stop) for start, stop in self.rows)

    @property
    def count(self) -> int:
        """The number of rows that the rank takes of a batch."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def reader(self) -> int:
        """The first of the ranks that take these rows, the one to read them where one reads for all. Raises
        RuntimeProgramError on a rank that takes none."""
        if not self.readers:
            raise RuntimeProgramError(f"rank {self.rank} takes no rows of the batch, so nobody reads them for it")
        return self.readers[0]

    @property
    def replicas(self) -> int:
        """In how many equal parts the ranks' rows are, as `num_replicas` of torch's DistributedSampler and `world_size` of
        datasets' split_dataset_by_node. Raises RuntimeProgramError where there are no such parts."""
        return self._place()[1]

    @property
    def index(self) -> int:
        """The part that this rank takes, as `rank` of torch's DistributedSampler. Raises RuntimeProgramError."""
        return self._place()[0]

    def sampler(
        self, dataset: Sized | int, *, shuffle: bool = True, seed: int = 0, start: int = 0, drop_last: bool = True
    ) -> RowSampler:
        """A batch sampler (`DataLoader(dataset, batch_sampler=…)`) that gives this rank its rows of every global batch. Row i of
        batch k of an epoch is sample k · batch_rows + i in the epoch's order, which depends on seed and epoch alone: so all ranks
        together read what one device reads with `DataShard.whole(batch_rows).sampler(…)`, on any number of ranks.

        dataset: or its length. start: global batches that were taken before, over all epochs. drop_last: leave out samples at the
        end of an epoch that fill no batch; False: they are a batch of their own, which the program must have a bucket for. Raises
        RuntimeProgramError."""
        rows = {self.batch_rows: self.indices} | {size: _indices(own) for size, own in self.buckets.items()}
        length = dataset if isinstance(dataset, int) else len(dataset)
        return RowSampler(length, self.batch_rows, rows, shuffle, seed, start, drop_last)

    def _place(self) -> tuple[int, int]:
        if not self.rows:
            raise RuntimeProgramError(f"rank {self.rank} takes no rows of the batch; it needs no data")
        if self.place is None:
            raise RuntimeProgramError(
                f"the {self.batch_rows} rows of a batch are no equal parts by rank (rank {self.rank} takes {self.count}, and "
                "others more or fewer, or stages cut them in other ways), so nothing can deal samples out by index and replicas; "
                "let shard.sampler(dataset, …) or shard.indices choose them"
            )
        return self.place


def _indices(rows: Sequence[Interval]) -> list[int]:
    return [row for start, stop in rows for row in range(start, stop)]


def data_shards(pipeline: Pipeline, buckets: Sequence[Pipeline] = ()) -> tuple[DataShard, ...]:
    """The rows of every rank of a program. buckets: the same program for batches of other shapes. Raises RuntimeProgramError
    where inputs disagree about them."""
    others = [data_shards(bucket) for bucket in buckets]
    total = batch_rows(pipeline)
    taken = [rank_rows(pipeline, rank) for rank in range(pipeline.world)]
    readers: dict[tuple[Interval | None, tuple[str, ...]], list[int]] = {}
    for rank, one in enumerate(taken):
        readers.setdefault(one, []).append(rank)
    step, parts = total // pipeline.microbatches, sorted({rows for rows, _ in taken if rows is not None})
    equal = [(i * step // len(parts), (i + 1) * step // len(parts)) for i in range(len(parts))]
    divides = parts == equal and step % len(parts) == 0 if parts else False
    shards = []
    for rank, (rows, names) in enumerate(taken):
        every = (
            ()
            if rows is None
            else tuple((m * step + rows[0], m * step + rows[1]) for m in range(pipeline.microbatches))
        )
        place = (parts.index(rows), len(parts)) if rows is not None and divides else None
        sizes = {of[rank].batch_rows: of[rank].rows for of in others if of[rank].batch_rows != total}
        shards.append(DataShard(rank, total, every, names, tuple(readers[rows, names]) if every else (), place, sizes))
    return tuple(shards)


def reader_groups(pipeline: Pipeline) -> tuple[int, ...]:
    """The number of each rank's group, whose ranks take the same rows of the same inputs."""
    numbers: dict[tuple[Interval | None, tuple[str, ...]], int] = {}
    return tuple(numbers.setdefault(rank_rows(pipeline, rank), len(numbers)) for rank in range(pipeline.world))


def batch_rows(pipeline: Pipeline) -> int:
    """The rows of a global batch: the common divisor of all inputs' batch dims, so that each has so many entries a row."""
    sizes = [like.shape[like.batch_dim] for like in pipeline.inputs if like.batch_dim is not None]
    if not sizes:
        raise RuntimeProgramError(
            "no input of this program has a batch dim, so there are no rows that ranks could share"
        )
    rows = min(sizes)
    if any(size % rows for size in sizes) or rows % pipeline.microbatches:
        rows = gcd(*sizes)
    return rows


def rank_rows(pipeline: Pipeline, rank: int) -> tuple[Interval | None, tuple[str, ...]]:
    """The rows of a microbatch that a rank takes for all its stages together, and the names of its inputs; None where its stages
    take no input."""
    size, rows, taken = batch_rows(pipeline) // pipeline.microbatches, list[Interval](), set[int]()
    for stage in pipeline.groups[pipeline.group_of(rank)]:
        mesh, first = pipeline.meshes[stage]
        position = mesh_index(mesh, rank - first)
        inputs = pipeline.tables(stage).inputs
        taken |= {info.index for info in inputs}
        rows += [input_rows(info, size, mesh, position) for info in inputs if info.batch_dim is not None]
    names = tuple(pipeline.inputs[index].name for index in sorted(taken))
    if not rows:  # of what has no batch dim everything is taken
        return ((0, size) if names else None), names
    return (min(start for start, _ in rows), max(stop for _, stop in rows)), names


def input_rows(info: TensorInfo, rows: int, mesh: Mapping[str, int], position: Mapping[str, int]) -> Interval:
    """The rows of a microbatch of so many that the rank at a position takes of an input. Raises RuntimeProgramError."""
    assert info.batch_dim is not None
    size = info.shape[info.batch_dim]
    held, entries = interval(size, info.row_axes, mesh, position), size // rows
    if held is None or held[0] % entries or held[1] % entries:
        raise RuntimeProgramError(
            f"input {info.name}: its {size} entries over {' × '.join(info.row_axes)} are no whole rows of the {rows} that a "
            "microbatch has; give every rank global batches"
        )
    return held[0] // entries, held[1] // entries
