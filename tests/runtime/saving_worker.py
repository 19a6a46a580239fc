"""Runs under torchrun for test_saver.py: `python saving_worker.py SCENARIO OUT` on four ranks; results are saved per rank."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.checkpoint_files import plan_files
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.checkpoint.saver import Saver
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.comm.text_exchange import tell_all
from autopar.runtime.data.whole_files import file_facts, write_record
from autopar.runtime.memory.host_copy import HostCopy
from tests.runtime import scenarios, stages

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SHAPES = ((), (1,), (0, 3), (5, 7), (64, 33))


def kinds(turn: int) -> dict[str, Any]:
    """Tensors of all dtypes and of odd shapes, some not contiguous, and values that are none; other ones every turn."""
    state: dict[str, Any] = {"text": "x" * 10**turn, "number": 0.5 + turn, "nothing": None}
    generator = torch.Generator().manual_seed(turn)
    for dtype in DTYPES:
        for shape in SHAPES:
            value = torch.randint(0, 100, shape, generator=generator).to(dtype)
            state[f"{dtype}{shape}"] = value.t().contiguous().t() if shape == (5, 7) else value
    return state


def files(out: Path) -> dict[str, Any]:
    """Files of two states, planned once; rank 0 writes what says where everything lies."""
    state = kinds(0)
    planned = plan_files(state, dist.get_rank(), tell_all)
    copy = HostCopy({name: state[name] for name in planned.own.tensors})
    for turn in range(2):
        state, folder = kinds(turn), out / f"turn {turn}"
        folder.mkdir(exist_ok=True)
        copy.fill({name: state[name] for name in copy.tensors})
        texts = planned.own.write(folder, copy.numbers, state)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, texts)
        if dist.get_rank() == 0:
            planned.write_metadata(folder, everyone)
            write_record(folder, {"files": {path.name: file_facts(path) for path in folder.iterdir()}})
    return {"tensors": planned.own.tensors, "texts": [index.fqn for index in planned.own.texts]}


def beside(out: Path) -> dict[str, Any]:
    """Steps that are saved while training goes on, each of them also by torch alone, before it does."""
    program = stages.mlp(2, 2, 1)
    session = scenarios.session_of(program, TorchComm(program.mesh))
    session.load_weights(stages.weights())
    run, data = RunDirectory(out / "run", keep=99), iter(stages.batches(40))
    if dist.get_rank() == 0:
        run.prepare(0)
    dist.barrier()
    saver = Saver(run, session, 0, "", 60.0)
    planned, problems = [], []

    def save(step: int) -> None:
        saver.start(step, 0)
        planned.append(saver._files)
        for _ in range(3):
            session.train_step(next(data))
        saver.finish()
        problems.append(saver.problem)

    def known(step: int) -> None:
        session.train_step(next(data))
        checkpoint.save(out / f"torch {step}", session)

    known(1)
    save(1)
    session.updater.optimizers[0].param_groups[0]["lr"] = 0.0012345678901
    known(2)
    save(2)
    if dist.get_rank() == 3:
        session.updater.state_of("w1")["extra"] = torch.full((), 7.0)
    known(3)
    save(3)
    known(4)
    save(4)
    if dist.get_rank() == 2:
        session.updater.state_of("w1")["exp_avg"].fill_(float("nan"))
    save(5)
    same = [one is other for one, other in itertools.pairwise(planned)]
    own = planned[-1].own
    return {"same": same, "problems": problems, "saved": saver.saved, "tensors": own.tensors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    target = Path(sys.argv[2])
    results = {f.__name__: f for f in (files, beside)}[sys.argv[1]](target)
    torch.save(results, target / f"{sys.argv[1]}_{dist.get_rank()}.pt")
    dist.destroy_process_group()
