"""The pages of the project name files that exist, link to what exists, and keep to their size.

Read are README.md, CONTRIBUTING.md and every page of docs/. A path in backquotes that starts at a top-level folder
(`passes/lower/cut.py`) is one of the tree; a bare name (`cut.py`) is the name of some file of it, unless programs are
emitted with a file of that name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_house import ORDER, ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MAP = ROOT / "docs" / "design.md"
MECHANISMS = sorted((ROOT / "docs" / "design").glob("*.md"))
FOLDERS = ("autopar", "passes", "costmodel", "codegen", "tests", "benchmarks", "examples", "docs")
PATH = re.compile(rf"`(?:python (?:-m pytest )?)?((?:{'|'.join(FOLDERS)})/[\w./-]*)")
MODULE = re.compile(rf"python -m ((?:{'|'.join(FOLDERS)})\.[\w.]+)")
BARE_NAME = re.compile(r"`(\w+\.py)`")
EMITTED = ("run.py", "pipeline.py", "user_factories.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")

MOST_LINES_OF_MAP = 250
MOST_WORDS = 40
LEAST_LINES, MOST_LINES = 80, 300
"""Lines of the page of a mechanism: shorter, and it is a section of another page; longer, and it is two."""

NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them of their text."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def section(page: Path, title: str) -> str:
    return re.split(r"^## ", page.read_text().split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[str]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not {line[:4], after[:4]} & {"|---"}]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_file_exists(page: Path) -> None:
    text = page.read_text()
    named = [ROOT / path for path in PATH.findall(text)]
    named += [ROOT / (module.replace(".", "/") + ".py") for module in MODULE.findall(text)]
    missing = [name_of(path) for path in named if not path.exists()]
    missing += [name for name in BARE_NAME.findall(text) if name not in NAMES and name not in EMITTED]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert not broken, broken


def test_the_map_fits_on_a_few_screens() -> None:
    assert len(MAP.read_text().splitlines()) <= MOST_LINES_OF_MAP


def test_the_glossary_is_short() -> None:
    words = rows(section(MAP, "Words"))
    assert 20 < len(words) <= MOST_WORDS


def test_the_map_names_every_room_in_the_order_of_their_imports() -> None:
    named = re.findall(r"`([\w/.]+)`", "".join(row.split("|")[1] for row in rows(section(MAP, "Rooms"))))
    rooms = [name.removeprefix("autopar/").removesuffix(".py").replace("/", ".") for name in named]
    assert rooms == ORDER.split()


@pytest.mark.parametrize("page", MECHANISMS, ids=name_of)
def test_a_mechanism_has_one_page_that_the_map_links(page: Path) -> None:
    assert f"(design/{page.name})" in MAP.read_text()
    assert LEAST_LINES <= len(page.read_text().splitlines()) <= MOST_LINES
