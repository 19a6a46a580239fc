"""Which architectures compile, and whether what comes out equals eager.

    python -m benchmarks.architectures.sweep OUT.jsonl [--family F] [--only NAME ...] [--limit-s 120] [--ranks 4]

Every case runs in a process of its own: the model is built tiny, compiled for `ranks` CPU ranks with SGD with momentum, and
verified in float64 on the chosen plan and on one random plan. What was captured is then planned on 8 and on 64 H100 too, a few
seconds each (`plans`). A row says `status`: equal, differs, refused (a named error of ours, one of the running program too;
its text is in `why`), broken (any other error), slow (the limit is of CPU seconds), unbuilt (the library itself cannot build or
run it here, which says nothing of us). Rows that are in OUT.jsonl already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import math
import multiprocessing
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.task import Task
from autopar.proof.random_plans import random_plan
from autopar.proof.verify import verify
from autopar.runtime.errors import RuntimeProgramError

from .case import Case

FAMILIES = ("transformers", "diffusers", "timm", "plain", "graphs", "towers", "sequences")
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
NODES = (1, 8)
SEARCH_S = 5.0
"""Seconds of a search after which the best plan so far is taken."""
MOST = 600  # characters of an error's text


def tried(case: Case, ranks: int) -> dict[str, Any]:
    """The outcome of one case: a row."""
    row: dict[str, Any] = {"name": case.name, "family": case.family}
    torch.manual_seed(0)
    try:
        model, batch = case.make()
        eager(copy.deepcopy(model), batch, case)
    except Exception as error:  # the library's business
        return row | {"status": "unbuilt", "why": short(error)}
    begin = time.process_time()
    try:
        cluster = autopar.ClusterSpec.local(ranks)
        program = autopar.compile(model, cluster, batch, loss_fn=case.loss_fn, optimizer=SGD)
        row["followed"] = list(program.captured.exported.followed)
        row["compile_cpu_s"] = round(time.process_time() - begin, 2)
        row |= {name: round(seconds, 2) for name, seconds in program.timings.items()}
        row["plan"] = program.plan.show_meshes()
        row["chosen"] = verify(program, model, batch).max_error
        other = program.with_plan(random_plan(program, 1))
        row["random"] = verify(other, model, batch).max_error
        row["plans"] = {str(8 * nodes): plan_on(program, nodes) for nodes in NODES}
    except (AutoparError, RuntimeProgramError) as error:
        return row | {"status": "refused", "kind": type(error).__name__, "why": str(error)[:MOST]}
    except Exception as error:
        return row | {"status": "broken", "kind": type(error).__name__, "why": short(error)}
    row["cpu_s"] = round(time.process_time() - begin, 2)
    return row | {"status": "equal" if max(row["chosen"], row["random"]) <= 1e-9 else "differs"}


def plan_on(program: autopar.ParallelProgram, nodes: int) -> str:
    """The meshes of the plan on so many nodes of 8 H100, of the step as it was captured."""
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=nodes)
    options = replace(program.options, search_s=SEARCH_S, microbatches=None)
    if program.setting.microbatches == 1:
        batches = Microbatches(program.captured, program.rules)
    else:
        request = replace(program.request, options=options)
        batches = Microbatches(request.capture(), program.rules, request.capture_apart)
    setting = replace(program.setting, microbatches=1)
    plans = search_plans(Task(batches.at(1), cluster, program.rules, setting, options, batches), program.request.batch)
    return plans[0][1].plan.show_meshes() if plans else "none fits"


def eager(model: nn.Module, batch: Any, case: Case) -> None:
    """One forward and backward as the author wrote it."""
    if isinstance(batch, dict):
        loss = model(**batch)
    elif case.loss_fn is None:
        loss = model(*batch)
    else:
        loss = case.loss_fn(model(*batch[:-1]), batch[-1])
    (loss if isinstance(loss, torch.Tensor) else loss.loss).backward()


def short(error: Exception) -> str:
    """The end of a traceback on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}"[:MOST] + f" ({Path(frame.filename).name}:{frame.lineno})"


def alone(case: Case, ranks: int, limit_s: float) -> dict[str, Any]:
    """The row of a case that runs in a process of its own, for so many seconds of CPU time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work(pipe: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 1))
        warnings.filterwarnings("ignore")
        pipe.send(tried(case, ranks))

    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        row = {"name": case.name, "family": case.family, "status": "broken", "why": f"exit code {process.exitcode}"}
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            row |= {"status": "slow", "why": f"over {limit_s:.0f} s of CPU time"}
    process.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    rows = {(row["family"], row["name"]): row for row in done}
    for family in (args.family,) if args.family else FAMILIES:
        for case in importlib.import_module(f".from_{family}", __package__).cases():
            if (case.family, case.name) in rows or (args.only and case.name not in args.only):
                continue
            row = alone(case, args.ranks, args.limit_s)
            rows[case.family, case.name] = row
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['status']:8} {case.name}: {row.get('why', row.get('plan', ''))}"[:200], flush=True)
    print(json.dumps(Counter(row["status"] for row in rows.values())))


if __name__ == "__main__":
    main()
