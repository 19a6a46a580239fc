"""Runs of a training script by original classes on one device and by autopar's on several ranks, and what must be the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OF_TIME = ("runtime", "per_second", "preparation")


def started(script: str, kind: str, ranks: int, folder: Path, cases: Sequence[str], timeout_s: float = 900) -> None:
    """Run the cases of a script of this folder, which leaves a file for each in the folder."""
    folder.mkdir(exist_ok=True)
    by_torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if kind == "autopar" else []
    )
    command = [sys.executable, *by_torchrun, str(Path(__file__).parent / script), kind, str(folder), *cases]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "AUTOPAR_CACHE": str(folder / "cache")}
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **offline}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def told(folder: Path, case: str) -> dict[str, Any]:
    """The findings of a run."""
    found: dict[str, Any] = json.loads((folder / f"{case}.json").read_text())
    return found


def differences(ours: Any, theirs: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two findings are not the same but for a relative tolerance (above 1, absolute below), seconds left out."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {name for name in ours.keys() | theirs.keys() if not any(one in name for one in OF_TIME)}
        missing = [f"{path}.{name} is in one alone" for name in names if name not in ours or name not in theirs]
        both = sorted(names & ours.keys() & theirs.keys())
        return missing + [
            one for name in both for one in differences(ours[name], theirs[name], tolerance, f"{path}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, tolerance, f"{path}[{i}]")]
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        same = ours == theirs or abs(ours - theirs) <= tolerance * max(1.0, abs(theirs))
        return [] if same else [f"{path}: {ours} and {theirs}"]
    return [] if ours == theirs else [f"{path}: {ours} and {theirs}"]
