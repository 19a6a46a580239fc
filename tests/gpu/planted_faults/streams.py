"""Faults of one rank: streams, events, copies and memory that is given back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.planted_faults.table import on_gpu, on_host, planted


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
    side, x = torch.cuda.Stream(), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    return x, x.sum()  # 2


@planted("race")
def an_event_is_recorded_before_what_it_stands_for(rank: int, wrong: bool) -> object:
    side, x, event = torch.cuda.Stream(), on_gpu(8), torch.cuda.Event()
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
    side, x = torch.cuda.Stream(), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
    event = (torch.cuda.current_stream() if wrong else side).record_event()
    torch.cuda.current_stream().wait_event(event)
    return x, x.sum()  # 2


@planted("race")
def an_event_that_was_never_recorded_is_waited_for(rank: int, wrong: bool) -> object:
    side, x, event = torch.cuda.Stream(), on_gpu(8), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2.0)  # 1
        if not wrong:
            event.record()
    event.wait()
    return x, x.sum()  # 2


@planted("race")
def the_host_reads_a_copy_that_has_not_arrived(rank: int, wrong: bool) -> object:
    room = on_host(8)
    room.copy_(on_gpu(8), non_blocking=True)  # 1
    if not wrong:
        torch.cuda.synchronize()
    return room + 1  # 2


@planted("race")
def the_host_reads_what_a_side_stream_brings_after_it_waited_for_main(rank: int, wrong: bool) -> object:
    side, room, x = torch.cuda.Stream(), on_host(8), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    x.record_stream(side)
    (torch.cuda.current_stream() if wrong else side).synchronize()
    return room.sum()  # 2


@planted("race")
def the_host_writes_over_what_is_still_being_copied(rank: int, wrong: bool) -> object:
    room, x = on_host(8), torch.empty(8, device="cuda")
    room.zero_()
    x.copy_(room, non_blocking=True)  # 1
    if not wrong:
        torch.cuda.synchronize()
    room.fill_(1.0)  # 2
    return x


@planted("race")
def a_part_of_a_buffer_is_written_while_another_stream_reads_that_part(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x[:4] + 1  # 1
    (x[:4] if wrong else x[4:]).zero_()  # 2
    torch.cuda.current_stream().wait_stream(side)
    return y


@planted("early free")
def memory_is_given_back_while_a_side_stream_reads_it(rank: int, wrong: bool) -> object:
    side, room, x = torch.cuda.Stream(), on_host(8), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    if not wrong:
        x.record_stream(side)
    del x  # 2
    return room, on_gpu(8)  # 3


@planted("early free")
def memory_of_a_side_stream_is_given_back_while_main_reads_it(rank: int, wrong: bool) -> object:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = on_gpu(8)
    torch.cuda.current_stream().wait_stream(side)
    y = x + 1  # 1
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    del x  # 2
    with torch.cuda.stream(side):
        return y, on_gpu(8)  # 3


@planted("early free")
def the_wrong_stream_is_recorded(rank: int, wrong: bool) -> object:
    side, other, room, x = torch.cuda.Stream(), torch.cuda.Stream(), on_host(8), on_gpu(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        room.copy_(x, non_blocking=True)  # 1
    x.record_stream(other if wrong else side)
    del x  # 2
    return room, on_gpu(8)  # 3


@planted("early free")
def a_message_is_waited_for_by_another_stream_than_the_one_whose_memory_it_has(rank: int, wrong: bool) -> object:
    side, x = torch.cuda.Stream(), on_gpu(8)
    work = dist.all_reduce(x, async_op=True)  # 1
    with torch.cuda.stream(side if wrong else torch.cuda.current_stream()):
        work.wait()
    del x  # 2
    return on_gpu(8)  # 3


@planted("race")
def what_a_graph_reads_is_written_while_it_plays(rank: int, wrong: bool) -> object:
    side, x, graph = torch.cuda.Stream(), on_gpu(8), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1  # 1
    graph.replay()
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.zero_()  # 2
    torch.cuda.current_stream().wait_stream(side)
    return x, y
