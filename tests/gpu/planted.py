"""Small programs for simulated GPUs, each right, and wrong in one way that the simulation has to find.

A line with a number behind it is one that the finding must name.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Body = Callable[[int, bool], object]
"""Runs as a rank, right or (True) wrong."""


@dataclass(frozen=True)
class Planted:
    """A program with a fault. kind: of the finding; lines: numbers of the marked lines."""

    body: Body
    kind: str
    ranks: int

    @property
    def lines(self) -> set[int]:
        text, first = inspect.getsourcelines(self.body)
        return {first + at for at, line in enumerate(text) if re.search(r"# [123]$", line.rstrip())}

    def __str__(self) -> str:
        return self.body.__name__.replace("_", " ")


PLANTED: list[Planted] = []


def planted(kind: str, ranks: int = 1) -> Callable[[Body], Body]:
    """Add a program to the table."""

    def add(body: Body) -> Body:
        PLANTED.append(Planted(body, kind, ranks))
        return body

    return add


_on_gpu = functools.partial(torch.zeros, device="cuda")
_on_host = functools.partial(torch.empty, pin_memory=True)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# ---- one rank: streams and events


@planted("race")
def a_side_stream_reads_what_main_still_writes(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), torch.empty(8, device="cuda")
    x.fill_(1.0)  # 1
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1  # 2
    torch.cuda.current_stream().wait_stream(side)
    return x, y


@planted("race")
def main_reads_a_result_of_a_side_stream_too_early(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    return x, x.sum()  # 2


@planted("race")
def an_event_is_recorded_before_what_it_stands_for(rank: int, wrong: bool) -> object:
    side, x, event = torch.cuda.Stream(), _on_gpu(8), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if wrong:
            event.record()
        x.mul_(2.0)  # 1
        if not wrong:
            event.record()
    torch.cuda.current_stream().wait_event(event)
    return x, x.sum()  # 2


@planted("race")
def an_event_is_recorded_on_another_stream(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
    event = (torch.cuda.current_stream() if wrong else side).record_event()
    torch.cuda.current_stream().wait_event(event)
    return x, x.sum()  # 2


@planted("race")
def an_event_that_was_never_recorded_is_waited_for(rank: int, wrong: bool) -> object:
    side, x, event = torch.cuda.Stream(), _on_gpu(8), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
        if not wrong:
            event.record()
    event.wait()
    return x, x.sum()  # 2


@planted("race")
def the_host_reads_a_copy_that_has_not_arrived(rank: int, wrong: bool) -> object:
    room = _on_host(8)
    room.copy_(_on_gpu(8), non_blocking=True)  # 1
    if not wrong:
        torch.cuda.synchronize()
    return room + 1  # 2


@planted("race")
def the_host_reads_what_a_side_stream_brings_after_it_waited_for_main(rank: int, wrong: bool) -> object:
    side, room, x = torch.cuda.Stream(), _on_host(8), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    x.record_stream(side)
    (torch.cuda.current_stream() if wrong else side).synchronize()
    return room.sum()  # 2


@planted("race")
def the_host_writes_over_what_is_still_being_copied(rank: int, wrong: bool) -> object:
    room, x = _on_host(8), torch.empty(8, device="cuda")
    room.zero_()
    x.copy_(room, non_blocking=True)  # 1
    if not wrong:
        torch.cuda.synchronize()
    room.fill_(1.0)  # 2
    return x


@planted("race")
def a_part_of_a_buffer_is_written_while_another_stream_reads_that_part(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x[:4] + 1  # 1
    (x[:4] if wrong else x[4:]).zero_()  # 2
    torch.cuda.current_stream().wait_stream(side)
    return y


@planted("early free")
def memory_is_given_back_while_a_side_stream_reads_it(rank: int, wrong: bool) -> object:
    side, room, x = torch.cuda.Stream(), _on_host(8), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    if not wrong:
        x.record_stream(side)
    del x  # 2
    return room, _on_gpu(8)  # 3


@planted("early free")
def memory_of_a_side_stream_is_given_back_while_main_reads_it(rank: int, wrong: bool) -> object:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = _on_gpu(8)
    torch.cuda.current_stream().wait_stream(side)
    y = x + 1  # 1
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    del x  # 2
    with torch.cuda.stream(side):
        return y, _on_gpu(8)  # 3


@planted("early free")
def the_wrong_stream_is_recorded(rank: int, wrong: bool) -> object:
    side, other, room, x = torch.cuda.Stream(), torch.cuda.Stream(), _on_host(8), _on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    x.record_stream(other if wrong else side)
    del x  # 2
    return room, _on_gpu(8)  # 3


@planted("early free")
def a_message_is_waited_for_by_another_stream_than_the_one_whose_memory_it_has(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), _on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    with torch.cuda.stream(side if wrong else torch.cuda.current_stream()):
        work.wait()
    del x  # 2
    return _on_gpu(8)  # 3


# ---- one rank: messages and their buffers


@planted("race", ranks=2)
def a_result_is_read_before_the_message_is_waited_for(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    if not wrong:
        work.wait()
    y = x + 1  # 2
    work.wait()
    return y


@planted("race", ranks=2)
def a_buffer_is_written_while_its_message_runs(rank: int, wrong: bool) -> object:
    x, out = _on_gpu(8), torch.empty(16, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # 1
    if not wrong:
        work.wait()
    x.zero_()  # 2
    work.wait()
    return out


@planted("race", ranks=2)
def a_received_tensor_is_read_too_early(rank: int, wrong: bool) -> object:
    x, y = _on_gpu(8), torch.empty(8, device="cuda")
    ends = [dist.P2POp(dist.isend, x, 1 - rank, _world()), dist.P2POp(dist.irecv, y, 1 - rank, _world())]
    (work,) = dist.batch_isend_irecv(ends)  # 1
    if not wrong:
        work.wait()
    z = y + 1  # 2
    work.wait()
    return z


@planted("race", ranks=2)
def messages_of_two_groups_share_a_buffer(rank: int, wrong: bool) -> object:
    other, x, out = dist.new_group([0, 1]), _on_gpu(8), torch.empty(16, device="cuda")
    first = dist.all_reduce(x, async_op=True)  # 1
    if not wrong:
        first.wait()
    second = dist.all_gather_into_tensor(out, x, group=other, async_op=True)  # 2
    first.wait()
    second.wait()
    return out


@planted("race", ranks=2)
def a_message_starts_on_a_stream_that_does_not_know_its_buffer(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), torch.empty(8, device="cuda")
    x.fill_(1.0)  # 1
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work = dist.all_reduce(x, async_op=True)  # 2
    work.wait()
    return x


@planted("never waited for", ranks=2)
def a_message_is_never_waited_for(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    if not wrong:
        work.wait()
    return x, work


@planted("dtype", ranks=2)
def sixteen_bit_integers_are_summed(rank: int, wrong: bool) -> object:
    x = _on_gpu(8, dtype=torch.int16 if wrong else torch.int32)
    dist.all_reduce(x)  # 1
    return x


@planted("layout", ranks=2)
def a_transposed_tensor_is_sent(rank: int, wrong: bool) -> object:
    x = torch.zeros(2, 4, device="cuda")
    x = x.t() if wrong else x
    dist.all_reduce(x)  # 1
    return x


@planted("layout", ranks=2)
def a_tensor_of_the_host_is_sent(rank: int, wrong: bool) -> object:
    x = torch.zeros(8, device="cpu" if wrong else "cuda")
    dist.all_reduce(x)  # 1
    return x


# ---- several ranks


@planted("order", ranks=2)
def collectives_are_started_in_another_order(rank: int, wrong: bool) -> object:
    x, out = _on_gpu(8), torch.empty(16, device="cuda")
    if wrong and rank:
        dist.all_gather_into_tensor(out, x)  # 1
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # 2
        dist.all_gather_into_tensor(out, x)
    return out


@planted("order", ranks=2)
def a_collective_is_missing_on_one_rank(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    dist.all_reduce(x)
    if not (wrong and rank):
        dist.all_reduce(x)  # 1
    return x


@planted("order", ranks=2)
def groups_are_made_in_another_order(rank: int, wrong: bool) -> object:
    groups = [[0], [0, 1], [1]]
    return [dist.new_group(group) for group in (groups[::-1] if wrong and rank else groups)]


@planted("signature", ranks=2)
def members_sum_other_sizes(rank: int, wrong: bool) -> object:
    x = _on_gpu(8 + (wrong and rank))
    dist.all_reduce(x)  # 1
    return x


@planted("signature", ranks=2)
def members_sum_other_dtypes(rank: int, wrong: bool) -> object:
    x = _on_gpu(8, dtype=torch.bfloat16 if wrong and rank else torch.float32)
    dist.all_reduce(x)  # 1
    return x


@planted("signature", ranks=2)
def members_reduce_in_other_ways(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    dist.all_reduce(x, dist.ReduceOp.MAX if wrong and rank else dist.ReduceOp.SUM)  # 1
    return x


@planted("signature", ranks=2)
def members_name_other_roots(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    dist.broadcast(x, rank if wrong else 0)  # 1
    return x


@planted("unmatched", ranks=2)
def a_message_is_never_received(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    if rank == 0:
        dist.send(x, 1)  # 1
    elif not wrong:
        dist.recv(x, 0)
    return x


@planted("unmatched", ranks=3)
def a_message_is_expected_from_the_wrong_rank(rank: int, wrong: bool) -> object:
    x = _on_gpu(8)
    if rank == 0:
        dist.send(x, 1)  # 1
    elif rank == 1:
        dist.recv(x, 2 if wrong else 0)  # 2
    return x


@planted("shape", ranks=2)
def two_sends_are_swapped(rank: int, wrong: bool) -> object:
    small, large = _on_gpu(4), _on_gpu(8)
    if rank == 0:
        for x in (large, small) if wrong else (small, large):
            dist.send(x, 1)  # 1
    else:
        dist.recv(small, 0)  # 2
        dist.recv(large, 0)
    return small, large


@planted("shape", ranks=2)
def a_message_is_received_in_another_dtype(rank: int, wrong: bool) -> object:
    x = _on_gpu(8, dtype=torch.bfloat16 if wrong and rank else torch.float32)
    if rank == 0:
        dist.send(x, 1)  # 1
    else:
        dist.recv(x, 0)  # 2
    return x


@planted("shape", ranks=2)
def an_exchange_expects_other_rows(rank: int, wrong: bool) -> object:
    rows = [1, 3] if rank == 0 else [2, 2]
    expected = [1, 2] if rank == 0 else [3, 2]
    if wrong and rank:
        expected = [2, 2]
    x, y = torch.zeros(4, 8, device="cuda"), torch.empty(sum(expected), 8, device="cuda")
    dist.all_to_all_single(y, x, expected, rows)  # 1
    return y


@planted("deadlock", ranks=2)
def both_ranks_receive_before_they_send(rank: int, wrong: bool) -> object:
    x, y = _on_gpu(8), torch.empty(8, device="cuda")
    if wrong or rank:
        dist.recv(y, 1 - rank)  # 1
        dist.send(x, 1 - rank)
    else:
        dist.send(x, 1 - rank)
        dist.recv(y, 1 - rank)
    return y


@planted("deadlock", ranks=2)
def groups_wait_for_each_other_in_a_circle(rank: int, wrong: bool) -> object:
    groups, x = [dist.new_group([0, 1]), dist.new_group([0, 1])], _on_gpu(8)
    for group in groups[::-1] if wrong and rank else groups:
        dist.all_reduce(x, group=group)  # 1
    return x


@planted("deadlock", ranks=2)
def groups_are_used_in_another_order_by_hosts_that_block(rank: int, wrong: bool) -> object:
    groups, xs = [dist.new_group([0, 1]), dist.new_group([0, 1])], [_on_gpu(8), _on_gpu(8)]
    pairs = list(zip(groups, xs, strict=True))
    works = []
    for group, x in pairs[::-1] if wrong and rank else pairs:
        works.append(dist.all_reduce(x, group=group, async_op=True))  # 1
    for work in works:
        work.wait()
    return xs


@planted("deadlock", ranks=3)
def three_ranks_receive_from_the_one_before(rank: int, wrong: bool) -> object:
    x, y = _on_gpu(8), torch.empty(8, device="cuda")
    ends = [dist.P2POp(dist.irecv, y, (rank - 1) % 3, _world()), dist.P2POp(dist.isend, x, (rank + 1) % 3, _world())]
    for batch in [[end] for end in ends] if wrong else [ends]:
        for work in dist.batch_isend_irecv(batch):  # 1
            work.wait()
    return y
