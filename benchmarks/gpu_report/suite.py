"""The part `suite`: the tests that need a GPU, each file in a process of its own, as a device that failed once stays broken."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_report.machine import Machine
from benchmarks.gpu_report.parts import Found
from benchmarks.gpu_report.separate import ROOT

KERNELS = ("tests/runtime/kernels/test_kernels.py", "tests/runtime/kernels/attention/test_attention_kernels.py")
OWN = "tests/gpu/test_report.py"
"""The tests of this report, which would make it again."""
REHEARSED = ("tests/gpu/test_kernels.py",)
LIMIT_S = 600
MOST_SAID = 4000
"""Characters that are kept of what a test says."""


def files(rehearsal: bool) -> list[str]:
    """The files of the suite."""
    if rehearsal:
        return list(REHEARSED)
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").rglob("test_*.py"))
    return [file for file in found if file != OWN] + list(KERNELS)


def measure(machine: Machine) -> Found:
    for file in files(machine.rehearsal):
        yield file, tested(file)


def tested(file: str) -> dict[str, Any]:
    """The outcomes of a file of tests: how many, the failed ones with what they said, reasons of those that were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "outcomes.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            file,
            "-m",
            "gpu or not slow",
            f"--junitxml={xml}",
            "-p",
            "no:cacheprovider",
        ]
        late = False
        with tempfile.TemporaryFile("w+") as log:
            try:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, timeout=LIMIT_S, check=False)
            except subprocess.TimeoutExpired:
                late = True
            log.seek(0)
            said = log.read()[-MOST_SAID:]
        if not xml.exists():
            why = f"not done within {LIMIT_S} s" if late else "pytest wrote no outcomes"
            return {"passed": 0, "failed": [{"test": file, "says": f"{why}; it said last:\n{said}"}], "skipped": {}}
        return outcomes(xml) | {"said": said}


def outcomes(xml: Path) -> dict[str, Any]:
    """pytest's file of outcomes in short."""
    failed, skipped, passed = [], Counter[str](), 0
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [one for one in case if one.tag in ("failure", "error")]
        if wrong:
            says = f"{wrong[0].get('message')}\n{wrong[0].text or ''}"
            failed.append({"test": name, "says": says[:MOST_SAID]})
        elif (left := case.find("skipped")) is not None:
            skipped[str(left.get("message"))] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped)}


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    for file, found in record.items():
        told.append(f"{file}: {found['passed']} passed, {len(found['failed'])} failed")
        told += [f"    skipped {count}: {reason}" for reason, count in found["skipped"].items()]
        told += [f"    failed {one['test']}: {one['says'].splitlines()[0]}" for one in found["failed"]]
    return told
