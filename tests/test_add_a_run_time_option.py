"""Adding an option that reaches run time is a field of `RunOptions` and the line that acts on it: two files of the library.

Here `gc_every` is added to a copy of the library, as a developer would, and everything between the user and the rank's step
follows: `autopar.Options` has and checks it, manifest.json says it, in-process sessions and run.py act on it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.edited_library import edited_library, python

EDITS = {
    "autopar/runtime/program/run_options.py": [
        (
            "    cuda_graphs: bool = False\n",
            "    cuda_graphs: bool = False\n    gc_every: Annotated[int, integer(0, 1 << 20)] = 0\n",
        )
    ],
    "autopar/runtime/step/session.py": [
        ("import os\n", "import gc\nimport os\n"),
        (
            "            rt.step += advance\n",
            "            rt.step += advance\n"
            "        if self.options.gc_every and self.rt.step % self.options.gc_every == 0:\n"
            "            gc.collect()\n",
        ),
    ],
}

USER = """
import functools, gc, json, sys
from pathlib import Path
from unittest import mock
import torch
from torch import nn
import autopar

out = Path(sys.argv[1])
try:
    autopar.Options(gc_every=-1)
except autopar.InputError as error:
    print(error)

def compiled(**options):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    batch, loss = (torch.ones(4, 8), torch.ones(4, 8)), nn.functional.mse_loss
    cluster = autopar.ClusterSpec.local(1)
    return autopar.compile(nn.Linear(8, 8), cluster, batch, loss_fn=loss, optimizer=sgd, options=autopar.Options(**options))

for name, options in (("without", {}), ("with", {"gc_every": 2})):
    program = compiled(**options)
    with mock.patch.object(gc, "collect") as collect:
        program.run([(torch.ones(4, 8), torch.ones(4, 8))], steps=4)
    print(name, collect.call_count)
    program.save(out / name)
"""
DATA = """
import gc, torch
gc.collect = lambda *_: print("collected", flush=True)
def batches():
    return [(torch.ones(4, 8), torch.ones(4, 8))]
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with the option."""
    return edited_library(tmp_path_factory.mktemp("library"), EDITS)


@pytest.fixture(scope="module")
def programs(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The words that a user of the library is told, and two programs: "with" the option, and "without"."""
    out = tmp_path_factory.mktemp("programs")
    (out / "user.py").write_text(USER)
    done = python(out / "user.py", out, path=library)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), out


def test_it_costs_two_files_of_the_library() -> None:
    assert len(EDITS) == 2


@pytest.mark.timeout(180)
def test_options_have_it_and_refuse_what_it_may_not_be(programs: tuple[list[str], Path]) -> None:
    assert programs[0][0] == "Options.gc_every must be a whole number from 0 to 1048576, got -1"


def test_sessions_in_this_process_act_on_it(programs: tuple[list[str], Path]) -> None:
    assert programs[0][1:] == ["without 0", "with 2"]


@pytest.mark.timeout(180)
def test_a_saved_program_says_it_and_acts_on_it(programs: tuple[list[str], Path]) -> None:
    out = programs[1]
    (out / "data.py").write_text(DATA)
    for name, every in (("with", 2), ("without", 0)):
        assert json.loads((out / name / "manifest.json").read_text())["gc_every"] == every
    done = python(out / "with" / "run.py", "--steps", "4", "--data", f"{out / 'data.py'}:batches")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("collected") == 2


@pytest.mark.timeout(180)
def test_a_damaged_manifest_is_refused_by_its_name(programs: tuple[list[str], Path]) -> None:
    manifest = programs[1] / "with" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(whole), "gc_every": "often"}))
    done = python(manifest.parent / "run.py", "--steps", "1")
    manifest.write_text(whole)
    assert done.returncode == 2
    assert "gc_every must be a whole number from 0 to 1048576, got 'often'" in done.stderr
