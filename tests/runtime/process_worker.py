"""Runs under torchrun for test_process.py: `python process_worker.py SCENARIO OUT`; results are saved per rank."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.comm.process import TorchComm
from tests.runtime import pipelines, scenarios, stages
from tests.runtime.step.test_pipeline import made

PIPELINES = ("two stages", "zero bubble", "interleaved on unlike meshes")
TRAININGS = [(dp, tp, zero) for dp, tp in ((2, 2), (4, 1)) for zero in (0, 1, 3)]


def agree(out: Path) -> dict[str, Any]:
    """Four ranks: what the threads do, the processes do; then a checkpoint of (2, 2) with ZeRO-1 after two steps."""
    comm = TorchComm(scenarios.MESH)
    native = TorchComm(scenarios.MESH)
    native.gloo = False  # the way that NCCL goes
    got = {
        "native": scenarios.collectives(native, dtypes=(torch.float64,)),
        "collectives": scenarios.collectives(comm),
        "checked": scenarios.collectives(TorchComm(scenarios.MESH, check=True), (8,)),
        "gradients": scenarios.gradients(comm),
    }
    for dp, tp, zero in TRAININGS:
        program = stages.mlp(dp, tp, zero)
        result = scenarios.train(TorchComm(program.mesh), program, 3)
        session = result.pop("session")
        got[f"train {dp} {tp} {zero}"] = result
        if (dp, tp, zero) == (2, 2, 1):
            checkpoint.save(out / "checkpoint", session)
            state = session.state_dict()
            got["placements"] = {name: str(getattr(value, "placements", None)) for name, value in state.items()}
            again = scenarios.session_of(program, session.comm)
            again.load_state_dict(state)
            got["reloaded"] = {name: again.gather_full(name) for name in ("w1", "b2", "seen")}
    return got


def resume(out: Path) -> dict[str, Any]:
    """Two ranks go on from the four ranks' checkpoint under other meshes and specs, and from full weights."""
    got: dict[str, Any] = {}
    for dp, tp, zero in ((1, 2, 0), (2, 1, 3), (1, 2, 1)):
        program = stages.mlp(dp, tp, zero)
        session = scenarios.session_of(program, TorchComm(program.mesh))
        checkpoint.load(out / "checkpoint", session)
        losses = [session.train_step(batch).item() for batch in stages.batches(5)[3:]]
        weights = {name: session.gather_full(name) for name in ("w1", "w2", "b1", "b2", "seen")}
        got[f"{dp} {tp} {zero}"] = {"losses": losses, "weights": weights}
    program = stages.mlp(2, 1, 3)
    session = scenarios.session_of(program, TorchComm(program.mesh))
    checkpoint.load(out / "weights", session)
    got["full"] = {"losses": [session.train_step(batch).item() for batch in stages.batches(2)]}
    return got


def pipeline(out: Path) -> dict[str, Any]:
    """The pipelines of these many ranks; a checkpoint of the tied one. Also with messages that have no tags."""
    got: dict[str, Any] = {}
    for case in PIPELINES:
        program, known = made(case)
        if program.ranks != dist.get_world_size():
            continue
        full, data = pipelines.weights(known["stages"], known["tied"]), pipelines.batches(3)
        for in_order in (False, True):
            comm = TorchComm(program.mesh, timeout_s=30)
            comm.in_order = in_order
            result = scenarios.train(comm, program, 3, full=full, data=data)
            session = result.pop("session")
            got[f"{case} {in_order}"] = result
            got[f"{case} {in_order} order"] = comm.flight.beat(asked=True)
        if known["tied"]:
            checkpoint.save(out / case, session)
            state = session.state_dict()
            again = scenarios.session_of(program, session.comm)
            again.load_state_dict(state)
            got[f"{case} again"] = {"losses": [s.train_step(data[0]).item() for s in (session, again)]}
            names = [name for name in state if not name.startswith("optim")]
            got[f"{case} held"] = {n: type(state[n]).__name__ for n in names}
    return got


def reload(out: Path) -> dict[str, Any]:
    """The checkpoint of the interleaved pipeline in another one, on two ranks."""
    groups = ((0, 1), (2, 3))
    program = pipelines.chain([(1, 1)] * 4, pipelines.gpipe(groups, 4), 4, groups=groups, tied=(0, 2))
    session = scenarios.session_of(program, TorchComm(program.mesh))
    checkpoint.load(out / "interleaved on unlike meshes", session)
    losses = [session.train_step(batch).item() for batch in pipelines.batches(5)[3:]]
    return {"losses": losses, "weights": {name: session.gather_full(name) for name in ("w.tied", "w.1", "gain")}}


def stuck(out: Path) -> dict[str, Any]:
    """Rank 1 never comes to its row; rank 0 waits for a gradient."""
    program, _ = made("two stages")
    store = dist.FileStore(str(out / "notes"), 2)
    session = scenarios.session_of(program, TorchComm(program.mesh, timeout_s=1.0, store=store))
    session.load_weights(pipelines.weights(2))
    first = dist.get_rank() == 0
    got = caught(lambda: session.train_step(pipelines.batches(1)[0]) if first else time.sleep(0))
    dist.barrier()  # not before: a rank that ends is gone, and not late
    return got


def caught(call: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        notes = getattr(error, "__notes__", [])
        seconds = time.monotonic() - start
        return {"type": type(error).__name__, "message": str(error), "notes": notes, "seconds": seconds}
    return {"type": "none", "message": "", "seconds": time.monotonic() - start}


def disagree(out: Path) -> dict[str, Any]:
    """Two ranks that call different things; each case on groups of its own."""
    store = dist.FileStore(str(out / "store"), 2)
    x, got = torch.ones(4), {}

    def comm(case: str, **options: Any) -> TorchComm:
        return TorchComm({"a": 2}, timeout_s=1.0, store=dist.PrefixStore(case, store), **options)

    checked, late, silent = comm("checked", check=True), comm("late"), comm("silent")
    tardy = comm("tardy")
    first = dist.get_rank() == 0
    wrong = lambda c: c.all_reduce(x, "a", site="A.py:1") if first else c.all_gather(x, 0, "a", site="B.py:2")  # noqa: E731
    got["checked"] = caught(lambda: wrong(checked))
    got["late"] = caught(lambda: wrong(late))
    closed = lambda: caught(lambda: tardy.all_reduce(x, "a", site="D.py:4" if first else "E.py:5"))  # noqa: E731
    dist.barrier()
    got["closed"] = closed() if first else {}
    dist.barrier()
    got["closed"] = got["closed"] or closed()
    got["alone"] = caught(lambda: silent.all_reduce(x, "a", site="C.py:3") if first else time.sleep(0.1))
    dist.barrier()
    return got


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    target = Path(sys.argv[2])
    scenario = {f.__name__: f for f in (agree, resume, disagree, pipeline, reload, stuck)}[sys.argv[1]]
    results = scenario(target)
    torch.save(results, target / f"{sys.argv[1]}_{dist.get_rank()}.pt")
    dist.destroy_process_group()
