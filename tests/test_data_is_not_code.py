"""Plans, clusters, manifests, program.json and checkpoints are data: whatever they hold, no code of theirs runs and what is
wrong with them is said by a named error."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import ClusterSpec, Plan
from autopar.cli import dump
from autopar.cluster.yaml_text import parse_yaml
from autopar.errors import AutoparError
from autopar.runtime import RuntimeProgramError
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.data.schema import SchemaError, is_identifier
from autopar.runtime.program.manifest import Manifest

from .mutations import CANARY, PAYLOADS, mutants, mutated_bytes, pickles
from .runtime import safetensors_files, stages
from .runtime.scenarios import session_of

FAST, ALL = range(80), range(80, 2280)
X, Y = torch.randn(8, 8), torch.arange(8)
NAMED = (AutoparError, RuntimeProgramError)
counts = pytest.mark.parametrize("seeds", [FAST, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])


@pytest.fixture(autouse=True)
def canary() -> Iterator[None]:
    os.environ.pop(CANARY, None)
    yield
    assert CANARY not in os.environ


def compiled(**options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    options = {"loss_fn": F.cross_entropy, "optimizer": adam, "options": autopar.Options(**options)}
    return autopar.compile(model, ClusterSpec.local(2), (X, Y), **options)


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    return compiled(mesh={"dp": 2})


@pytest.fixture(scope="module")
def saved(program: autopar.ParallelProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.save(tmp_path_factory.mktemp("data") / "program")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(pp=2, microbatches=2).save(tmp_path_factory.mktemp("data") / "pipeline")


def outcome(attempt: Callable[[], Any]) -> str:
    """ "accepted", or the name of the error; a raw one fails the test."""
    try:
        attempt()
    except NAMED as error:
        said = error
    else:
        return "accepted"
    assert 0 < len(str(said)) < 4000
    return type(said).__name__


def every(data: Any, seeds: range, path: Path, attempt: Callable[[Path], Any]) -> Counter[str]:
    """The count of every outcome over the mutants of a file."""
    said: Counter[str] = Counter()
    for seed, text in mutants(data, seeds):
        path.write_bytes(text.encode(errors="surrogatepass"))
        try:
            said[outcome(lambda: attempt(path))] += 1
        except Exception as error:
            raise AssertionError(f"mutant {seed} of {path.name}: {type(error).__name__}: {error}") from error
        assert CANARY not in os.environ, f"mutant {seed} of {path.name} ran code"
    return said


def test_the_payloads_do_run_where_they_are_taken_for_code() -> None:
    """The payloads run here, so that the canary's silence elsewhere says something."""
    ran = 0
    for payload in PAYLOADS:
        with contextlib.suppress(Exception):
            exec(f'"""{payload}"""')
        ran += os.environ.pop(CANARY, "") == "1"
    for data in pickles()[:9]:
        with contextlib.suppress(Exception):
            pickle.loads(data)
        ran += os.environ.pop(CANARY, "") == "1"
    assert ran >= 4


# --- mutated files -----------------------------------------------------------------------------------------------------


def shape(source: str) -> list[str]:
    """The shape of a program: the names and calls of its text, without its strings."""
    return [n.id if isinstance(n, ast.Name) else type(n).__name__ for n in ast.walk(ast.parse(source))]


@counts
def test_plans(program: autopar.ParallelProgram, seeds: range, tmp_path: Path) -> None:
    names = {name for source in program.sources for name in shape(source)}

    def attempt(path: Path) -> None:
        plan = Plan.load(path)
        if plan.microbatches == 1:
            again = program.with_plan(plan)
            for source in again.sources:
                assert {"os", "__import__", "eval", "exec"}.isdisjoint(shape(source))
                assert set(shape(source)) - names <= {name for name in shape(source) if "_" in name or name.islower()}
            assert again.in_process.stages

    said = every(program.plan.to_dict(), seeds, tmp_path / "plan.json", attempt)
    assert said["PlanError"] > len(seeds) // 2


@counts
def test_clusters(seeds: range, tmp_path: Path) -> None:
    files = (
        ClusterSpec.preset("dgx-h100", nodes=2).with_tiers().to_dict(),
        {"preset": "dgx-h100", "nodes": 2},
        {
            "nodes": [
                {
                    "count": 2,
                    "device": "h100",
                    "devices_per_node": 8,
                    "bandwidth_GBps": 450,
                    "latency_us": 3,
                    "efficiency": 0.5,
                },
                {
                    "count": 1,
                    "device": {"preset": "a100", "memory_bytes": 8e10, "curve": {"conv": 0.5}},
                    "devices_per_node": 4,
                },
            ],
            "network": {"bandwidth_GBps": 50, "latency_us": 8, "oversubscription": 2},
            "rack": {"nodes": 2},
            "tiers": {"ddr": {"capacity_GB": 2000, "bandwidth_GBps": 50}},
        },
    )

    def attempt(path: Path) -> None:
        cluster = ClusterSpec.from_file(path)
        assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
        assert cluster.device(cluster.size - 1).memory_bytes > 0
        assert all(0 < level.rate_Bps() < float("inf") for level in cluster.levels)

    for number, data in enumerate(files):
        assert every(data, seeds, tmp_path / f"{number}.json", attempt)["ClusterError"] > len(seeds) // 3
        some = range(seeds.start, seeds.start + len(seeds) // 10)
        assert every(data, some, tmp_path / f"{number}.yaml", attempt)["ClusterError"] > 0


@counts
def test_manifests(saved: Path, seeds: range, tmp_path: Path) -> None:
    data = json.loads((saved / "manifest.json").read_text())

    def attempt(path: Path) -> None:
        manifest = Manifest.read(tmp_path)
        assert tmp_path in (tmp_path / manifest.pipeline).resolve().parents
        assert manifest.weights is None or tmp_path in (tmp_path / manifest.weights).resolve().parents
        manifest.update_rule()

    assert every(data, seeds, tmp_path / "manifest.json", attempt)["RuntimeProgramError"] > len(seeds) // 2


FORM = {"inputs": "x (8, 8)", "plan": "dp=2", "step_time_s": 1e-3, "peak_bytes": 1e6}
LONG_RUN = {"mtbf_s": 1e6, "stall_s": 0.5, "write_s": 2.0, "save_every": 90, "goodput": 0.97}


def small(directory: Path) -> Any:
    """The content of a program.json, with less of what stands there often, and all of what stands there at times."""
    data = json.loads((directory / "program.json").read_text())
    del data["files"]
    for stage in data["stages"]:
        for template in stage["templates"].values():
            for function in template["functions"].values():
                del function["lines"][2:]
    return data | {"buckets": [FORM, FORM], "entries": {"evaluate": [FORM]}, "long_run": LONG_RUN}


def dumped(directory: Path) -> None:
    """Have `autopar dump` show a directory in every form. Raises AutoparError with what it says where it refuses."""
    for form in ("text", "json", "dot", "chrome-trace", "html"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            status = dump.main([str(directory), "--format", form])
        if status:
            assert status == 2
            assert said.getvalue().startswith("autopar-dump: ")
            raise AutoparError(said.getvalue()[:1000])


@pytest.mark.few(1)
@counts
@pytest.mark.parametrize("kind", ["saved", "pipeline"])
def test_programs(kind: str, seeds: range, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(kind)
    shutil.copy(directory / "plan.json", tmp_path)
    said = every(small(directory), seeds, tmp_path / "program.json", lambda path: dumped(path.parent))
    assert said["AutoparError"] > len(seeds) // 3


@pytest.mark.parametrize(
    ("harm", "where"),
    [
        ({"entries": "evaluate"}, "entries must be a mapping"),
        ({"entries": {"evaluate": [FORM, "dp=2"]}}, "entries.evaluate[1] must be a mapping"),
        ({"buckets": [FORM | {"plan": 2}]}, "buckets[0].plan must be printable text"),
        ({"buckets": [{"plan": "dp=2"}]}, "buckets[0]: 'inputs' is missing"),
        ({"long_run": LONG_RUN | {"goodput": "most"}}, "long_run.goodput must be a number from 0 to 1"),
        ({"long_run": [90]}, "long_run must be a mapping"),
    ],
)
def test_parts_that_few_programs_have_are_checked_where_they_are_read(
    harm: dict[str, Any], where: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copy(saved / "plan.json", tmp_path)
    (tmp_path / "program.json").write_text(json.dumps(small(saved)))
    dumped(tmp_path)
    (tmp_path / "program.json").write_text(json.dumps(small(saved) | harm))
    with pytest.raises(AutoparError, match=re.escape(f"program.json is damaged: {where}")):
        dumped(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as the runtime writes it."""
    path = tmp_path_factory.mktemp("data") / "checkpoint"
    row = stages.mlp(1, 1)

    def body(comm: Any) -> None:
        session = session_of(row, comm)
        session.load_weights(stages.weights())
        session.train_step(stages.batches(1)[0])
        checkpoint.save(path, session)

    run_threads(1, row.mesh, body, timeout_s=60)
    return path


def resume(path: Path) -> Any:
    row = stages.mlp(1, 1)

    def body(comm: Any) -> int:
        session = session_of(row, comm)
        checkpoint.load(path, session)
        return session.rt.step

    return run_threads(1, row.mesh, body, timeout_s=60)


@counts
def test_checkpoints(trained: Path, seeds: range, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(trained, path)
    assert resume(path) == [1]
    said: Counter[str] = Counter()
    for file, share in ((".metadata", 4), ("__0_0.distcp", 8)):
        whole = (path / file).read_bytes()
        for seed in range(seeds.start, seeds.start + len(seeds) // share):
            (path / file).write_bytes(mutated_bytes(whole, random.Random(seed)))
            try:
                said[outcome(lambda: resume(path))] += 1
            except Exception as error:
                raise AssertionError(f"mutant {seed} of {file}: {type(error).__name__}: {error}") from error
            assert CANARY not in os.environ, f"mutant {seed} of {file} ran code"
        (path / file).write_bytes(whole)
    assert said["CheckpointError"] > said.total() // 3


@counts
def test_safetensors(seeds: range, tmp_path: Path) -> None:
    """Mutants of a file, and of the index of several."""
    full, row = stages.weights(), stages.mlp(1, 1)
    single = safetensors_files.write(tmp_path / "model.safetensors", full)
    shards = safetensors_files.write_shards(tmp_path / "shards", {"w1": full.pop("w1")}, full)
    index = shards / "model.safetensors.index.json"

    def fill(path: Path) -> None:
        manifest = Manifest(path.parent, 1, "pipeline.py", True)
        run_threads(1, row.mesh, lambda comm: load_weights(path.parent, session_of(row, comm), manifest), timeout_s=60)

    fill(single)
    fill(index)
    whole, said = single.read_bytes(), Counter[str]()
    for seed in range(seeds.start, seeds.start + len(seeds) // 2):
        single.write_bytes(mutated_bytes(whole, random.Random(seed)))
        try:
            said[outcome(lambda: fill(single))] += 1
        except Exception as error:
            raise AssertionError(f"mutant {seed}: {type(error).__name__}: {error}") from error
    assert said["CheckpointError"] > said.total() // 4
    data = json.loads(index.read_text())
    assert every(data, range(seeds.start, seeds.start + len(seeds) // 2), index, fill)["CheckpointError"] > 0


# --- crafted files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(pickles())))
def test_metadata_that_calls_something(trained: Path, number: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(trained, path)
    (path / ".metadata").write_bytes(pickles()[number])
    assert outcome(lambda: resume(path)) == "CheckpointError"


def test_a_value_that_calls_something(trained: Path, tmp_path: Path) -> None:
    names = checkpoint.read_signatures(trained)
    state = {name: torch.zeros(row[0], dtype=row[1]) for name, row in names.items() if row is not None}
    checkpoint.write_full(tmp_path / "crafted", {**state, "optim_groups": Called()})
    os.environ.pop(CANARY, None)
    assert "optim_groups" in names
    with pytest.raises(RuntimeProgramError, match="the checkpoint is damaged"):
        resume(tmp_path / "crafted")


class Called:
    """Sets the canary when it is unpickled."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').environ.__setitem__({CANARY!r}, '1')",)


@pytest.mark.parametrize("every", [12, pytest.param(2, marks=pytest.mark.slow)])
def test_names_of_classes_and_axes_do_not_reach_the_text_as_code(every: int) -> None:
    for payload in PAYLOADS[::every]:
        if "\x00" in payload or "\ud800" in payload or len(payload) > 1000:
            continue
        kind = type(payload, (nn.Linear,), {})
        made = autopar.compile(kind(8, 8), ClusterSpec.local(1), (X, Y), loss_fn=F.cross_entropy)
        assert made.in_process.stages
        assert {"os", "__import__"}.isdisjoint(name for source in made.sources for name in shape(source))
        if not is_identifier(payload):
            with pytest.raises(AutoparError, match=r"a key of Options\.mesh must be a name of letters"):
                autopar.Options(mesh={payload: 2})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [1]\nb: *a", "anchors and aliases"),
        ("a: {<<: {b: 1}}", "no plain value"),
        ("a: 1\na: 2", "is given twice"),
        ("a: !!python/object/apply:os.system [x]", "no plain value"),
        ("a: 2020-01-01", "no plain value"),
        ("a: .inf", "too large, or none"),
        ("[" * 5000, "levels"),
        ("a: " + "9" * 6000, "integer"),
    ],
)
def test_yaml_that_is_more_than_data(text: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        parse_yaml(text)


def test_yaml_numbers_with_exponents_are_numbers() -> None:
    assert parse_yaml("a: 80e9\nb: 1.5e3\nc: -2E+2") == {"a": 80e9, "b": 1500.0, "c": -200.0}
