"""A copy of the library as a developer leaves it who adds something: what examples of adding are tried with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.warm import python as warm_python

ROOT = Path(__file__).parent.parent
LIBRARY = ("autopar", "passes", "costmodel", "codegen")
Edits = Mapping[str, Sequence[tuple[str, str]]]
"""By file, the text that stands there once, and the text that then does."""


def edited_library(copy: Path, edits: Edits) -> Path:
    """A copy of the library in this folder, with these edits."""
    for folder in LIBRARY:
        shutil.copytree(ROOT / folder, copy / folder)
    for name, changes in edits.items():
        text = (copy / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (copy / name).write_text(text)
    return copy


def python(*arguments: str | Path, path: str | Path = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these arguments. path: what PYTHONPATH says; cwd: the folder that it runs in, where `-c` looks first."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=150)
