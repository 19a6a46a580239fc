"""The wheel holds `autopar` and nothing else at top level, with every module and data file of the four wings."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = {"autopar": "autopar", **{wing: f"autopar/{wing}" for wing in ("passes", "costmodel", "codegen")}}
SHIPPED = {".py", ".j2", ".json", ".typed"}

pytest.importorskip("setuptools", minversion="77")


def expected_files() -> set[str]:
    """Where each source file of the wings lies in an installation."""
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in WINGS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, so that no build folder appears beside them."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for folder in WINGS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-c", "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])", str(work)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    (path,) = work.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_installs_autopar_and_no_other_top_level_module(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"autopar"}


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if name.startswith("autopar/")} == expected_files()


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in WINGS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has modules but no __init__.py"


def test_installed_wings_import_from_anywhere(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, autopar.passes, autopar.costmodel, autopar.codegen\n"
        "print([n for n in ('passes', 'costmodel', 'codegen') if u.find_spec(n)])"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
