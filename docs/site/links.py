"""Pages of the site that lie outside of docs/, and links that leave it: hooks of mkdocs.

README.md, CHANGELOG.md and CONTRIBUTING.md are pages too. Links are written for readers of the repository, relative to the
file that they stand in; here they lead to pages of the site, and those to files that are none (sources, folders) become
their text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site by name, and the files of the repository that they are made from."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """The files of docs/ with the pages from outside."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """The text of a page with links that lead to pages of the site."""
    source = ROOT / OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = (DOCS / page.file.src_uri).parent
    return "".join(
        part if n % 2 else LINK.sub(lambda link: _led(link, source, here, files), part)
        for n, part in enumerate(_kept_apart(markdown))
    )


def _kept_apart(markdown: str) -> list[str]:
    """Text and blocks of code in turn; code in a line stays in the text, as links have it in their words."""
    return re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)


def _led(link: re.Match[str], source: Path, here: Path, files: Files) -> str:
    """A link as it is written on the site."""
    words, target = link.groups()
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return link[0]
    there = (source.parent / path).resolve()
    names = {(ROOT / file).resolve(): name for name, file in OUTSIDE.items()}
    name = names.get(there) or (there.relative_to(DOCS).as_posix() if there.is_relative_to(DOCS) else "")
    if files.get_file_from_path(name) is None:
        return words if there.exists() else link[0]
    led = os.path.relpath(DOCS / name, here)
    return f"[{words}]({led}{'#' + anchor if anchor else ''})"
