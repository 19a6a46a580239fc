"""Scripts as people post them, and the same with autopar: how little differs, and that both print the same.

Each runs as it was on one device, and as it became by torchrun on two ranks, in float64, where the numbers that it prints have
twelve digits, and in float32.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

import autopar
from tests.measure import measure_turns
from tests.test_house import ROOT
from tests.warm import python, torchrun

SCRIPTS, PAGE = ROOT / "examples" / "port", ROOT / "docs" / "port_your_script.md"
NAMES = sorted(path.name.removesuffix("_before.py") for path in SCRIPTS.glob("*_before.py"))
ORDER = ("gpt", "trainer", "lightning", "image", "gan", "distill", "dpo", "byol")
"""The scripts as the page has them."""
MOST_LINES = 10
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?")
NEEDS = {"trainer": "transformers", "lightning": "lightning"}
AFTER = {"trainer": ["--batch=4"]}
"""Arguments of two ranks: what is said per rank has half as many rows."""
SHORT = {"gpt": ["--steps=6"], "gan": ["--steps=20"], "image": ["--epochs=2"]}


def script(name: str) -> ModuleType:
    """A module beside the scripts."""
    spec = importlib.util.spec_from_file_location(f"port_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(name: str) -> list[str]:
    """The lines of a unified diff without context, those of its head left out."""
    before, after = ((SCRIPTS / f"{name}_{state}.py").read_text().splitlines() for state in ("before", "after"))
    return list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_ten_lines_are_others(name: str) -> None:
    added = [line for line in differences(name) if line.startswith("+")]
    assert 0 < len(added) <= MOST_LINES


def test_the_page_has_all_scripts() -> None:
    assert sorted(ORDER) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_difference(name: str) -> None:
    shown = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    own = "".join(f"{line}\n" for line in differences(name) if not line.startswith("@@"))
    assert own in shown, own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts run, with a cache of programs of their own."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    values = {"PYTHONPATH": path, "AUTOPAR_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for name, value in (values | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def before(name: str, folder: Path, *arguments: str) -> list[str]:
    """The lines that a script prints as it was."""
    command = [python(), str(SCRIPTS / f"{name}_before.py"), f"--out={folder / 'before'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def after(name: str, folder: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The lines that the first rank prints."""
    own = [SCRIPTS / f"{name}_after.py", f"--out={folder / 'after'}", *arguments, *AFTER.get(name, []) * (ranks == 2)]
    done = torchrun(ranks, "--local-ranks-filter=0", *own, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def assert_equal(ours: list[str], theirs: list[str], tolerance: float) -> None:
    """Whether two scripts print the same words, and numbers that differ by no more than the tolerance."""
    ours, theirs = ([line for line in lines if not line.startswith("{")] for lines in (ours, theirs))  # has seconds
    numbers = [[float(n) for n in NUMBER.findall("\n".join(lines))] for lines in (ours, theirs)]
    words = [NUMBER.sub("", "\n".join(lines)) for lines in (ours, theirs)]
    assert words[0] == words[1]
    assert len(numbers[0]) > 4
    torch.testing.assert_close(*numbers, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_nano_gpt_on_two_ranks_prints_what_it_does_on_one_device(folder: Path) -> None:
    arguments = ["--float64", "--steps=5"]
    assert_equal(after("gpt", folder, *arguments), before("gpt", folder, *arguments), 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_it_prints_the_same_on_any_number_of_ranks(name: str, folder: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    theirs = before(name, folder, "--float64", *SHORT.get(name, []))
    for ranks in (2, 1):
        assert_equal(after(name, folder, "--float64", *SHORT.get(name, []), ranks=ranks), theirs, 1e-9)
    printed = before(name, folder)
    assert_equal(after(name, folder), printed, 1.01e-4)
    shown = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)[ORDER.index(name)]
    assert NUMBER.sub("", shown) in NUMBER.sub("", "".join(f"{line}\n" for line in printed))


@pytest.mark.slow
def test_nano_gpt_evaluates_in_the_memory_that_training_takes() -> None:
    """Weights are there once: training and evaluation together take no more than the larger of them."""
    model = script("gpt").GPT(48, 32).double()
    ids = torch.randint(0, 48, (8, 32))
    options, entries = autopar.Options(strategy="zero3"), {"evaluate": autopar.Entry(loss_fn=None)}
    program = autopar.compile(
        model, autopar.ClusterSpec.local(2), (ids, ids), optimizer=torch.optim.AdamW, options=options, entries=entries
    )
    turns = [("", (ids, ids)), ("evaluate", (ids, ids))]
    together, (trained,) = measure_turns(program, turns), measure_turns(program, turns[:1])
    (evaluated,) = measure_turns(program, turns[1:])
    for rank, peaks in enumerate(zip(*together, strict=True)):
        assert max(peaks) <= 1.01 * max(trained[rank], evaluated[rank])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nano_gpt_goes_on_where_it_was_saved(folder: Path) -> None:
    for run in (before, after):
        run("gpt", folder, "--float64", "--steps=5")
    arguments = ["--float64", "--steps=10", "--resume"]
    theirs = before("gpt", folder, *arguments)
    assert theirs[0].startswith("step 5:")
    assert_equal(after("gpt", folder, *arguments), theirs, 1e-9)
