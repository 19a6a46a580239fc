"""The part `hang`: a rank that is stopped in the middle of a run, which the others must name within the limit they are given."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from autopar.cli.doctor import conclusion, read_flights
from benchmarks.gpu_report.machine import REHEARSED, Machine
from benchmarks.gpu_report.models import llama
from benchmarks.gpu_report.parts import Found

STOPPED, AT = 1, 7
"""The rank that stops, before its so manieth batch."""
NAMED = f"this run hangs: rank {STOPPED} no longer runs (stopped"
SLACK_S = 120.0
"""Seconds beyond the limit, in which the run starts, and torchrun ends ranks that do not hear it."""
DATA = f"""import os, pathlib, signal, time
import torch

def batches():
    for index in range(100_000):
        if (os.environ["RANK"], index) == ("{STOPPED}", {AT}):
            pathlib.Path(__file__).with_name("stopped_at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)
        ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(index))
        yield ids, ids.roll(1, 1)
"""


def measure(machine: Machine) -> Found:
    limit_s = 2 if machine.rehearsal else 20
    yield "stopped", staged(machine, limit_s)


def staged(machine: Machine, limit_s: int) -> dict[str, Any]:
    """A run of a saved program under torchrun, a rank of which stops."""
    ranks = machine.ranks
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        llama(REHEARSED, ranks).compiled(machine.described(ranks), mesh={"dp": ranks}, compiler="none").save(
            out / "program"
        )
        sizes = f"VOCAB, ROWS, SEQ = {REHEARSED.shape.vocab}, {ranks * REHEARSED.rows}, {REHEARSED.seq}\n"
        (out / "data.py").write_text(sizes + DATA)
        own = ["--run-dir", out / "run", "--steps", 100_000, "--hang", limit_s, "--timeout", 600]
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            out / "program" / "run.py",
        ]
        command += [*own, "--data", f"{out / 'data.py'}:batches"]
        said: list[str] = []
        named_at_s = 0.0
        with subprocess.Popen(
            [sys.executable, *map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ) as torchrun:  # fmt: skip
            assert torchrun.stdout is not None
            patience = threading.Timer(limit_s + SLACK_S, torchrun.terminate)
            patience.start()
            for line in torchrun.stdout:
                said.append(line)
                if NAMED in line and not named_at_s:
                    named_at_s = time.time()
            patience.cancel()
        stopped = out / "stopped_at"
        return {
            "limit_s": limit_s,
            "named": named_at_s > 0,
            "named_after_s": round(named_at_s - float(stopped.read_text()), 1) if named_at_s else None,
            "culprits": list(conclusion(read_flights(out / "run")).culprits) if (out / "run").exists() else [],
            "backend": machine.backend.transport.name,
            "said": "".join(said)[-4000:],
        }


def lines(record: dict[str, Any]) -> list[str]:
    one = record["stopped"]
    if not one["named"]:
        return [f"rank {STOPPED} stopped, and was not named under {one['backend']}; it said:", one["said"]]
    return [
        f"rank {STOPPED} was named {one['named_after_s']} s after it stopped (limit {one['limit_s']} s) under {one['backend']}; "
        f"autopar-doctor names {one['culprits']}"
    ]
