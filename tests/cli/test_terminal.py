"""Output is drawn on terminals, and plain anywhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from autopar.report.table import Heading, Table, plain
from tests.test_house import ROOT

TABLE = Table(("plan", "step"), [("dp=2", "12 ms"), ("dp=16×tp=[2]", "9 ms")], right=(1,), title="plans", indent=2)
CODE = "from tests.cli.test_terminal import TABLE\nfrom autopar.cli.terminal import *\nshow(Heading('answer'), 'x' * 200, TABLE)"
PLAIN = f"answer\n{'x' * 200}\nplans\n  plan           step\n  dp=2          12 ms\n  dp=16×tp=[2]   9 ms\n"


def on_terminal(columns: int, **environment: str) -> str:
    """The output of CODE on a terminal of so many columns."""
    own, its = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    sizes = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=ROOT, stdout=its, env={**known, **sizes, **environment}
    ) as run:
        os.close(its)
        said = b""
        try:
            while piece := os.read(own, 1 << 16):
                said += piece
        except OSError:  # the end, on Linux
            pass
        assert run.wait(60) == 0
    os.close(own)
    return said.decode().replace("\r\n", "\n")


def test_plain_columns_are_as_wide_as_what_stands_in_them() -> None:
    assert plain(Heading("answer"), "x" * 200, TABLE) + "\n" == PLAIN
    assert plain(Table((), [("a", "b")])) == "a  b"
    assert plain(Table(("a", "b"), [])) == "a  b"


def test_a_pipe_gets_plain_text_whatever_the_terminal_is() -> None:
    environment = os.environ | {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "xterm"}
    run = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout == PLAIN


@pytest.mark.parametrize("columns", [60, 18])
def test_a_terminal_gets_colours_and_tables_within_its_width(columns: int) -> None:
    said = on_terminal(columns)
    assert "\x1b[1;36manswer" in said
    assert "━" in said or "─" in said
    assert "x" * 200 in said
    table = re.sub(r"\x1b\[[\d;]*m", "", said.partition("x" * 200)[2]).splitlines()
    assert max(map(len, table)) <= columns


def test_no_color_is_plain_on_a_terminal_too() -> None:
    assert on_terminal(30, NO_COLOR="1") == PLAIN
