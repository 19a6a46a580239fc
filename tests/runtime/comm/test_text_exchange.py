"""Ranks tell each other data, never objects: what arrives is read as its schema has it, within bounds."""

from __future__ import annotations

import ast
import json
import random
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner

import autopar.runtime
from autopar.runtime import run_threads
from autopar.runtime.checkpoint.save_plans import plan_text, read_places, read_plan
from autopar.runtime.checkpoint.saver import read_written
from autopar.runtime.comm import text_exchange
from autopar.runtime.comm.text_exchange import one_line, tell_all
from autopar.runtime.data.schema import integer, listed, table, text
from autopar.runtime.errors import CheckpointError, RuntimeProgramError

UNPICKLING = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list")


def test_nothing_of_the_runtime_sends_or_receives_objects():
    """`dcp.load` and `dcp.save` send pickled plans where they are not told `no_dist`."""
    for path in Path(autopar.runtime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            assert node.func.attr not in UNPICKLING, path
            alone = [one for one in node.keywords if one.arg == "no_dist" and ast.unparse(one.value) == "True"]
            if ast.unparse(node.func) in ("dcp.load", "dcp.save"):
                assert alone, f"{path}:{node.lineno}"


def in_processes_of_threads(ranks, body):
    """Gloo groups of several ranks in this process, which torch has one of per thread."""
    store, answers, errors = dist.HashStore(), [None] * ranks, [None] * ranks

    def start(rank):
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, ranks, timedelta(seconds=20))
            answers[rank] = body(rank, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers, errors


class _Gather:
    """Stands for torch.distributed over a group that this process has several members of."""

    @staticmethod
    def get_world_size(group):
        return group.size()

    @staticmethod
    def all_gather(out, own, group):
        group.allgather([out], [own]).wait()


def test_texts_of_any_length_come_to_all(monkeypatch):
    monkeypatch.setattr(text_exchange, "dist", _Gather)
    texts = ["", "x", "é" * 70000, "\0\n"]
    answers, errors = in_processes_of_threads(4, lambda rank, group: tell_all(texts[rank], group))
    assert errors == [None] * 4
    assert answers == [texts] * 4
    assert in_processes_of_threads(2, lambda rank, group: tell_all("", group))[0] == [["", ""]] * 2


@pytest.mark.parametrize("length", [1 << 40, -1])
def test_a_member_that_would_tell_too_much_is_named_before_anything_is_taken(monkeypatch, length):
    monkeypatch.setattr(text_exchange, "dist", _Gather)

    def body(rank, group):
        if rank == 1:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            return _Gather.all_gather(sizes, torch.tensor([length]), group)
        return tell_all("fine", group)

    _, errors = in_processes_of_threads(2, body)
    assert "member 1 of the group would tell" in str(errors[0])


def test_what_is_no_text_is_named(monkeypatch):
    monkeypatch.setattr(text_exchange, "dist", _Gather)

    def body(rank, group):
        if rank == 0:
            return tell_all("fine", group)
        for sent in (torch.tensor([4]), torch.full((4,), 255, dtype=torch.uint8)):
            _Gather.all_gather([torch.zeros_like(sent) for _ in range(2)], sent, group)

    assert "a rank told what is no text" in str(in_processes_of_threads(2, body)[1][0])


@pytest.mark.parametrize(
    "told", ['"7"', "7.5", "NaN", "[7]", "{", "9" * 30, "[" * 100000, '{"a": 1, "a": 2}', "-1", "cos\nsystem\n(S'id'"]
)
def test_a_rank_that_tells_something_else_is_named(told):
    def body(comm):
        tell = comm._tell
        comm._tell = lambda text: tell(told if comm.rank == 1 else text)
        return comm.share(7, integer(0, 10))

    with pytest.raises(RuntimeProgramError, match="rank 1 tells the others what they do not understand"):
        run_threads(2, {"dp": 2}, body, timeout_s=20)


def test_values_are_shared_as_they_are():
    values = [{"w": 1 << 31}, {}, {"a b": 0}]
    schema = table(text(), integer(0, 1 << 32))
    for got in run_threads(3, {"dp": 3}, lambda comm: comm.share(values[comm.rank], schema), timeout_s=20):
        assert got == values


def test_a_plan_of_a_checkpoint_comes_back_as_torch_made_it():
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
    state = {f"t{i}": torch.zeros(3, i, dtype=kind) for i, kind in enumerate(kinds)} | {"n": None, "s": "text"}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    again = read_plan(plan_text(plan))
    assert again.items == plan.items
    assert again.planner_data == plan.planner_data


def test_mutated_plans_are_named_errors():
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.zeros(2, 3), "s": "text"}, is_coordinator=True)
    said = plan_text(planner.create_local_plan())
    written = json.dumps(
        {"files": {"f": {"bytes": 3, "sha256": "0"}}, "texts": [[["w", [0], 0], 3, "f", 0, 3]], "problem": ""}
    )
    generator, refused = random.Random(0), 0
    for read, whole in ((read_plan, said), (read_written, written), (read_places, "[]")):
        read(whole)
        for _ in range(300):
            data = list(whole)
            for _ in range(generator.randint(1, 4)):
                data[generator.randrange(len(data))] = generator.choice('{}[]",:0-9.eN\\')
            try:
                read("".join(data))
            except CheckpointError:
                refused += 1
    assert refused > 600


def test_an_error_is_told_as_one_line_that_may_be_printed():
    assert one_line("a\nb\x1b[31m\udcff") == "a b [31m "
    assert len(one_line("x" * 100000)) == text_exchange.MOST_SAID
    assert listed(text())([one_line("a\tb")], "") == ["a b"]
