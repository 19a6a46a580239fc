"""The runtime's modules that travel with a program: all that its files import, and no kernels of others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen.travelling import runtime_files
from tests.warm import python
from tests.zoo.models import ADAMW, BY_NAME

RUNTIME = Path(autopar.runtime.__file__).parent
EVERY = {path.relative_to(RUNTIME).as_posix() for path in RUNTIME.rglob("*.py")}


def carried(text: str) -> set[str]:
    files = runtime_files([{"stages/stage_0.py": text.encode()}])
    assert all(
        files[name] == (RUNTIME.parent / name.replace("autopar_runtime", "runtime")).read_bytes() for name in files
    )
    return {name.removeprefix("autopar_runtime/") for name in files}


def test_a_module_brings_what_it_imports_and_the_packages_around_it() -> None:
    found = carried("from autopar_runtime.kernels.images import pools\n")
    assert {"__init__.py", "kernels/__init__.py", "kernels/images/__init__.py", "kernels/images/pools.py"} <= found
    assert "kernels/images/halos.py" in found
    assert "run/launch.py" not in found
    assert found < EVERY


def test_names_of_a_module_and_imports_inside_functions_count() -> None:
    assert "run/launch.py" in carried("def f():\n    from autopar_runtime.run.launch import main\n")
    assert "kernels/ops.py" in carried("import autopar_runtime.kernels.ops\n")
    assert carried("import torch\n") == set()


def test_an_mlp_carries_no_kernels_of_other_models(tmp_path: Path) -> None:
    zoo = BY_NAME["mlp"]
    program = autopar.compile(
        zoo.make(), autopar.ClusterSpec.local(2), zoo.batch(), loss_fn=zoo.loss_fn, optimizer=ADAMW
    )
    program.save(tmp_path / "out")
    assert "import ops\n\n" in (tmp_path / "out/stages/stage_0.py").read_text()
    found = {
        p.relative_to(tmp_path / "out/autopar_runtime").as_posix() for p in tmp_path.rglob("autopar_runtime/**/*.py")
    }
    assert not [name for name in found if name.startswith(("kernels/attention", "kernels/experts", "kernels/images"))]
    assert {"run/launch.py", "kernels/ops.py"} <= found


class Attending(nn.Module):
    """Attention, whose kernels another plan's program reads beside an MLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.timeout(120)
def test_every_module_of_a_saved_program_can_be_imported_alone(tmp_path: Path) -> None:
    """A program that lacks a module fails when that is imported, which may be late in a run: so import all of them."""
    program = autopar.compile(
        Attending(),
        autopar.ClusterSpec.local(1),
        (torch.randn(2, 8, 8),),
        loss_fn=lambda y: y.square().mean(),
        optimizer=ADAMW,
    )
    program.save(tmp_path / "out")
    names = sorted(
        p.relative_to(tmp_path / "out").with_suffix("").as_posix().replace("/", ".")
        for p in tmp_path.rglob("autopar_runtime/**/*.py")
    )
    text = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name.removesuffix('.__init__'))"
    done = subprocess.run([python(), "-c", text, *names], cwd=tmp_path / "out", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "autopar_runtime.kernels.attention.attention" in names
