"""Rows that move to faster ranks, measured: three ranks over Gloo, of which one has a third of a core of the others.

    python benchmarks/rebalance.py [--how cgroup] [--share 0.36] [--steps 20]

*Together* are the rows per second that the ranks train alone, each with its own copy of the model and at once, added up.
Equal shares and moved ones are parts of that. Then a second rank is slowed in the middle: after how many steps rows have
moved, and what is reached again. Cores are shared out by control groups (`--how cgroup`, as root), each rank having
`--share` of a core and one of them a third of that; or ranks sleep for every row instead (`--how delay`), which shows the
mechanism and nothing of cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import as_worker, command_line, print_json, run_workers  # noqa: E402

RANKS, WIDTH, DEPTH = 3, 256, 4
ROWS = {"cgroup": 26880, "delay": 840}
SETTLE = 12
"""Steps after a move, in which rows may move again."""
ROW_S = 3e-4
"""Seconds that a rank sleeps for a row, where it does."""
GROUPS, LEAST_QUOTA_US = Path("/sys/fs/cgroup/cpu"), 1000


class Core:
    """A rank's part of a core. share: of a core, by control group; row_s: that it sleeps for a row (0: it does not)."""

    def __init__(self, how: str) -> None:
        self._folder = GROUPS / f"autopar_rebalance_{os.getpid()}" if how == "cgroup" else None
        self.row_s = 0.0
        if self._folder is not None:
            self._folder.mkdir()
            (self._folder / "cpu.shares").write_text("16384")  # before whatever else the machine does, up to its quota

    def set(self, share: float) -> None:
        """From now on this process has so much of a core."""
        if self._folder is None:
            self.row_s = ROW_S / share
            return
        (self._folder / "cpu.cfs_quota_us").write_text("-1")
        (self._folder / "cpu.cfs_period_us").write_text(
            str(int(LEAST_QUOTA_US / share))
        )  # short, so that messages are taken soon
        (self._folder / "cpu.cfs_quota_us").write_text(str(LEAST_QUOTA_US))
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def release(self) -> None:
        if self._folder is not None:
            (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            self._folder.rmdir()


def model() -> nn.Module:
    layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*layers)


def batch(rows: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, WIDTH, generator=draw) for _ in range(2))


def compiled(rows: int) -> Any:
    import autopar

    torch.manual_seed(0)
    cluster, options = autopar.ClusterSpec.local(RANKS), autopar.Options(rebalance=True, strategy="dp", microbatches=1)
    sgd, loss = torch.optim.SGD, nn.functional.mse_loss
    return autopar.compile(model(), cluster, batch(rows), loss_fn=loss, optimizer=sgd, options=options)


def alone_rows_s(core: Core, rows: int, steps: int) -> float:
    """Rows per second that this rank trains alone, so many in a step; the first steps warm up."""
    own, (x, y) = model(), batch(rows)
    optimizer = torch.optim.SGD(own.parameters())
    times = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        nn.functional.mse_loss(own(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(core.row_s * rows)
        times.append(time.perf_counter() - started)
    return rows / statistics.median(times[2:])


def measure(directory: Path, how: str, share: float, steps: int) -> dict[str, Any]:
    """One rank."""
    import autopar
    from autopar.runtime.step.session import Session

    rank = dist.get_rank()
    program = autopar.load(directory)
    session, comm = program.session, program.session.comm
    own = session.rebalancer
    assert own is not None
    (moving,) = own.rows
    core, rows = Core(how), ROWS[how]
    compute = Session._compute

    def slowed(form: Any, inputs: Any) -> Any:
        time.sleep(core.row_s * comm.block_size(rows, moving.axis))
        return compute(session, form, inputs)

    session._compute = slowed  # type: ignore[method-assign]
    data = batch(rows)

    def rows_s(count: int) -> float:
        times = []
        for _ in range(count):
            dist.barrier()
            started = time.perf_counter()
            program(*data)
            times.append(time.perf_counter() - started)
        return rows / statistics.median(times)

    def steps_to_move(most: int) -> int:
        moved = len(own.moves)
        for step in range(most):
            program(*data)
            if len(own.moves) > moved:
                return step + 1
        return -1

    try:
        core.set(share / 3 if rank == 2 else share)
        rows_s(1)
        alone = comm.share(alone_rows_s(core, rows // RANKS, steps))
        session.rebalancer = None
        equal = rows_s(steps)
        session.rebalancer = own
        first = steps_to_move(50)
        rows_s(SETTLE)
        moved, units = rows_s(steps), moving.units
        core.set(share if rank == 0 else share / 3)
        noticed = steps_to_move(50)
        rows_s(SETTLE)
        again = rows_s(steps)
    finally:
        core.release()
    together, later = sum(alone), alone[0] + alone[1] / 3 + alone[2]
    return {
        "how": how,
        "share": share,
        "alone_rows_s": [round(one, 1) for one in alone],
        "equal": round(equal / together, 3),
        "moved": round(moved / together, 3),
        "units": units,
        "steps_to_first_move": first,
        "slowed": {"steps_to_move": noticed, "reached": round(again / later, 3), "units": moving.units},
        "moves": [str(move) for move in own.moves],
    }


def main() -> None:
    parser = command_line(__doc__, steps=20, warmup=0, ranks=RANKS, worker=True)
    parser.add_argument(
        "--how", choices=("cgroup", "delay"), default="cgroup" if os.access(GROUPS, os.W_OK) else "delay"
    )
    parser.add_argument("--share", type=float, default=0.36)
    args = parser.parse_args()
    if args.worker:
        as_worker(lambda: measure(Path(args.worker), args.how, args.share, args.steps))
        return
    with tempfile.TemporaryDirectory() as directory:
        compiled(ROWS[args.how]).save(directory)
        argv = ("--worker", directory, "--how", args.how, "--share", args.share, "--steps", args.steps)
        print_json(run_workers(__file__, RANKS, argv))


if __name__ == "__main__":
    main()
