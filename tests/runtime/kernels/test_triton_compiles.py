"""Kernels of Triton are compiled for GPUs as they are launched, without one: what they read, write and share is counted."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
SHARED_BYTES = 99 << 10
"""Memory that a block of threads may share on the device that has least, sm86."""


@functools.cache
def rows(*how: str) -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="needs triton, which is in the extra dev")
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.runtime.kernels.compile_kernels", *how]
    with tempfile.TemporaryDirectory() as cache:
        told = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_dropout_reads_and_writes_every_number_once_and_nothing_else() -> None:
    """In 16 bits 4 bytes a number, forward and backward, where torch's own dropout moves a mask of a byte too, which is 5."""
    found = [row for row in rows() if row["kernel"] == "dropout"]
    assert len(found) == 4
    for row in found:
        assert row["ld"] == row["st"] == row["thread"], row


@pytest.mark.parametrize(("how", "count"), [((), 3), pytest.param(("every",), 18, marks=pytest.mark.slow)])
def test_kernels_of_attention_share_what_every_device_has(how: tuple[str, ...], count: int) -> None:
    found = [row for row in rows(*how) if row["kernel"] != "dropout"]
    assert len(found) == count
    assert max(row["shared"] for row in found) <= SHARED_BYTES, found
