"""manifest.json is data: files of its own directory, optimizers of torch.optim or of what the user's run file imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime import RuntimeProgramError
from autopar.runtime.program import batches
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.launch import main

ADAM = {"module": "torch.optim.adam", "name": "Adam", "kwargs": {"lr": 0.1}}
STEP = {"module": "torch.optim.lr_scheduler", "name": "StepLR", "kwargs": {"step_size": 3}}
GROUPS = {"module": "tests.optimizer_groups", "name": "decayed", "kwargs": {"lr": 0.1}}


def written(directory: Path, run: str = "", **changes: Any) -> Manifest:
    data = {"world_size": 1, "pipeline": "pipeline.py", "training": True, "inputs": [], **changes}
    (directory / "manifest.json").write_text(json.dumps(data))
    (directory / "run.py").write_text(run)
    return Manifest.read(directory)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other", "a/../../b", "", "a\\b", "C:/x", ".", "a\nb", 3, None, ["x"]]
)
def test_files_lie_inside_the_directory(name: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeProgramError, match="pipeline must be a relative path inside the directory"):
        written(tmp_path, pipeline=name)
    if name is not None:
        with pytest.raises(RuntimeProgramError, match="weights must be a relative path inside the directory"):
            written(tmp_path, weights=name)


def test_optimizers_of_torch_are_made(tmp_path: Path) -> None:
    rule = written(tmp_path, update={"optimizer": ADAM, "scheduler": STEP}).update_rule()
    assert rule.optimizer.func.__name__ == "Adam"
    assert rule.scheduler.keywords == {"step_size": 3}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "exec"),
        ("torch.hub", "load"),
        ("torch", "load"),
        ("tests.optimizer_groups", "decayed"),
        ("torch.optimizers", "Adam"),
        ("torch.optim.adam", "torch"),
        ("torch.optim.lr_scheduler", "partial"),
        ("torch.optim", "Optimizers"),
    ],
)
def test_nothing_else_is_imported_or_called(module: str, name: str, tmp_path: Path) -> None:
    row = {"module": module, "name": name, "kwargs": {}}
    run = "import os, subprocess, torch\nfrom pathlib import Path\n"
    with pytest.raises(RuntimeProgramError, match=name):
        written(tmp_path, run, update={"optimizer": row}).update_rule()


def test_what_the_run_file_imports_may_make_the_optimizer(tmp_path: Path) -> None:
    for run in (
        "import tests.optimizer_groups",
        "try:\n    from tests.optimizer_groups import decayed\nexcept ImportError: pass",
    ):
        assert written(tmp_path, run, update={"optimizer": GROUPS}).update_rule().optimizer.func.__name__ == "decayed"
    with pytest.raises(RuntimeProgramError, match=r"write `import tests\.optimizer_groups` into that file"):
        written(tmp_path, "x = 'import tests.optimizer_groups'", update={"optimizer": GROUPS}).update_rule()


@pytest.mark.parametrize("kwargs", [{"lr": -1}, {"lrr": 1}, {"lr": "fast"}, {"lr": [[]]}])
def test_arguments_that_no_optimizer_takes(kwargs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RuntimeProgramError, match="cannot be made"):
        written(tmp_path, update={"optimizer": {**ADAM, "kwargs": kwargs}}).update_rule()


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "-3"], ["--steps", "many"], ["--timeout", "nan"], ["--timeout", "-1"], ["--save-every", "-1"]],
)
def test_arguments_of_run_that_cannot_be(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(tmp_path, arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def f(): return None", "returned NoneType; return an iterable of global batches"),
        ("import torch\ndef f(): return torch.zeros(3)", "returned Tensor"),
        ("def f(x): return []", "is called without arguments: missing a required argument: 'x'"),
        ("f = 3", "is int, no function"),
        ("once = iter([1, 2])\ndef f(): return once", "ended after 2 batches: it is called again"),
    ],
)
def test_data_functions_that_give_no_batches(body: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(body)
    with pytest.raises(RuntimeProgramError, match=says.split(":")[0]) as caught:
        list(zip(range(9), batches.user_batches(f"{tmp_path / 'data.py'}:f"), strict=False))
    assert says in str(caught.value)
