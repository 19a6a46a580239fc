"""The output of commands.

On a terminal it is drawn by rich, as wide as the terminal is. Where output goes to a file or a pipe, or NO_COLOR is set, it is
plain text (`autopar/report/table.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autopar.report.table import Block, Heading, Table, plain


def is_drawn() -> bool:
    """Whether standard output is a terminal on which colours are wanted."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(*blocks: Block) -> None:
    """Print them."""
    if not is_drawn():
        print(plain(*blocks))
        return
    import rich.box
    import rich.table
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    for block in blocks:
        if isinstance(block, Table):
            drawn = rich.table.Table(
                title=Text(block.title) if block.title else None,
                title_justify="left",
                show_header=bool(block.head),
                show_edge=False,
                pad_edge=False,
                box=rich.box.SIMPLE_HEAD if block.head else None,
            )
            for n, name in enumerate(block.head or ("",) * max(map(len, block.rows), default=0)):
                drawn.add_column(Text(name), justify="right" if n in block.right else "left", overflow="fold")
            for row in block.rows:
                drawn.add_row(*map(Text, row))
            console.print(Padding(drawn, (0, 0, 0, block.indent)))
        elif isinstance(block, Heading):
            console.print(Text(block.text, style="bold cyan"))
        else:
            console.print(Text(block), soft_wrap=True)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """While it lasts, a terminal says on standard error what is being done. Gives a function that says it anew."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as shown:
        yield lambda said: shown.update(said)
