"""Ranks as processes over torch.distributed: NCCL between GPUs, Gloo between CPUs.

Groups are created once, in the same order on every rank, one per set of mesh axes that is larger than one. torch sorts
the ranks of a group, so a group named in another axis order shares the process group and is addressed by member.

NCCL has every collective. Gloo's own reduce_scatter is an all_reduce and its all_gather copies everything once more;
both are built here from sends and receives that land in place: 2 to 3 times faster for large messages, and reductions
add in member order, as the threaded backend does. The same exchange does small all_reduces in one round trip.

When a collective fails or times out, ranks leave a note in the job's store, so that each error says what the other
ranks of the group were doing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .comm import REDUCTIONS, Call, Comm, Group, group_ranks
from .errors import CollectiveMismatch, CollectiveTimeout, RuntimeProgramError
from .grads import BufferPool

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OPS = tuple(REDUCE_OPS)
EXCHANGE_BYTES = 1 << 17
USER_TAG = 1 << 28
# torch 2.13 renamed these two.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
REPORT_WAIT_S = 3.0


class TorchComm(Comm):
    """One rank of an initialized default process group whose size is the mesh's."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        *,
        store: dist.Store | None = None,
        check: bool = False,
    ) -> None:
        """store: where failing ranks leave notes for each other. check: compare every collective before it starts,
        so that a mismatch is an error instead of a timeout (slow, for debugging)."""
        size = dist.get_world_size()
        wanted = 1
        for count in mesh.values():
            wanted *= count
        if size != wanted:
            raise RuntimeProgramError(f"the program needs {wanted} ranks ({dict(mesh)}), the process group has {size}")
        backend = dist.get_backend()
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        super().__init__(dist.get_rank(), mesh, device)
        self.gloo = backend == "gloo"
        self.timeout_s = timeout_s
        self._store = store
        self._check = check
        self._pool = BufferPool()
        self._counts: dict[frozenset[str], int] = {}
        self._last: tuple[Any, ...] = ()
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._process_groups = self._make_groups(timedelta(seconds=timeout_s))

    def _make_groups(self, timeout: timedelta) -> dict[frozenset[str], Any]:
        """One process group per set of axes, for the instance of it that this rank is in."""
        axes = [axis for axis, size in self.mesh.items() if size > 1]
        groups: dict[frozenset[str], Any] = {}
        for count in range(1, len(axes) + 1):
            for names in itertools.combinations(axes, count):
                instances = dict.fromkeys(group_ranks(self.mesh, rank, names) for rank in range(self.world_size))
                mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in instances], timeout=timeout)
                groups[frozenset(names)] = mine
        return groups

    def device_mesh(self, order: tuple[str, ...]) -> DeviceMesh:
        """torch's mesh of all ranks with the axes in this order. Collective on first use, cached after."""
        found = self._device_meshes.get(order)
        if found is None:
            axes = list(self.mesh)
            ranks = torch.arange(self.world_size).reshape([self.mesh[axis] for axis in axes])
            ranks = ranks.permute([axes.index(axis) for axis in order]).contiguous()
            found = self._device_meshes[order] = DeviceMesh(self.device.type, ranks, mesh_dim_names=order)
        return found

    # ---- collectives

    def _start(self, call: Call) -> Callable[[], None]:
        key = frozenset(call.group.axes)
        number = self._counts[key] = self._counts.get(key, -1) + 1
        self._last = (number, call.group, call.kind, call.site)
        try:
            if self._check:
                self._compare(call, number)
            wait = self._start_gloo(call, number) if self.gloo else self._start_nccl(call)
        except RuntimeError as error:
            raise self._explain(error, call.describe(), call.group, number) from error

        def guarded() -> None:
            try:
                wait()
            except RuntimeError as error:
                raise self._explain(error, call.describe(), call.group, number) from error

        return guarded

    def _order(self, group: Group) -> Tensor | None:
        """member -> its place among the sorted ranks, when the two orders differ."""
        if list(group.ranks) == sorted(group.ranks):
            return None
        place = {rank: index for index, rank in enumerate(sorted(group.ranks))}
        return torch.tensor([place[rank] for rank in group.ranks], device=self.device)

    def _start_nccl(self, call: Call) -> Callable[[], None]:
        return self._start_native(call).wait if self._order(call.group) is None else self._start_reordered(call)

    def _start_native(self, call: Call) -> Any:
        group = self._process_groups[frozenset(call.group.axes)]
        op = REDUCE_OPS[call.op]
        if call.kind == "all_reduce":
            if call.out is not call.inp:
                call.out.copy_(call.inp)
            return dist.all_reduce(call.out, op, group=group, async_op=True)
        if call.kind == "all_gather":
            return ALL_GATHER(call.out.view(-1), call.inp.view(-1), group=group, async_op=True)
        if call.kind == "reduce_scatter":
            return REDUCE_SCATTER(call.out.view(-1), call.inp.view(-1), op, group=group, async_op=True)
        if call.kind == "all_to_all":
            return dist.all_to_all_single(call.out, call.inp, group=group, async_op=True)
        if call.kind == "broadcast":
            if call.group.index == call.root:
                call.out.copy_(call.inp)
            return dist.broadcast(call.out, call.group.ranks[call.root], group=group, async_op=True)
        raise RuntimeProgramError(f"unknown collective {call.kind!r}")

    def _start_reordered(self, call: Call) -> Callable[[], None]:
        """Members named in another order than their ranks: permute rows before or after."""
        order = self._order(call.group)
        assert order is not None
        back = torch.argsort(order)
        inp, out = call.inp, call.out
        if call.kind in ("reduce_scatter", "all_to_all"):
            inp = inp[back]
        if call.kind in ("all_gather", "all_to_all"):
            out = torch.empty_like(out)
        work = self._start_native(Call(call.kind, call.group, out, inp, call.op, call.root, call.site))

        def wait() -> None:
            work.wait()
            if out is not call.out:
                call.out.copy_(out[order])

        return wait

    def _start_gloo(self, call: Call, number: int) -> Callable[[], None]:
        nbytes = call.inp.numel() * call.inp.element_size()
        n, me = call.group.size, call.group.index
        if call.kind == "all_reduce" and (nbytes * (n - 1) <= EXCHANGE_BYTES or not _gloo_reduces(call.inp.dtype)):
            rows = self._pool.take(n * call.inp.numel(), call.inp)
            received = rows.view(n, -1)
            source = call.inp.reshape(-1)
            wait_rows = self._exchange(call, number, received, lambda _: source)

            def finish_small() -> None:
                wait_rows()
                parts = [source if member == me else received[member] for member in range(n)]
                if call.out is call.inp:
                    parts[me] = received[me].copy_(source)
                _reduce(parts, call.op, call.out.view(-1))
                self._pool.give(rows)

            return finish_small
        if call.kind == "all_gather":
            row = call.out[me]
            if row.data_ptr() != call.inp.data_ptr():
                row.copy_(call.inp)
            return self._exchange(call, number, call.out, lambda _: row)
        if call.kind == "reduce_scatter":
            scratch = self._pool.take(call.inp.numel(), call.inp)
            arrived = scratch.view(call.inp.shape)
            wait_chunks = self._exchange(call, number, arrived, lambda member: call.inp[member])

            def finish_scatter() -> None:
                wait_chunks()
                _reduce([call.inp[m] if m == me else arrived[m] for m in range(n)], call.op, call.out)
                self._pool.give(scratch)

            return finish_scatter
        if call.kind == "all_to_all":
            call.out[me].copy_(call.inp[me])
            return self._exchange(call, number, call.out, lambda member: call.inp[member])
        return self._start_native(call).wait

    def _exchange(self, call: Call, number: int, rows: Tensor, outgoing: Callable[[int], Tensor]) -> Callable[[], None]:
        """Send outgoing(member) to every other member, receive theirs in rows[member].

        The tag says which call this is, so that different collectives never take each other's bytes.
        """
        group = call.group
        process_group = self._process_groups[frozenset(group.axes)]
        tag = (
            (number & 0xFFFF) << 12 | (call.inp.numel() & 0xFF) << 4 | KINDS.index(call.kind) << 2 | OPS.index(call.op)
        )
        works, kept = [], []
        for distance in range(1, group.size):
            source = (group.index - distance) % group.size
            target = (group.index + distance) % group.size
            works.append(dist.irecv(rows[source], group.ranks[source], group=process_group, tag=tag))
            kept.append(outgoing(target))
            works.append(dist.isend(kept[-1], group.ranks[target], group=process_group, tag=tag))

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            kept.clear()

        return wait

    # ---- point to point

    def send(self, x: Tensor, peer_rank: int, tag: int = 0, site: str = "") -> None:
        what = f"send to rank {peer_rank}, tag {tag}" + (f" at {site}" if site else "")
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        message = x.detach().clone(memory_format=torch.contiguous_format)
        try:
            self._sent.append((dist.isend(message, peer_rank, tag=USER_TAG + tag), message))
        except RuntimeError as error:
            raise self._explain(error, what, None, 0) from error

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, peer_rank: int, tag: int = 0, site: str = "") -> Tensor:
        what = f"recv from rank {peer_rank}, tag {tag}" + (f" at {site}" if site else "")
        out = torch.empty(shape, dtype=dtype, device=self.device)
        try:
            dist.recv(out, peer_rank, tag=USER_TAG + tag)
        except RuntimeError as error:
            raise self._explain(error, what, None, 0) from error
        return out

    # ---- when things go wrong

    def _compare(self, call: Call, number: int) -> None:
        """Every member's description of the call, exchanged through its process group."""
        group = self._process_groups[frozenset(call.group.axes)]
        mine = (str(call.signature()), list(call.group.ranks), call.describe())
        everyone: list[Any] = [None] * call.group.size
        dist.all_gather_object(everyone, mine, group=group)
        for rank, (signature, ranks, description) in zip(sorted(call.group.ranks), everyone, strict=True):
            if signature != mine[0] or ranks != mine[1]:
                raise CollectiveMismatch(
                    f"collective #{number} over {call.group}: rank {self.rank} calls {call.describe()}, "
                    f"rank {rank} calls {description} over ranks {ranks}"
                )

    def _explain(self, error: RuntimeError, what: str, group: Group | None, number: int) -> RuntimeError:
        if isinstance(error, RuntimeProgramError):
            return error
        where = f"#{number} over {group}: {what}" if group is not None else what
        first = str(error).splitlines()[0]
        self.leave_note(f"failed in {where}")
        others = self._notes_of_others(group.ranks if group is not None else range(self.world_size))
        text = f"{self.describe_rank()}: {where} failed: {first}" + "".join(f"; {note}" for note in others)
        late = "timed out" in first.lower() or "timeout" in first.lower()
        return CollectiveTimeout(text) if late else RuntimeProgramError(text)

    def leave_note(self, what: str) -> None:
        """Tell the other ranks what this one was doing when it failed. Only the first note of a rank counts."""
        if self._store is not None:
            try:
                self._store.compare_set(f"autopar/note/{self.rank}", "", what + self._last_call())
            except RuntimeError:
                self._store = None

    def _last_call(self) -> str:
        if not self._last:
            return ""
        number, group, kind, site = self._last
        return f" (last collective: #{number} over {group}, {kind}" + (f" at {site})" if site else ")")

    def _notes_of_others(self, ranks: Any) -> list[str]:
        if self._store is None:
            return []
        notes, waiting = [], [rank for rank in ranks if rank != self.rank]
        end = time.monotonic() + min(REPORT_WAIT_S, self.timeout_s)
        while waiting and time.monotonic() < end:
            try:
                ready = [rank for rank in waiting if self._store.check([f"autopar/note/{rank}"])]
                for rank in ready:
                    notes.append(f"rank {rank} {self._store.get(f'autopar/note/{rank}').decode()}")
                    waiting.remove(rank)
            except RuntimeError:
                break
            if waiting:
                time.sleep(0.05)
        return notes + [f"rank {rank} said nothing" for rank in waiting]


def _gloo_reduces(dtype: torch.dtype) -> bool:
    return dtype not in (torch.int16,)


@torch.no_grad()
def _reduce(parts: list[Tensor], op: str, out: Tensor) -> None:
    """parts[0] op parts[1] op … in this order; out must be none of the parts."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if op == "sum":
        torch.add(parts[0], parts[1], out=out)
    else:
        REDUCTIONS[op](out.copy_(parts[0]), parts[1])
    for part in parts[2:]:
        REDUCTIONS[op](out, part)
