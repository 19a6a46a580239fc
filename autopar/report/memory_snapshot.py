"""The predicted life of a rank's tensors as a memory snapshot of torch: a pickle that pytorch.org/memory_viz shows.

The form is that of `torch.cuda.memory._snapshot()`: a trace of "alloc" and "free_completed" events with address, size and frames,
and the segments with what is alive in the end. Every block has the line of the model that it comes from as a frame, and the
emitted file in which it is made. The events are the memory model's own (`autopar.passes.memory.life`), so the most that they
have alive at once is the peak that is predicted for the rank.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.capture.source_lines import place_in
from autopar.compiled import Compiled
from autopar.errors import EmitError
from autopar.passes.account.stage import probe_of
from autopar.passes.memory.life import Block, Change, life_of_group
from autopar.passes.price.pricer import Pricers

BASE = 1 << 40
"""The address of the first block."""
STREAM = 0


def rank_life(program: Compiled, rank: int) -> list[Change]:
    """All that a rank makes and frees in a step, in order; one with the longest blocks, where ranks have blocks of unequal size.
    Raises InputError for a rank that there is not."""
    g, pricers = program.group_of(rank), Pricers(program.cluster)
    group, row = program.lowered.graph.groups[g], program.lowered.table[g]
    probes = {s: probe_of(pricers[program.stages[s].mesh]) for s in group}
    memories = [stage.memory for stage in program.account.stages]
    return life_of_group(group, row, program.stages, memories, program.setting, probes, program.pp)


def memory_snapshot(program: Compiled, rank: int) -> dict[str, Any]:
    """The snapshot of a rank over one step, as plain data. Raises InputError for a rank that there is not."""
    changes = rank_life(program, rank)
    addresses, end = _addresses(changes)
    times_us = _times_us(program, changes, rank)
    events = [
        {
            "action": "alloc" if change.is_made else "free_completed",
            "addr": addresses[change.block.number],
            "size": change.block.nbytes,
            "stream": STREAM,
            "time_us": time_us,
            "frames": _frames(change.block),
        }
        for change, time_us in zip(changes, times_us, strict=True)
    ]
    freed = {change.block.number for change in changes if not change.is_made}
    alive = [change.block for change in changes if change.is_made and change.block.number not in freed]
    return {
        "segments": [_segment(alive, addresses, end)],
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write_memory_snapshot(program: Compiled, path: str | Path, rank: int) -> Path:
    """Write the snapshot of a rank. Raises InputError for a rank that there is not, EmitError where it cannot be written."""
    path, data = Path(path), pickle.dumps(memory_snapshot(program, rank))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise EmitError(f"cannot write {path}: {error.strerror}") from error
    return path


def _addresses(changes: Sequence[Change]) -> tuple[dict[int, int], int]:
    """The address of every block: that of one of its size that was freed, or a new one; and the end of all."""
    addresses, free, end = dict[int, int](), dict[int, list[int]](), BASE
    for change in changes:
        block = change.block
        if not change.is_made:
            free.setdefault(block.nbytes, []).append(addresses[block.number])
        elif places := free.get(block.nbytes):
            addresses[block.number] = places.pop()
        else:
            addresses[block.number] = end
            end += block.nbytes
    return addresses, end


def _segment(alive: Sequence[Block], addresses: dict[int, int], end: int) -> dict[str, Any]:
    """One segment from the first address to the last, with what is alive in the end, and what is between."""
    blocks: list[dict[str, Any]] = []
    place = BASE

    def gap_to(address: int) -> None:
        if address > place:
            blocks.append({"address": place, "size": address - place, "requested_size": 0, "state": "inactive"})
            blocks[-1]["frames"] = []

    for block in sorted(alive, key=lambda one: addresses[one.number]):
        address = addresses[block.number]
        gap_to(address)
        own = {"address": address, "size": block.nbytes, "requested_size": block.nbytes, "state": "active_allocated"}
        blocks.append({**own, "frames": _frames(block)})
        place = address + block.nbytes
    gap_to(end)
    used = sum(block.nbytes for block in alive)
    return {
        "device": 0,
        "address": BASE,
        "total_size": end - BASE,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _frames(block: Block) -> list[dict[str, Any]]:
    """The frames of a block, innermost first: what it is, at its line of the model where that is known, and the action of the
    emitted stage."""
    file = f"stages/stage_{block.stage}.py"
    filename, line = place_in(block.source) or (file, 0)
    frames = [{"name": block.name, "filename": filename, "line": line}]
    if block.source:
        frames.append({"name": block.source, "filename": file, "line": 0})
    action = "rests" if block.action is None else str(block.action)
    return [*frames, {"name": f"stage {block.stage}: {action}", "filename": file, "line": 0}]


def _times_us(program: Compiled, changes: Sequence[Change], rank: int) -> list[int]:
    """Microseconds of the step at which changes come: those of an action spread over it."""
    g = program.group_of(rank)
    spans = {
        event.action: (event.start_s, event.end_s)
        for event in program.account.timeline.events
        if event.group == g and event.action is not None
    }
    step_s = program.decision.predicted.step_time_s
    firsts = [i for i, c in enumerate(changes) if i == 0 or c.during != changes[i - 1].during]
    times, now = list[int](), 0
    for i, change in enumerate(changes):
        k = bisect_right(firsts, i) - 1
        first, last = firsts[k], firsts[k + 1] if k + 1 < len(firsts) else len(changes)
        rests = (0.0, 0.0) if k == 0 else (step_s, step_s)
        start_s, end_s = spans.get(change.during, rests) if change.during is not None else rests
        now = max(now, round(1e6 * (start_s + (end_s - start_s) * (i - first) / max(last - first, 1))))
        times.append(now)
    return times
