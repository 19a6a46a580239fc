"""The page of what does not fit, for commands that write pages."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.errors import AutoparError, InfeasibleError


def print_page_of(error: AutoparError, path: Path | None) -> None:
    """Write the page of what does not fit to a path, where there is one, and say so on standard error, or why there is none."""
    if path is None or not isinstance(error, InfeasibleError):
        return
    try:
        print(f"autopar: {error.report_html(path)} is the page of the smallest plan", file=sys.stderr)
    except AutoparError as refusal:
        print(f"autopar: {refusal}", file=sys.stderr)
