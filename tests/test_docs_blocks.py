"""Code on the pages of the project runs as it stands, and prints what the page says.

All `python` and `bash` blocks of a page run in one folder from top to bottom; the section of CONTRIBUTING.md on the documentation
has the comments that leave a block out. Commands are the project's own, and `python` and `torchrun` are warm ones (`tests/warm`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_docs import PAGES, name_of
from tests.test_house import ROOT
from tests.warm import python

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
FENCE = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\b")
FIGURE = re.compile(r"-?\d[\d,.]*(?:e[+-]?\d+)?(?: (?:[mµ]?s|[kMG]?B)\b)?")
NOT_RUN, RUN_BY, SLOW = "not run: ", "run by ", "slow"
LEAST_REASON = 10


@dataclass(frozen=True)
class Block:
    """A fenced block. mark: what the comment before it says; line: of the page, where it begins; follows: whether nothing stands
    between it and the block before."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    follows: bool = False

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, where its first line says one."""
        found = FILE.match(self.text) if self.language in ("python", "yaml") else None
        return found[1] if found else None

    @property
    def runs(self) -> bool:
        """Whether it is run with its page."""
        return self.language in ("python", "bash") and self.mark in ("", SLOW)

    @property
    def quick(self) -> bool:
        """Whether it is also run where what is slow is left out."""
        return self.runs and not self.mark and self.file is None


def blocks(page: Path) -> list[Block]:
    text, end, found = page.read_text(), 0, []
    for one in FENCE.finditer(text):
        line, follows = text[: one.start(2)].count("\n") + 1, not text[end : one.start()].strip()
        found.append(Block(page, line, one[2], one[3], one[1] or "", follows))
        end = one.end()
    return found


CODE = [block for page in PAGES for block in blocks(page) if block.language in ("python", "bash")]


def at(block: Block) -> str:
    return f"{name_of(block.page)}:{block.line}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's blocks run: with the project's commands on the path, and a cache of programs of its own."""
    commands = tmp_path / "commands"
    commands.mkdir()
    calls = {"python": "", "torchrun": "-m torch.distributed.run"}
    for name, entry in SCRIPTS.items():
        module, function = entry.split(":")
        calls[name] = "-c " + shlex.quote(f"import sys; from {module} import {function}; sys.exit({function}())")
    for name, call in calls.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {python()} {call} "$@"\n')
        (commands / name).chmod(0o755)
    for name, value in {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "AUTOPAR_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun's own options: a free port, and no half seconds of waiting
        "PET_MONITOR_INTERVAL": "0.1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "page").mkdir()
    return tmp_path / "page"


def run(page: Path, folder: Path, *, slow: bool) -> None:
    """Run the blocks of a page, and compare what they print with the `text` blocks that follow them."""
    printed = None
    for block in blocks(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "text":
            if printed is not None and block.follows:
                assert_printed(block, printed)
            printed = None
        elif block.runs:
            printed = output(block, folder) if slow or block.quick else None
        else:
            printed = None


def output(block: Block, folder: Path) -> str:
    """The standard output of a block."""
    if block.language == "python":
        (folder / f"line_{block.line}.py").write_text(block.text)
        command = ["python", f"line_{block.line}.py"]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, f"{at(block)}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


def assert_printed(block: Block, printed: str) -> None:
    """Whether the lines of a `text` block appear in what was printed in their order, numbers with their units aside."""
    told = iter([alike(line) for line in printed.splitlines()])
    for line in block.text.splitlines():
        if line.strip() == "…":
            continue
        said, open_end = alike(line.removesuffix("…")), line.endswith("…")
        found = any(one.startswith(said) if open_end else one == said for one in told)
        assert found, f"{at(block)}: {line!r} is not printed, or elsewhere:\n{printed}"


def alike(line: str) -> str:
    """A line without its figures and the width of its gaps."""
    return " ".join(FIGURE.sub("#", line).split())


@pytest.mark.parametrize("block", CODE, ids=at)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    if block.mark.startswith(RUN_BY):
        test = ROOT / block.mark.removeprefix(RUN_BY)
        assert test.name.startswith("test_")
        assert block.page.name in test.read_text()
    elif block.mark.startswith(NOT_RUN):
        assert len(block.mark.removeprefix(NOT_RUN)) > LEAST_REASON
    else:
        assert block.mark in ("", SLOW), f"{at(block)}: {block.mark}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_is_seen(page: Path) -> None:
    """A fence that the reader above does not take for one would leave its code out."""
    fences = re.findall(r"^\s*(?:```|~~~).*$", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({block.page for block in CODE if block.quick}), ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    run(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted({block.page for block in CODE if block.mark == SLOW}), ids=name_of)
def test_all_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    run(page, folder, slow=True)


def test_what_is_printed_is_compared_but_for_its_figures() -> None:
    block = Block(ROOT / "README.md", 1, "text", "loss 0.5, 2 ms\n…\nthe end of …\n", "")
    assert_printed(block, "first\nloss  0.7, 1.1 s\nmore\nthe end of it\n")
    for printed in ("loss 0.7\nthe end of it\n", "the end of it\nloss 0.7, 1 s\n"):
        with pytest.raises(AssertionError):
            assert_printed(block, printed)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of the project's commands in a block of bash."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] in SCRIPTS:
            yield words


def test_questions_of_the_first_page_are_those_that_are_run() -> None:
    """docs/what_if.md has them of a small model, and tests/what_if runs them there."""
    (questions,) = [[*commands(one)] for one in CODE if one.page.name == "README.md" and "--compare" in one.text]
    table = re.findall(r"\| `(autopar plan [^`]*)` \|", (ROOT / "docs" / "what_if.md").read_text())
    assert [["my_model:step" if word == "config.json" else word for word in words] for words in questions] == [
        shlex.split(command) for command in table
    ]


@pytest.mark.parametrize("block", [one for one in CODE if any(commands(one))], ids=at)
def test_commands_have_the_options_that_pages_give_them(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for name, *words in commands(block):
        module, function = SCRIPTS[name].split(":")
        sub = words[:1] if name == "autopar" else []
        with contextlib.suppress(SystemExit):
            getattr(importlib.import_module(module), function)([*sub, "--help"])
        known = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
