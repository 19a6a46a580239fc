"""The wheel holds `autopar` and nothing else at top level, with every module and data file of the four wings."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = {"autopar": "autopar", **{wing: f"autopar/{wing}" for wing in ("passes", "costmodel", "codegen")}}
SHIPPED = {".py", ".j2", ".json", ".css", ".js", ".typed"}

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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no build folder appears beside them."""
    copied = tmp_path_factory.mktemp("source")
    for folder in WINGS:
        shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied / name)
    return copied


def built(kind: str, source: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel of an installation, "wheel" or "editable", as pip builds it."""
    command = [
        sys.executable,
        "-c",
        f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])",
        str(folder),
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_wheel_installs_autopar_and_no_other_top_level_module(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"autopar"}


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if name.startswith("autopar/")} == expected_files()


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in WINGS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has modules but no __init__.py"


def said(code: str, cwd: Path, *sites: Path) -> str:
    """The output of code that runs in a folder. sites: what is installed there is found first, then what is installed beside this
    interpreter, but for editable installations (they need the .pth files that -S skips)."""
    installed = list(dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")))
    start = f"import site, sys\nfor folder in {[*map(str, sites)]}: site.addsitedir(folder)\nsys.path += {installed}\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", start + code]
    ran = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def imported_from(cwd: Path, *sites: Path) -> set[Path]:
    """Files of the modules that the public names load in a folder."""
    files = """
import autopar
autopar.compile
print(*(m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "autopar"), sep="\\n")
"""
    return {cwd / line for line in said(files, cwd, *sites).splitlines()}


def test_the_wings_of_an_editable_installation_import_from_anywhere(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    built("editable", source, tmp_path).extractall(tmp_path / "site")
    found = """
import importlib.util as u, autopar.passes, autopar.costmodel, autopar.codegen
print([wing.__file__ for wing in (autopar.passes, autopar.costmodel, autopar.codegen)])
print([name for name in ("passes", "costmodel", "codegen") if u.find_spec(name)])
"""
    inside, outside = map(ast.literal_eval, said(found, tmp_path / "elsewhere", tmp_path / "site").splitlines())
    assert inside == [str(source / wing / "__init__.py") for wing in ("passes", "costmodel", "codegen")]
    assert outside == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that holds the sources as a checkout does."""
    (tmp_path / "checkout").mkdir()
    for folder in WINGS:
        (tmp_path / "checkout" / folder).symlink_to(ROOT / folder)
    return tmp_path / "checkout"


@pytest.mark.slow
def test_a_checkout_imports_all_its_wings(checkout: Path) -> None:
    files = imported_from(checkout)
    assert {file.relative_to(checkout).parts[0] for file in files} == set(WINGS)


@pytest.mark.slow
def test_public_names_are_there_when_they_are_asked_for() -> None:
    code = """
import sys, autopar
assert "torch" not in sys.modules
assert not hasattr(autopar, "__wrapped__") and "torch" not in sys.modules
assert {"compile", "ClusterSpec", "__version__"} <= set(dir(autopar))
autopar.compile = None
assert not hasattr(autopar, "nothing") and autopar.compile is None
from autopar import *
assert ClusterSpec is autopar.cluster.ClusterSpec
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_checkout_imports_its_own_wings_where_autopar_is_installed_too(
    checkout: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    files = imported_from(checkout, tmp_path / "site")
    assert {file.relative_to(checkout).parts[0] for file in files} == set(WINGS)


def test_an_installed_wheel_imports_from_anywhere(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    inside = {
        file.relative_to(tmp_path / "site").parts[:2]
        for file in imported_from(tmp_path / "elsewhere", tmp_path / "site")
    }
    assert {("autopar", wing) for wing in ("passes", "costmodel", "codegen")} < inside
