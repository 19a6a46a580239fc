"""Faults of messages: their buffers, dtypes and layouts, and what ranks say to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.planted_faults.table import on_gpu, planted, world

# ---- one rank


@planted("race", ranks=2)
def a_result_is_read_before_the_message_is_waited_for(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    if not wrong:
        work.wait()
    y = x + 1  # 2
    work.wait()
    return y


@planted("race", ranks=2)
def a_buffer_is_written_while_its_message_runs(rank: int, wrong: bool) -> object:
    x, out = on_gpu(8), torch.empty(16, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # 1
    if not wrong:
        work.wait()
    x.zero_()  # 2
    work.wait()
    return out


@planted("race", ranks=2)
def a_received_tensor_is_read_too_early(rank: int, wrong: bool) -> object:
    x, y = on_gpu(8), torch.empty(8, device="cuda")
    ends = [dist.P2POp(dist.isend, x, 1 - rank, world()), dist.P2POp(dist.irecv, y, 1 - rank, world())]
    (work,) = dist.batch_isend_irecv(ends)  # 1
    if not wrong:
        work.wait()
    z = y + 1  # 2
    work.wait()
    return z


@planted("race", ranks=2)
def messages_of_two_groups_share_a_buffer(rank: int, wrong: bool) -> object:
    other, x, out = dist.new_group([0, 1]), on_gpu(8), torch.empty(16, device="cuda")
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
    x = on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    if not wrong:
        work.wait()
    return x, work


@planted("dtype", ranks=2)
def sixteen_bit_integers_are_summed(rank: int, wrong: bool) -> object:
    x = on_gpu(8, dtype=torch.int16 if wrong else torch.int32)
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
    x, out = on_gpu(8), torch.empty(16, device="cuda")
    if wrong and rank:
        dist.all_gather_into_tensor(out, x)  # 1
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # 2
        dist.all_gather_into_tensor(out, x)
    return out


@planted("order", ranks=2)
def a_collective_is_missing_on_one_rank(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
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
    x = on_gpu(8 + (wrong and rank))
    dist.all_reduce(x)  # 1
    return x


@planted("signature", ranks=2)
def members_sum_other_dtypes(rank: int, wrong: bool) -> object:
    x = on_gpu(8, dtype=torch.bfloat16 if wrong and rank else torch.float32)
    dist.all_reduce(x)  # 1
    return x


@planted("signature", ranks=2)
def members_reduce_in_other_ways(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
    dist.all_reduce(x, dist.ReduceOp.MAX if wrong and rank else dist.ReduceOp.SUM)  # 1
    return x


@planted("signature", ranks=2)
def members_name_other_roots(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
    dist.broadcast(x, rank if wrong else 0)  # 1
    return x


@planted("unmatched", ranks=2)
def a_message_is_never_received(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
    if rank == 0:
        dist.send(x, 1)  # 1
    elif not wrong:
        dist.recv(x, 0)
    return x


@planted("unmatched", ranks=3)
def a_message_is_expected_from_the_wrong_rank(rank: int, wrong: bool) -> object:
    x = on_gpu(8)
    if rank == 0:
        dist.send(x, 1)  # 1
    elif rank == 1:
        dist.recv(x, 2 if wrong else 0)  # 2
    return x


@planted("shape", ranks=2)
def two_sends_are_swapped(rank: int, wrong: bool) -> object:
    small, large = on_gpu(4), on_gpu(8)
    if rank == 0:
        for x in (large, small) if wrong else (small, large):
            dist.send(x, 1)  # 1
    else:
        dist.recv(small, 0)  # 2
        dist.recv(large, 0)
    return small, large


@planted("shape", ranks=2)
def a_message_is_received_in_another_dtype(rank: int, wrong: bool) -> object:
    x = on_gpu(8, dtype=torch.bfloat16 if wrong and rank else torch.float32)
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
    x, y = on_gpu(8), torch.empty(8, device="cuda")
    if wrong or rank:
        dist.recv(y, 1 - rank)  # 1
        dist.send(x, 1 - rank)
    else:
        dist.send(x, 1 - rank)
        dist.recv(y, 1 - rank)
    return y


@planted("deadlock", ranks=2)
def groups_wait_for_each_other_in_a_circle(rank: int, wrong: bool) -> object:
    groups, x = [dist.new_group([0, 1]), dist.new_group([0, 1])], on_gpu(8)
    for group in groups[::-1] if wrong and rank else groups:
        dist.all_reduce(x, group=group)  # 1
    return x


@planted("deadlock", ranks=2)
def groups_are_used_in_another_order_by_hosts_that_block(rank: int, wrong: bool) -> object:
    groups, xs = [dist.new_group([0, 1]), dist.new_group([0, 1])], [on_gpu(8), on_gpu(8)]
    pairs = list(zip(groups, xs, strict=True))
    works = []
    for group, x in pairs[::-1] if wrong and rank else pairs:
        works.append(dist.all_reduce(x, group=group, async_op=True))  # 1
    for work in works:
        work.wait()
    return xs


@planted("deadlock", ranks=3)
def three_ranks_receive_from_the_one_before(rank: int, wrong: bool) -> object:
    x, y = on_gpu(8), torch.empty(8, device="cuda")
    ends = [dist.P2POp(dist.irecv, y, (rank - 1) % 3, world()), dist.P2POp(dist.isend, x, (rank + 1) % 3, world())]
    for batch in [[end] for end in ends] if wrong else [ends]:
        for work in dist.batch_isend_irecv(batch):  # 1
            work.wait()
    return y
