"""Text that enters a generated file beside code: made harmless whatever it holds.

Names of models, modules and axes are checked where they are read; here nothing depends on that. A comment is one
printable line; what goes into a docstring can neither end it nor escape from it; a name in code is an identifier.
"""

from __future__ import annotations

import keyword

from autopar.errors import EmitError


def comment(text: str, most: int = 1000) -> str:
    """One printable line: white space becomes one space, other characters that do not print a question mark."""
    line = " ".join(text.split())
    return (line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line))[:most]


def docstring(text: str) -> str:
    """The same for a docstring in triple quotes."""
    return comment(text).replace("\\", "/").replace('"', "'")


def identifier(text: str) -> str:
    """The name itself. Raises EmitError where it is no identifier of Python."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise EmitError(f"{comment(text, 100)!r} cannot be a name in a program; rename the module that it comes from")
    return text
