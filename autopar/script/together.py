"""Ranks of one script make one program: they see that they ask for the same, one compiles, the others wait.

    every rank     tells where it stands, and hashes of what it asks for         places, fingerprint
    rank 0         takes the program from its cache, or compiles it; tells the plan
    the first      of every other machine finds the same program in its own cache, or makes it of that plan
    the others     wait for the first of their machine

Between ranks go plans and hashes, which are data, and no code: every machine runs what it wrote itself.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar import errors
from autopar.api import compile_request
from autopar.cluster import ClusterSpec
from autopar.cluster.here import Place, cluster_of, place_here
from autopar.codegen.directory import Contents, write_directory
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.request import Request
from autopar.runtime.comm.environment import started
from autopar.runtime.comm.text_exchange import one_line
from autopar.runtime.data.datafile import parse_json
from autopar.runtime.data.fields import from_data, to_data
from autopar.runtime.data.schema import anything, paragraph, record, text, where
from autopar.runtime.errors import CollectiveTimeout, RuntimeProgramError
from autopar.runtime.run.meeting import default_store, joined, told
from autopar.runtime.run.program_files import Compared, compare
from autopar.runtime.update.update_rule import UpdateRule
from autopar.script.cache import ONCE, cache_folder, keep, kept
from autopar.script.fingerprint import Asked, key_of_batches

POLL_S = 0.02
ARGUMENTS = Compared(
    "arguments",
    "what they ask for",
    "ranks ask autopar.parallelize for different programs",
    "Every rank runs the same script with the same arguments: model, shapes of example inputs, loss, optimizer and options; see "
    "what the script makes of its rank (a batch size, a learning rate, a number that the loss closes over)",
)
_KEY = where(
    lambda key: isinstance(key, str) and re.fullmatch("(once-)?[0-9a-f]{32,64}", key) is not None, "a fingerprint"
)
_DONE = record({}, {"key": _KEY, "plan": anything, "error": paragraph(), "kind": text()})
_CALLS = 0


@dataclass(frozen=True)
class Ranks:
    """The ranks of a script. store: for this call alone; met: what `load` takes, where no process group is there yet; places: of
    all ranks."""

    store: dist.Store
    rank: int
    met: tuple[dist.Store, int] | None
    places: tuple[Place, ...]
    timeout_s: float

    @staticmethod
    def meet(backend: str | None, timeout_s: float) -> Ranks:
        """All ranks call this. backend: that they are to compute with. Raises LaunchError, CollectiveTimeout."""
        global _CALLS
        _CALLS, own = _CALLS + 1, place_here(backend)
        met = None
        if dist.is_initialized():
            store = default_store()
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            store, rank = met = joined(timeout_s)
            size = started().ranks
        store = dist.PrefixStore(f"autopar/parallelize/{_CALLS}", store)
        everyone = told(store, "places", rank, size, to_data(own), timeout_s, "where they are")
        return Ranks(store, rank, met, tuple(from_data(Place, one) for one in everyone), timeout_s)

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def first(self) -> int:
        """The first rank of this one's machine."""
        return next(i for i, one in enumerate(self.places) if one.machine == self.places[self.rank].machine)

    @property
    def cluster(self) -> ClusterSpec:
        return cluster_of(self.places)


def program_directory(request: Request, asked: Asked, ranks: Ranks, compile_timeout_s: float) -> Path:
    """The directory of the request's program on this machine. asked: the fingerprint of the request. All ranks call this. Raises
    RankError where they ask for different programs; on every rank what the compiling one raised; CollectiveTimeout."""
    if ranks.size > 1:
        compare(ranks.store, ranks.rank, ranks.size, asked.parts, ranks.timeout_s, ARGUMENTS)
    if ranks.rank == 0:
        return _told_others(ranks, lambda: _first_program(request, asked))
    if ranks.rank != ranks.first:
        return cache_folder() / _waited(ranks, ranks.first, compile_timeout_s)["key"]
    return _told_others(ranks, lambda: _same_program(request, _waited(ranks, 0, compile_timeout_s)))


def _first_program(request: Request, asked: Asked) -> Path:
    """The program of a request, from the cache or compiled."""
    if asked.unknown:
        warnings.warn(
            f"autopar.parallelize compiles at every start: {asked.unknown}, so nothing says that the program is still the same; "
            "leave it out of what the model, the loss and the optimizer's factory hold",
            stacklevel=4,
        )
        return _for_this_run(request)
    if (directory := kept(asked.key)) is not None:
        return directory
    key = key_of_batches(request, asked)
    if (directory := kept(key)) is not None:
        return directory
    program = compile_request(request)
    followed = any(form.captured.exported.followed for form in program.forms)
    return keep(key if followed else asked.key, lambda directory: write_without_script(program.contents, directory))


def _same_program(request: Request, done: Mapping[str, Any]) -> Path:
    """The program that another machine has, by its plan. done: what that one told."""
    key, plan = done["key"], Plan.from_dict(done["plan"])
    if key.startswith(ONCE):
        return _for_this_run(request.replaying(plan))
    directory = kept(key)
    if directory is not None and (directory / "plan.json").read_text() == plan.to_json():
        return directory
    key = hashlib.sha256(f"{key} {plan.to_json()}".encode()).hexdigest()
    return kept(key) or keep(
        key, lambda directory: write_without_script(compile_request(request.replaying(plan)).contents, directory)
    )


def _for_this_run(request: Request) -> Path:
    """A program that nobody will find again, which is deleted when this process ends."""
    directory = keep(
        f"{ONCE}{uuid.uuid4().hex}",
        lambda directory: write_without_script(compile_request(request).contents, directory),
    )
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def write_without_script(contents: Contents, directory: Path) -> None:
    """Write a program without what its script has in memory: the model's weights, and what makes its optimizer."""
    names = contents.state_names
    weights = {name: w.to("meta") if names[name] else w for name, w in contents.weights.items()}
    entries = {
        name: replace(one, update=None if one.update is None else UpdateRule())
        for name, one in contents.entries.items()
    }
    update = UpdateRule() if contents.update is not None else None
    write_directory(replace(contents, weights=weights, update=update, entries=entries), directory)


def _told_others(ranks: Ranks, work: Callable[[], Path]) -> Path:
    """The directory that is found or made, told to those who wait for this rank, as is what is raised."""
    try:
        directory = work()
        said = {"key": directory.name, "plan": Plan.load(directory / "plan.json").to_dict()}
    except BaseException as error:
        text_of = one_line(str(error) or type(error).__name__)
        with suppress(RuntimeError):
            ranks.store.set(_key(ranks.rank), json.dumps({"error": text_of, "kind": type(error).__name__}))
            _stay(ranks)
        raise
    ranks.store.set(_key(ranks.rank), json.dumps(said))
    return directory


def _stay(ranks: Ranks) -> None:
    """Wait a little for the others to read an error, as the store ends with the process that holds it."""
    end = time.monotonic() + min(ranks.timeout_s, 5.0)
    while time.monotonic() < end and ranks.store.add("heard", 0) < ranks.size - 1:
        time.sleep(POLL_S)


def _key(rank: int) -> str:
    return f"done/{rank}"


def _waited(ranks: Ranks, other: int, timeout_s: float) -> Mapping[str, Any]:
    """The message of another rank once it has a program. Raises what that raised, CollectiveTimeout."""
    end = time.monotonic() + timeout_s
    try:
        while not ranks.store.check([_key(other)]):
            if time.monotonic() > end:
                raise CollectiveTimeout(
                    f"rank {ranks.rank}: rank {other} did not compile the program in {timeout_s:g} s; give it more with "
                    "compile_timeout_s=, or end the search earlier with Options(search_s=…)"
                )
            time.sleep(POLL_S)
        done: Mapping[str, Any] = _DONE(parse_json(ranks.store.get(_key(other)).decode()), "")
    except RuntimeError as error:
        if isinstance(error, RuntimeProgramError):
            raise
        raise RuntimeProgramError(f"rank {ranks.rank}: rank {other}, which compiles, is gone") from error
    if "error" in done:
        ranks.store.add("heard", 1)
        raise _as_raised(done["kind"], f"rank {other} could not compile: {done['error']}")
    return done


def _as_raised(kind: str, said: str) -> Exception:
    """An error of the class that another rank raised, where it is one of autopar's."""
    own = getattr(errors, kind, None)
    is_ours = isinstance(own, type) and issubclass(own, AutoparError)
    return own(said) if own is not None and is_ours else RuntimeProgramError(f"{said} ({kind})")


def leave_group_at_end() -> None:
    """Have the process group that a program made destroyed when the script ends well."""

    def leave() -> None:
        if dist.is_initialized() and not hasattr(sys, "last_value"):
            dist.destroy_process_group()

    atexit.register(leave)
