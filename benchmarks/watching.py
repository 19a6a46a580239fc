"""The price of watching and saving a run: the demo's GPT on processes over Gloo, as one JSON object.

    python benchmarks/watching.py [--steps 160] [--ranks 2]

*Watched*: what a rank notes of every message and step (flight.py, message_order.py), its beats, and the comparing of batches as
often as the program itself found it cheap (same_data.py), are far below the noise of a step. So each is timed alone, in CPU
seconds, and multiplied by how often it happens in a second of training. *Saved*: blocks of ten steps, in turns with a step being
written beside them and without; what counts is the time of the blocks, with the wait for the files. Beside it: for how long
training stands still, and a rank's CPU time of a save.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.demo import TEXT, demo_program  # noqa: E402
from benchmarks.harness import measure_saved  # noqa: E402

REPEATS, BLOCK, BEAT_S = 2000, 10, 1.0


def cpu_s(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    """CPU seconds of an action, this thread's."""
    started = time.thread_time()
    for _ in range(repeats):
        action()
    return (time.thread_time() - started) / repeats


def measure(directory: Path, steps: int, warmup: int) -> dict[str, Any]:
    """One rank."""
    import autopar
    from autopar.runtime.checkpoint.run_directory import RunDirectory
    from autopar.runtime.checkpoint.saver import Saver
    from autopar.runtime.comm.process import TorchComm
    from autopar.runtime.health.observed_time import TICK_S
    from autopar.runtime.health.watch import Watch

    program = autopar.load(directory / "program")
    session = program.session
    batches = [TEXT.batch(n) for n in range(BLOCK)]
    for n in range(warmup):
        program(batches[n % BLOCK])
    assert isinstance(session.comm, TorchComm)
    flight = session.comm.flight
    before = sum(flight.started.values())
    program(batches[0])
    messages = sum(flight.started.values()) - before

    with tempfile.TemporaryDirectory() as folder:
        (folder,) = session.comm.share(folder)[:1]
        run = RunDirectory(Path(folder) / "run", keep=1)
        if dist.get_rank() == 0:
            run.prepare(0)
        dist.barrier()
        saver = Saver(run, session, 0, "", 60.0)
        times: dict[bool, list[float]] = {True: [], False: []}
        cpu: dict[bool, list[float]] = {True: [], False: []}
        blocked: list[float] = []
        for block in range(max(2, steps // BLOCK)):
            saves = block % 4 in (1, 2)
            dist.barrier()
            started, started_cpu = time.perf_counter(), time.process_time()
            if saves:
                saver.start(session.rt.step, 0)
                blocked.append(time.perf_counter() - started)
            for batch in batches:
                program(batch)
            saver.finish()
            dist.barrier()
            times[saves].append(time.perf_counter() - started)
            cpu[saves].append(time.process_time() - started_cpu)
        assert not saver.problem
    step_s = statistics.median(times[False]) / BLOCK

    group, signature = next(iter(flight.started)), ("all_reduce", "sum", 0, (8, 128), torch.float32, "layers.0")
    guard, watch = threading.Event(), Watch(flight, directory, 60.0, 600.0, print)
    store = dist.PrefixStore("beats", dist.distributed_c10d._get_default_store())

    def note() -> None:
        entry = flight.start(0, group, (0, 1), signature, signature.__str__)
        flight.wait(entry)
        flight.end(entry)

    def beat() -> None:
        store.check(["ask"])
        store.set("beat", json.dumps(asdict(flight.beat())))
        json.loads(store.get("beat"))

    def tick() -> None:
        guard.wait(0.0)
        watch.tick()

    note_s, step_note_s, beat_s = cpu_s(note), cpu_s(flight.end_step), cpu_s(beat, 200)
    compared = session.same_data
    assert compared is not None
    apart, leaves = compared.apart, program.leaves(batches[0])

    def take(apart: int) -> None:
        compared.apart = apart
        compared.take(leaves, session.rt.step)

    asked_s, read_s = cpu_s(lambda: take(1), 200), cpu_s(lambda: take(1 << 30), 200)
    compare_s = (asked_s + (apart - 1) * read_s) / apart
    watched_s = messages * note_s + step_note_s + compare_s + (beat_s / BEAT_S + cpu_s(tick) / TICK_S) * step_s
    return {
        "benchmark": "watching",
        "ranks": dist.get_world_size(),
        "step_ms": round(1e3 * step_s, 2),
        "messages_a_step": messages,
        "note_us": round(1e6 * note_s, 2),
        "beat_us": round(1e6 * beat_s, 1),
        "batches_compared_every": apart,
        "compare_us": round(1e6 * asked_s, 1),
        "read_us": round(1e6 * read_s, 1),
        "compared_share_of_step": round(compare_s / step_s, 6),
        "watched_share_of_step": round(watched_s / step_s, 5),
        "state_mb": round(
            sum(e.value.nbytes for e in session.state_entries().values() if hasattr(e.value, "nbytes")) / 1e6, 2
        ),
        "save_blocks_ms": round(1e3 * statistics.median(blocked), 2),
        "save_first_blocks_ms": round(1e3 * blocked[0], 1),
        "save_cpu_ms": round(1e3 * (statistics.median(cpu[True]) - statistics.median(cpu[False])), 1),
        "saved_every_10": round(statistics.median(times[True]) / statistics.median(times[False]), 4),
        "saved_every_10_mean": round(statistics.mean(times[True]) / statistics.mean(times[False]), 4),
    }


def compile_programs(directory: Path, ranks: int) -> None:
    """Writes the demo's program, tensor parallel: with many messages a step."""
    demo_program(ranks, mesh={"tp": ranks}, strategy="megatron").save(directory / "program")


def main() -> None:
    measure_saved(__doc__, __file__, compile_programs, measure, steps=160, warmup=5)


if __name__ == "__main__":
    main()
